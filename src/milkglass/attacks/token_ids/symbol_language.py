"""A language model over the members of symbols: what the decoder of symbols lists, a causal model that has read far
more weighs.

The decoder (symbol_decoder.py) gives each place a list of members with their chances p. The reader goes through a text
from left to right with several readings at a time, and finds (symbol_beam.py)

    the reading with the largest sum of   log p(b) + u log (P_reader(b | what precedes) / P_reader(b))

u in STRENGTHS is the one with which most tokens are read of public text on which the decoder was not trained; with 0
the decoder's own reading stays. With the best reading as what precedes, the listed members get new chances,

    log P(b)  =  a log p(b) + u' log (P_reader(b | what precedes) / P_reader(b)) + const,

whose sum is that of the old ones. Another u' than u: here a text's whole reading is taken for granted, errors and all,
and so a, u' in WEIGHTS are those by which the true tokens of that public text are least surprising. The guess of a
place is the best reading's token, or the one with the largest P: whichever reads more of that text. Of a text that the
decoder reads badly, the likeliest text as a whole has fewer right tokens than the likeliest tokens one by one.

"Most" and "more" are of the tokens that count. An attacker who wants content leaves out the commonest, which a large u
misses.
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
    """What each place may be.

    Attributes:
        tokens: (total, k) public ids, likeliest first, NO_BELIEF where there are fewer.
        chances: (total, k + 1) of each, 0 where there is none, and last of each token that is not listed.
    """

    tokens: Ids
    chances: Floats

    @property
    def scores(self) -> Floats:
        """(total, k) logarithms of the chances; a place without any has one option, which is nothing."""
        with np.errstate(divide="ignore"):
            result = np.log(self.chances[:, :-1])
        result[result.max(1) == -np.inf, 0] = 0
        return result

    def weighed(self, said: Floats, weights: tuple[float, float]) -> Floats:
        """(total, k) the chances with what the reader says (total, k). weights: a, u'."""
        both = weights[0] * self.scores + weights[1] * said
        shares = np.exp(both - np.logaddexp.reduce(both, axis=1, keepdims=True))
        return np.asarray(shares * self.chances[:, :-1].sum(1, keepdims=True))


@dataclass(frozen=True)
class LanguageReader:
    """A reader of lists, with its weights.

    Attributes:
        common: (V,) how likely each of its ids is on average, a logarithm.
        width: readings of a text that go on.
        strength: u.
        weights: a, u'.
        whole: whether the guess is the best reading's; otherwise by P.
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
        """With weights that are chosen on public texts (their true tokens), u of those that the budget reaches.

        Args:
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
        """The lists in a new order with new chances; those of texts that the budget does not reach stay."""
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
        """(total,) the best reading of each text. texts: of any ids, their lengths count."""
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
        """(total, k) the reader's gain of the options at each place, with the reading before it."""
        result = np.zeros(options.shape)
        for one in self.reader.reads(reading, np.arange(len(reading))):
            result[one.where] = gain(self.reader, one, options[one.where], self.common)
        return result
