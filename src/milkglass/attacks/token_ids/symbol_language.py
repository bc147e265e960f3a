"""A causal language model weighs the members of symbols that the symbol decoder lists.

The decoder (symbol_decoder.py) gives each place a list of members with their probabilities p. The reader goes through a
text from left to right with several readings at a time, and finds (symbol_beam.py)

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

from milkglass.attacks.token_ids.decipherment.bigrams import Floats
from milkglass.attacks.token_ids.decipherment.reader import PLACES_AVERAGED, CausalReader
from milkglass.attacks.token_ids.symbol_beam import Beam, gain
from milkglass.sequences import Ids, Sequences, batched
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF

STRENGTHS = (0.0, 0.2, 0.4, 0.6, 1.0)  # u above
WEIGHTS = np.array([(a, u) for a in np.linspace(0.4, 1.2, 5) for u in np.linspace(0, 1, 11)])  # a, u'
HELD_OUT = 100  # texts by which they are chosen, at most
TOGETHER = 32  # texts of a beam search: with few, the reader's weights are fetched for each of their tokens


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
            result = np.log(self.chances[:, :-1])
        result[result.max(1) == -np.inf, 0] = 0
        return result

    def weighed(self, said: Floats, weights: tuple[float, float]) -> Floats:
        """Returns (total, k) the probabilities combined with what the reader says (total, k).

        `weights` are a and u'.
        """
        both = weights[0] * self.scores + weights[1] * said
        shares = np.exp(both - np.logaddexp.reduce(both, axis=1, keepdims=True))
        return np.asarray(shares * self.chances[:, :-1].sum(1, keepdims=True))


@dataclass(frozen=True)
class LanguageReader:
    """A reader of lists, with its weights.

    Attributes:
        reader: the causal model.
        common: (V,) the logarithm of each id's mean probability.
        width: readings of a text that go on.
        strength: u.
        weights: a, u'.
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
        """Returns a reader with weights that are chosen on public texts, among the u that the budget reaches.

        Args:
            texts: the true tokens.
            listed: of the texts' places.
            counted: (n,) which public tokens count when u is chosen.
        """
        reading = Sequences(listed.tokens[:, 0], texts.lengths)
        states = [one.states for one in reader.reads(reading, np.arange(len(texts)))]
        every = torch.cat(states) if states else torch.zeros(0, reader.head.shape[1])
        plain = cls(
            reader, reader.common(every[torch.from_numpy(rng.permutation(len(every))[:PLACES_AVERAGED])]), width
        )
        readings = [
            replace(plain, strength=one).best(texts, listed) for one in STRENGTHS if budget.left() > 0 or not one
        ]
        here = counted[texts.ids]
        right = [int((one == texts.ids)[here].sum()) for one in readings]
        number = int(np.argmax(right))
        said = plain.said(Sequences(readings[number], texts.lengths), listed.tokens)
        true = listed.tokens == texts.ids[:, None]
        weighed = [listed.weighed(said, (a, u)) for a, u in WEIGHTS]
        least = int(np.argmin([-np.log(one[true] + 1e-30).sum() for one in weighed]))
        likeliest = np.take_along_axis(listed.tokens, weighed[least].argmax(1)[:, None], 1)[:, 0]
        (a, u), whole = WEIGHTS[least], right[number] >= int((likeliest == texts.ids)[here].sum())
        return replace(plain, strength=STRENGTHS[number], weights=(float(a), float(u)), whole=whole)

    def read(self, texts: Sequences, listed: Listed, budget: Budget) -> Listed:
        """Returns the lists in a new order with new probabilities, unchanged for texts that time does not reach."""
        tokens, chances = listed.tokens.copy(), listed.chances.copy()
        for numbers in batched(np.argsort(texts.lengths, kind="stable").tolist(), TOGETHER):
            if budget.left() <= 0:
                break
            at = np.flatnonzero(np.isin(texts.owner, numbers))
            part, some = Listed(listed.tokens[at], listed.chances[at]), texts.chosen(np.sort(numbers))
            best = self.best(some, part)
            weighed = part.weighed(self.said(Sequences(best, some.lengths), part.tokens), self.weights)
            first = 2 * (part.tokens == best[:, None]) if self.whole else 0
            order = np.argsort(-(weighed + first), axis=1, kind="stable")
            tokens[at] = np.take_along_axis(part.tokens, order, 1)
            chances[at, :-1] = np.take_along_axis(weighed, order, 1)
        return Listed(tokens, chances)

    def best(self, texts: Sequences, listed: Listed) -> Ids:
        """Returns (total,) the best reading of each text. Only the lengths of `texts` matter."""
        result = listed.tokens[:, 0].copy()
        if not self.strength:
            return result
        k, scores = listed.tokens.shape[1], listed.scores
        ends = np.cumsum(texts.lengths)
        for numbers in batched(np.argsort(texts.lengths, kind="stable").tolist(), TOGETHER):
            beam = Beam(self.reader, len(numbers), self.width)
            for place in range(int(texts.lengths[numbers].max())):
                options, known = np.full((len(numbers), k), NO_BELIEF), np.full((len(numbers), k), -np.inf)
                known[:, 0] = 0  # a text that is over has nothing to choose
                there = np.flatnonzero(texts.lengths[numbers] > place)
                at = (ends - texts.lengths)[numbers][there] + place
                options[there], known[there] = listed.tokens[at], scores[at]
                beam.grow(options, known, self.strength, self.common)
            for number, found in zip(numbers, beam.best(), strict=True):
                result[ends[number] - texts.lengths[number] : ends[number]] = found[: texts.lengths[number]]
        return result

    def said(self, reading: Sequences, options: Ids) -> Floats:
        """Returns (total, k) the reader's gain of the options at each place, after the reading before it."""
        result = np.zeros(options.shape)
        for one in self.reader.reads(reading, np.arange(len(reading))):
            result[one.where] = gain(self.reader, one, options[one.where], self.common)
        return result
