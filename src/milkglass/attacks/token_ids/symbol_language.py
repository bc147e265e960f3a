"""A causal language model weighs the members of symbols that the symbol decoder lists.

The decoder (symbol_decoder.py) gives each place a list of members with their probabilities p. The reader goes through a
text from left to right with several readings at a time, and finds (`Beam`)

    the reading with the largest sum of   log p(b) + u log (P_reader(b | what precedes) / P_reader(b))

u in STRENGTHS is the one that reads most tokens of held-out public text; with 0 the decoder's own reading stays. The
listed members then get new probabilities, with the best reading as what precedes,

    log P(b)  =  a log p(b) + u' log (P_reader(b | what precedes) / P_reader(b)) + const,

with the sum of the old ones. u' differs from u, since a text's whole reading is assumed here, errors included. a and u'
in WEIGHTS make the true tokens of that public text least surprising. The guess of a place is the best reading's token
or the one with the largest P, whichever reads more of that text. If the decoder reads a text badly, the likeliest whole
text has fewer right tokens than the likeliest tokens one by one.

"Most" and "more" refer to the tokens that count. An attacker who wants content leaves out the most frequent tokens,
since a large u loses content.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device
from milkglass.attacks import work
from milkglass.attacks.token_ids.decipherment.bigrams import Floats
from milkglass.attacks.token_ids.decipherment.reader import PLACES_AVERAGED, WINDOW_TOKENS, CausalReader, ReadBatch
from milkglass.sequences import Ids, Sequences, batched
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF

STRENGTHS = (0.0, 0.2, 0.4, 0.6, 1.0)  # u above
WEIGHTS = np.array([(a, u) for a in np.linspace(0.4, 1.2, 5) for u in np.linspace(0, 1, 11)])  # a, u'
HELD_OUT = 100  # texts by which they are chosen, at most
TOGETHER = 32  # texts of a beam search: with few, the reader's weights are fetched for each of their tokens


def gain(reader: CausalReader, read: ReadBatch, options: Ids, common: Floats) -> Floats:
    """Returns (m, k) log P(first(b) | what precedes) / P(first(b)) of the options (m, k) at each place.

    It is 0 for an option that is NO_BELIEF or spelled as nothing. `common` (V,) is the reader's.
    """
    option_ids = np.maximum(options, 0)
    gains = reader.log_likelihood_ratio(read, option_ids, common) - reader.normaliser(read.states)[:, None]
    return np.where((options == NO_BELIEF) | reader.spelling.silent[option_ids], 0.0, gains)


class Beam:
    """Beam search over the tokens that each place of a text may be, with a causal model that reads what they spell.

    Each text has w readings, which grow by one token at a time from left to right. A text that is over gets NO_BELIEF.
    A reading's score is a sum over its places,

        total  =  sum of  score(place, b) + u log (P(first(b) | what precedes) / P(first(b)))

    with P the reader's (decipherment/reader.py) and `score` what else is known of the place. The w best readings of
    each text go on. Tokens are spelled by rows of the reader's ids of different lengths, so that rows of the cache have
    gaps. The mask leaves these out, and positions do not count them. A row is a text's number times w plus a reading's
    number.

    Attributes:
        tokens: (b, w, i) public ids so far.
        total: (b, w) the scores; -inf for a reading that does not exist.
    """

    def __init__(self, reader: CausalReader, texts: int, width: int) -> None:
        """Starts with one empty reading for each of b = `texts` texts, out of w = `width`."""
        self.reader, self.width = reader, width
        self.tokens = np.empty((texts, width, 0), np.int64)
        self.total = np.full((texts, width), -np.inf)
        self.total[:, 0] = 0
        self.longest = min(WINDOW_TOKENS, int(getattr(reader.model.config, "max_position_embeddings", WINDOW_TOKENS)))
        self.states = reader.head.new_zeros(texts * width, reader.head.shape[1])
        self.joined = np.ones(texts * width, np.bool_)
        self._begin_again()
        self._spell([np.array([reader.begin])] * (texts * width))

    @torch.inference_mode()
    def grow(self, options: Ids, scores: Floats, weight: float, common: Floats) -> None:
        """Adds one place to every reading, from `options` and `scores` (b, k) of each text; `weight` is u."""
        texts, k = options.shape
        options_of_readings = np.repeat(options, self.width, axis=0)
        read = ReadBatch(np.arange(len(options_of_readings)), self.states, self.joined)
        gains = gain(self.reader, read, options_of_readings, common).reshape(texts, self.width, k)
        total = (self.total[:, :, None] + scores[:, None] + weight * gains).reshape(texts, -1)
        best = np.argsort(-total, axis=1, kind="stable")[:, : self.width]
        self.total, parent = np.take_along_axis(total, best, 1), best // k
        newest_tokens = np.take_along_axis(options, best % k, 1)
        kept = np.take_along_axis(self.tokens, parent[:, :, None], 1)
        self.tokens = np.concatenate([kept, newest_tokens[:, :, None]], axis=2)
        self._keep((parent + self.width * np.arange(texts)[:, None]).reshape(-1))
        self._write(newest_tokens.reshape(-1))

    def best(self) -> Ids:
        """Returns (b, i) each text's best reading."""
        return self.tokens[np.arange(len(self.tokens)), self.total.argmax(1)]

    def _begin_again(self) -> None:
        """Empties the cache of the model and what is counted of it."""
        from transformers import DynamicCache

        self.cache, rows = DynamicCache(), len(self.joined)
        current_device = device.current()
        self.mask = torch.zeros(rows, 0, dtype=torch.int64, device=current_device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=current_device)

    def _keep(self, rows: Ids) -> None:
        index = device.tensor(rows)
        if self.mask.shape[1]:
            self.cache.reorder_cache(index)
        self.mask, self.length, self.states = self.mask[index], self.length[index], self.states[index]
        self.joined = self.joined[rows]

    def _write(self, newest: Ids) -> None:
        """Adds a public id to each row. `newest` is (rows,)."""
        spelling, rows = self.reader.spelling, list[Ids]()
        for row, token in enumerate(newest.tolist()):
            if token == NO_BELIEF or spelling.silent[token]:
                rows.append(np.empty(0, np.int64))
                continue
            rows.append(spelling.rows[int(self.joined[row] or spelling.clings[token])][token])
            self.joined[row] = spelling.opens[token]
        self._spell(rows)

    @torch.inference_mode()
    def _spell(self, rows: list[Ids]) -> None:
        """Reads the reader's ids with which each row goes on. A text that is too long goes on in a new part."""
        longest = max(len(one) for one in rows)
        if not longest:
            return
        if int(self.length.max()) + longest > self.longest:
            self._begin_again()
            rows = [np.array([self.reader.begin, *one]) for one in rows]
        lengths = torch.tensor([len(one) for one in rows], device=device.current())
        width = int(lengths.max())
        ids = torch.tensor(
            [[*one.tolist(), *[self.reader.begin] * (width - len(one))] for one in rows], device=device.current()
        )
        offsets = torch.arange(width, device=device.current())
        self.mask = torch.cat([self.mask, (offsets < lengths[:, None]).long()], dim=1)
        positions = (self.length[:, None] + offsets).clamp(max=self.longest - 1)
        self.reader.budget.spend(work.run(self.reader.model, ids.numel()))
        output = self.reader.model(
            input_ids=ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        last = output.last_hidden_state[torch.arange(len(rows)), (lengths - 1).clamp(min=0)].float()
        self.states = torch.where((lengths > 0)[:, None], last, self.states)
        self.length = self.length + lengths


@dataclass(frozen=True)
class Listed:
    """The options of each place.

    Attributes:
        tokens: (total, k) public ids, likeliest first, NO_BELIEF if there are fewer.
        chances: (total, k + 1) their probabilities, 0 if there is none; the last is that of each token not listed.
    """

    tokens: Ids
    chances: Floats

    @property
    def scores(self) -> Floats:
        """Returns (total, k) log-probabilities. A place without options has one, which is nothing."""
        with np.errstate(divide="ignore"):
            log_chances = np.log(self.chances[:, :-1])
        log_chances[log_chances.max(1) == -np.inf, 0] = 0
        return log_chances

    def weighed(self, gains: Floats, weights: tuple[float, float]) -> Floats:
        """Returns (total, k) the probabilities combined with what the reader says (total, k), by weights a, u'."""
        log_weights = weights[0] * self.scores + weights[1] * gains
        shares = np.exp(log_weights - np.logaddexp.reduce(log_weights, axis=1, keepdims=True))
        return np.asarray(shares * self.chances[:, :-1].sum(1, keepdims=True))


@dataclass(frozen=True)
class LanguageReader:
    """A reader of lists, with its weights u (strength) and a, u'.

    Attributes:
        common: (V,) the logarithm of each id's mean probability.
        width: readings of a text that go on.
        whole: whether the guess is the best reading's token; else it is that of the largest P.
    """

    reader: CausalReader
    common: Floats
    width: int
    strength: float = 0.0
    weights: tuple[float, float] = (1.0, 0.0)
    whole: bool = True

    @classmethod
    def chosen(
        cls,
        reader: CausalReader,
        width: int,
        texts: Sequences,
        listed: Listed,
        counted: NDArray[np.bool_],
        budget: Budget,
        rng: np.random.Generator,
    ) -> LanguageReader:
        """Returns a reader with weights chosen on public texts and their lists, among the u that the budget reaches.

        `counted` (n,) says which public tokens count when u is chosen.
        """
        reading = Sequences(listed.tokens[:, 0], texts.lengths)
        states = [one.states for one in reader.reads(reading, np.arange(len(texts)))]
        all_states = torch.cat(states) if states else reader.head.new_zeros(0, reader.head.shape[1])
        plain = cls(
            reader,
            reader.log_mean_probability(
                all_states[torch.from_numpy(rng.permutation(len(all_states))[:PLACES_AVERAGED])]
            ),
            width,
        )
        readings = [
            replace(plain, strength=one).best(texts, listed) for one in STRENGTHS if budget.left() > 0 or not one
        ]
        is_counted = counted[texts.ids]
        right_counts = [int((one == texts.ids)[is_counted].sum()) for one in readings]
        number = int(np.argmax(right_counts))
        gains = plain.gains(Sequences(readings[number], texts.lengths), listed.tokens)
        true = listed.tokens == texts.ids[:, None]
        weighed = [listed.weighed(gains, (a, u)) for a, u in WEIGHTS]
        least = int(np.argmin([-np.log(one[true] + 1e-30).sum() for one in weighed]))
        likeliest = np.take_along_axis(listed.tokens, weighed[least].argmax(1)[:, None], 1)[:, 0]
        (a, u), takes_whole = WEIGHTS[least], right_counts[number] >= int((likeliest == texts.ids)[is_counted].sum())
        return replace(plain, strength=STRENGTHS[number], weights=(float(a), float(u)), whole=takes_whole)

    def read(self, texts: Sequences, listed: Listed, budget: Budget) -> Listed:
        """Returns the lists in a new order with new probabilities, unchanged for texts that time does not reach."""
        tokens, chances = listed.tokens.copy(), listed.chances.copy()
        for text_numbers in batched(np.argsort(texts.lengths, kind="stable").tolist(), TOGETHER):
            if budget.left() <= 0:
                break
            places = np.flatnonzero(np.isin(texts.sequence_indices, text_numbers))
            options = Listed(listed.tokens[places], listed.chances[places])
            lengths = texts.lengths[np.sort(text_numbers)]
            best = self.best(Sequences(texts.ids[places], lengths), options)
            weighed = options.weighed(self.gains(Sequences(best, lengths), options.tokens), self.weights)
            first = 2 * (options.tokens == best[:, None]) if self.whole else 0
            order = np.argsort(-(weighed + first), axis=1, kind="stable")
            tokens[places] = np.take_along_axis(options.tokens, order, 1)
            chances[places, :-1] = np.take_along_axis(weighed, order, 1)
        return Listed(tokens, chances)

    def best(self, texts: Sequences, listed: Listed) -> Ids:
        """Returns (total,) the best reading of each text. Only the lengths of `texts` matter."""
        read_tokens = listed.tokens[:, 0].copy()
        if not self.strength:
            return read_tokens
        k, scores = listed.tokens.shape[1], listed.scores
        text_ends = np.cumsum(texts.lengths)
        for text_numbers in batched(np.argsort(texts.lengths, kind="stable").tolist(), TOGETHER):
            beam = Beam(self.reader, len(text_numbers), self.width)
            for place in range(int(texts.lengths[text_numbers].max())):
                options = np.full((len(text_numbers), k), NO_BELIEF)
                scores_listed = np.full(options.shape, -np.inf)
                scores_listed[:, 0] = 0  # a text that is over has nothing to choose
                unfinished = np.flatnonzero(texts.lengths[text_numbers] > place)
                places = (text_ends - texts.lengths)[text_numbers][unfinished] + place
                options[unfinished], scores_listed[unfinished] = listed.tokens[places], scores[places]
                beam.grow(options, scores_listed, self.strength, self.common)
            for number, best in zip(text_numbers, beam.best(), strict=True):
                length = texts.lengths[number]
                read_tokens[text_ends[number] - length : text_ends[number]] = best[:length]
        return read_tokens

    def gains(self, reading: Sequences, options: Ids) -> Floats:
        """Returns (total, k) the reader's gain (see `gain`) of the options at each place, after the reading so far."""
        gains = np.zeros(options.shape)
        for batch in self.reader.reads(reading, np.arange(len(reading))):
            gains[batch.places] = gain(self.reader, batch, options[batch.places], self.common)
        return gains
