"""Rescores, with a causal language model, the tokens that the symbol decoder lists for each place of a text.

The decoder (symbol_decoder.py) lists members b of a place's symbol with their probabilities p. A beam search
(`BeamSearch`) goes through the text from left to right with several readings (hypotheses), and looks for

    the reading with the largest sum of   log p(b) + u log (P_reader(b | what precedes) / P_reader(b))

P_reader is the causal model's, and P_reader(b) its mean over places. u in TRIED_STRENGTHS is the one that reads most
tokens of held-out public text; with 0 the decoder's own reading stays. The listed members then get new probabilities,
given the best reading of what precedes,

    log P(b)  =  a log p(b) + u' log (P_reader(b | what precedes) / P_reader(b)) + const,

with the sum of the old ones. u' differs from u, since a text's whole reading is assumed here, errors included. a and u'
in TRIED_WEIGHTS make the true tokens of that public text least surprising. The guess of a place is the best reading's
token or the one with the largest P, whichever reads more of that text. If the decoder reads a text badly, the likeliest
whole text has fewer right tokens than the likeliest tokens one by one.

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

TRIED_STRENGTHS = (0.0, 0.2, 0.4, 0.6, 1.0)  # values of u in the module's formula that are tried
TRIED_WEIGHTS = np.array([(a, u) for a in np.linspace(0.4, 1.2, 5) for u in np.linspace(0, 1, 11)])  # a, u'
MAX_HELD_OUT_TEXTS = 100  # public texts by which u, a and u' are chosen, at most
TEXTS_TOGETHER = 32  # texts of one beam search: with fewer, the reader's weights are fetched more often


def log_likelihood_gains(reader: CausalReader, batch: ReadBatch, options: Ids, log_mean_probability: Floats) -> Floats:
    """Returns (m, k) log (P(first(b) | what precedes) / P(first(b))) of the options b (m, k) at each place.

    first(b) is the first of the reader's ids that spell b (decipherment/reader.py). The gain is 0 for an option that is
    NO_BELIEF or spelled as nothing.

    Args:
        reader: the causal model with its spelling.
        batch: the m places with the reader's states before them.
        options: (m, k) public ids, or NO_BELIEF.
        log_mean_probability: (V,) the logarithm of the mean probability of each of the reader's ids.
    """
    option_ids = np.maximum(options, 0)
    gains = (
        reader.log_likelihood_ratio(batch, option_ids, log_mean_probability)
        - reader.log_normaliser(batch.states)[:, None]
    )
    return np.where((options == NO_BELIEF) | reader.spelling.is_silent[option_ids], 0.0, gains)


class BeamSearch:
    """Runs a beam search over the tokens that each place of a text may be. A causal model reads what they spell.

    Each text has w readings, which grow by one token at a time from left to right. A text that is over gets NO_BELIEF.
    A reading's score is a sum over its places,

        sum of  score(place, b) + u log (P(first(b) | what precedes) / P(first(b)))

    with P the reader's, first(b) the first of its ids that spell b, and `score` what else is known of the place. The w
    best readings of each text go on. Tokens are spelled by rows of the reader's ids of different lengths, so that rows
    of the cache have gaps. The mask leaves these out, and positions do not count them. The row of a reading is its
    text's index times w, plus its own index among the text's readings.

    Attributes:
        tokens: (b, w, i) public ids so far.
        reading_scores: (b, w) the scores; -inf for a reading that does not exist.
        states: (b w, d) the reader's state after each row.
        is_joined: (b w,) whether what follows each row is joined to it.
    """

    def __init__(self, reader: CausalReader, text_count: int, width: int) -> None:
        """Starts with one empty reading for each of b = `text_count` texts, out of w = `width`."""
        self.reader, self.width = reader, width
        self.tokens = np.empty((text_count, width, 0), np.int64)
        self.reading_scores = np.full((text_count, width), -np.inf)
        self.reading_scores[:, 0] = 0
        self.max_length = min(
            WINDOW_TOKENS, int(getattr(reader.model.config, "max_position_embeddings", WINDOW_TOKENS))
        )
        self.states = reader.head.new_zeros(text_count * width, reader.head.shape[1])
        self.is_joined = np.ones(text_count * width, np.bool_)
        self._reset_cache()
        self._read_ids([np.array([reader.begin])] * (text_count * width))

    @torch.inference_mode()
    def grow(self, options: Ids, scores: Floats, weight: float, log_mean_probability: Floats) -> None:
        """Adds one place to every reading, and keeps the w best readings of each text.

        Args:
            options: (b, k) the public ids that the place may be.
            scores: (b, k) what else is known of them, as log-probabilities.
            weight: u in the class's formula.
            log_mean_probability: see `log_likelihood_gains`.
        """
        text_count, k = options.shape
        options_of_readings = np.repeat(options, self.width, axis=0)
        batch = ReadBatch(np.arange(len(options_of_readings)), self.states, self.is_joined)
        gains = log_likelihood_gains(self.reader, batch, options_of_readings, log_mean_probability).reshape(
            text_count, self.width, k
        )
        extended_scores = (self.reading_scores[:, :, None] + scores[:, None] + weight * gains).reshape(text_count, -1)
        best = np.argsort(-extended_scores, axis=1, kind="stable")[:, : self.width]
        self.reading_scores, parent = np.take_along_axis(extended_scores, best, 1), best // k
        newest_tokens = np.take_along_axis(options, best % k, 1)
        parent_tokens = np.take_along_axis(self.tokens, parent[:, :, None], 1)
        self.tokens = np.concatenate([parent_tokens, newest_tokens[:, :, None]], axis=2)
        self._select_rows((parent + self.width * np.arange(text_count)[:, None]).reshape(-1))
        self._append_tokens(newest_tokens.reshape(-1))

    def best_readings(self) -> Ids:
        """Returns (b, i) each text's best reading."""
        return self.tokens[np.arange(len(self.tokens)), self.reading_scores.argmax(1)]

    def _reset_cache(self) -> None:
        """Empties the model's cache, its mask and the lengths of its rows."""
        from transformers import DynamicCache

        self.cache, rows = DynamicCache(), len(self.is_joined)
        current_device = device.current()
        self.mask = torch.zeros(rows, 0, dtype=torch.int64, device=current_device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=current_device)

    def _select_rows(self, rows: Ids) -> None:
        """Replaces the rows by a selection of them, in this order. A row may occur several times."""
        index = device.tensor(rows)
        if self.mask.shape[1]:
            self.cache.reorder_cache(index)
        self.mask, self.length, self.states = self.mask[index], self.length[index], self.states[index]
        self.is_joined = self.is_joined[rows]

    def _append_tokens(self, newest: Ids) -> None:
        """Adds a public id to each row.

        Args:
            newest: (rows,) the ids; NO_BELIEF adds nothing.
        """
        spelling, rows = self.reader.spelling, list[Ids]()
        for row, token in enumerate(newest.tolist()):
            if token == NO_BELIEF or spelling.is_silent[token]:
                rows.append(np.empty(0, np.int64))
                continue
            rows.append(spelling.rows[int(self.is_joined[row] or spelling.clings[token])][token])
            self.is_joined[row] = spelling.opens[token]
        self._read_ids(rows)

    @torch.inference_mode()
    def _read_ids(self, rows: list[Ids]) -> None:
        """Reads ids of the reader at the end of each row. If a row gets too long, all rows begin a new window."""
        newest_length = max(len(row) for row in rows)
        if not newest_length:
            return
        if int(self.length.max()) + newest_length > self.max_length:
            self._reset_cache()
            rows = [np.array([self.reader.begin, *row]) for row in rows]
        lengths = torch.tensor([len(row) for row in rows], device=device.current())
        width = int(lengths.max())
        ids = torch.tensor(
            [[*row.tolist(), *[self.reader.begin] * (width - len(row))] for row in rows], device=device.current()
        )
        offsets = torch.arange(width, device=device.current())
        self.mask = torch.cat([self.mask, (offsets < lengths[:, None]).long()], dim=1)
        positions = (self.length[:, None] + offsets).clamp(max=self.max_length - 1)
        self.reader.budget.spend(work.forward(self.reader.model, ids.numel()))
        output = self.reader.model(
            input_ids=ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        last = output.last_hidden_state[torch.arange(len(rows)), (lengths - 1).clamp(min=0)].float()
        self.states = torch.where((lengths > 0)[:, None], last, self.states)
        self.length = self.length + lengths


@dataclass(frozen=True)
class PlaceOptions:
    """Holds the likeliest tokens of each place, with their probabilities.

    Attributes:
        tokens: (total, k) public ids, likeliest first, NO_BELIEF if there are fewer.
        probabilities: (total, k + 1) their probabilities, 0 where there is none. The last column, multiplied by a
            token's weight (`Guess.weights`), is the probability of a token that is not listed.
    """

    tokens: Ids
    probabilities: Floats

    @property
    def scores(self) -> Floats:
        """Returns (total, k) log-probabilities, -inf where there is no option; a place without options has one of 0."""
        with np.errstate(divide="ignore"):
            log_probabilities = np.log(self.probabilities[:, :-1])
        log_probabilities[log_probabilities.max(1) == -np.inf, 0] = 0
        return log_probabilities

    def reweigh(self, gains: Floats, weights: tuple[float, float]) -> Floats:
        """Returns (total, k) the probabilities combined with the reader's gains (total, k), by weights a, u'."""
        log_weights = weights[0] * self.scores + weights[1] * gains
        shares = np.exp(log_weights - np.logaddexp.reduce(log_weights, axis=1, keepdims=True))
        return np.asarray(shares * self.probabilities[:, :-1].sum(1, keepdims=True))


@dataclass(frozen=True)
class LanguageModelRescorer:
    """Chooses among the options of places by a causal reader.

    Attributes:
        reader: the causal model with its spelling.
        log_mean_probability: (V,) the logarithm of each id's mean probability.
        width: how many readings of a text go on.
        strength: u in the module's formula.
        weights: a and u' in the module's formula.
        uses_best_reading: whether the guess is the best reading's token; else it is that of the largest P.
    """

    reader: CausalReader
    log_mean_probability: Floats
    width: int
    strength: float = 0.0
    weights: tuple[float, float] = (1.0, 0.0)
    uses_best_reading: bool = True

    @classmethod
    def fit(
        cls,
        reader: CausalReader,
        width: int,
        texts: Sequences,
        listed: PlaceOptions,
        is_counted_token: NDArray[np.bool_],
        budget: Budget,
        rng: np.random.Generator,
    ) -> LanguageModelRescorer:
        """Returns a reader whose u, a and u' read public texts best.

        Args:
            texts: public texts, as ids.
            listed: the options for each place of these texts.
            is_counted_token: (n,) whether each public token counts when u is chosen.
            width: readings of each text that the beam search keeps.
            budget: values of u that it does not reach are not tried.
            rng: draws the places over which the reader's probabilities are averaged.
        """
        reading = Sequences(listed.tokens[:, 0], texts.lengths)
        states = [batch.states for batch in reader.read_texts(reading, np.arange(len(texts)))]
        all_states = torch.cat(states) if states else reader.head.new_zeros(0, reader.head.shape[1])
        unfitted = cls(
            reader,
            reader.log_mean_probability(
                all_states[torch.from_numpy(rng.permutation(len(all_states))[:PLACES_AVERAGED])]
            ),
            width,
        )
        readings = [
            replace(unfitted, strength=u).best_readings(texts, listed)
            for u in TRIED_STRENGTHS
            if budget.left() > 0 or not u
        ]
        is_counted = is_counted_token[texts.ids]
        right_counts = [int((best_reading == texts.ids)[is_counted].sum()) for best_reading in readings]
        best_strength = int(np.argmax(right_counts))
        gains = unfitted.gains(Sequences(readings[best_strength], texts.lengths), listed.tokens)
        is_true = listed.tokens == texts.ids[:, None]
        reweighed = [listed.reweigh(gains, (a, u)) for a, u in TRIED_WEIGHTS]
        best_weights = int(np.argmin([-np.log(probabilities[is_true] + 1e-30).sum() for probabilities in reweighed]))
        likeliest = np.take_along_axis(listed.tokens, reweighed[best_weights].argmax(1)[:, None], 1)[:, 0]
        likeliest_right = int((likeliest == texts.ids)[is_counted].sum())
        (a, u), uses_best_reading = TRIED_WEIGHTS[best_weights], right_counts[best_strength] >= likeliest_right
        return replace(
            unfitted,
            strength=TRIED_STRENGTHS[best_strength],
            weights=(float(a), float(u)),
            uses_best_reading=uses_best_reading,
        )

    def rescore(self, texts: Sequences, listed: PlaceOptions, budget: Budget) -> PlaceOptions:
        """Returns the options in a new order with new probabilities, unchanged for texts that time does not reach."""
        tokens, probabilities = listed.tokens.copy(), listed.probabilities.copy()
        for text_indices in batched(np.argsort(texts.lengths, kind="stable").tolist(), TEXTS_TOGETHER):
            if budget.left() <= 0:
                break
            places = np.flatnonzero(np.isin(texts.sequence_indices, text_indices))
            options = PlaceOptions(listed.tokens[places], listed.probabilities[places])
            lengths = texts.lengths[np.sort(text_indices)]
            best = self.best_readings(Sequences(texts.ids[places], lengths), options)
            reweighed = options.reweigh(self.gains(Sequences(best, lengths), options.tokens), self.weights)
            bonus = 2 * (options.tokens == best[:, None]) if self.uses_best_reading else 0  # puts it first
            order = np.argsort(-(reweighed + bonus), axis=1, kind="stable")
            tokens[places] = np.take_along_axis(options.tokens, order, 1)
            probabilities[places, :-1] = np.take_along_axis(reweighed, order, 1)
        return PlaceOptions(tokens, probabilities)

    def best_readings(self, texts: Sequences, listed: PlaceOptions) -> Ids:
        """Returns (total,) the best reading of each text.

        Args:
            texts: the texts, of which only the lengths are used.
            listed: the options for each place.
        """
        read_tokens = listed.tokens[:, 0].copy()
        if not self.strength:
            return read_tokens
        k, scores = listed.tokens.shape[1], listed.scores
        text_ends = np.cumsum(texts.lengths)
        for text_indices in batched(np.argsort(texts.lengths, kind="stable").tolist(), TEXTS_TOGETHER):
            beam = BeamSearch(self.reader, len(text_indices), self.width)
            for place in range(int(texts.lengths[text_indices].max())):
                options = np.full((len(text_indices), k), NO_BELIEF)
                option_scores = np.full(options.shape, -np.inf)
                option_scores[:, 0] = 0  # a text that is over has nothing to choose
                unfinished = np.flatnonzero(texts.lengths[text_indices] > place)
                places = (text_ends - texts.lengths)[text_indices][unfinished] + place
                options[unfinished], option_scores[unfinished] = listed.tokens[places], scores[places]
                beam.grow(options, option_scores, self.strength, self.log_mean_probability)
            for index, best in zip(text_indices, beam.best_readings(), strict=True):
                length = texts.lengths[index]
                read_tokens[text_ends[index] - length : text_ends[index]] = best[:length]
        return read_tokens

    def gains(self, reading: Sequences, options: Ids) -> Floats:
        """Returns (total, k) the gains of the options at each place, given the reading before it.

        The gains are those of `log_likelihood_gains`.
        """
        gains = np.zeros(options.shape)
        for batch in self.reader.read_texts(reading, np.arange(len(reading))):
            gains[batch.places] = log_likelihood_gains(
                self.reader, batch, options[batch.places], self.log_mean_probability
            )
        return gains
