"""Finds an encoder's texts: one token a position, such that all states that enter the second layer are in its span.

The first layer shows which tokens stand at each position, over all texts of the batch. The second shows which tokens
belong to one text, since every state of a text depends on all of its tokens. If there are few combinations, all are
tried. Otherwise a random text is changed position by position, each time to the token whose states are nearest, until
nothing changes. The best of several starts is taken.

If a position has as many tokens outside all found texts as there are texts left, each of these texts has one of them.
If texts share tokens there are fewer, and all tokens stay. No text is found twice, unless every token is in a found
text and no other text is in the span. Then the batch holds one of them again, and the spans do not show which.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from milkglass.attacks.gradients.dager.layers import Entrance, farthest
from milkglass.attacks.gradients.dager.prefixes import Text, blocks, states
from milkglass.attacks.gradients.spans import Span
from milkglass.threat.budget import Budget


@dataclass(frozen=True, eq=False)
class Combiner:
    """Combines the tokens of each position into texts.

    Attributes:
        entrance, spans: of the second layer.
        tolerance: how far each state may be from the spans.
        combinations: the most combinations that are tried one by one.
        starts: of the search if there are more.
    """

    entrance: Entrance
    spans: Sequence[Span]
    tolerance: float
    combinations: int
    starts: int

    def texts(
        self, options: Sequence[Sequence[int]], lengths: Sequence[int], known: bool, budget: Budget,
        rng: np.random.Generator, count: int,
    ) -> list[Text]:  # fmt: skip
        """Returns `count` texts.

        Args:
            options: the tokens of each position.
            lengths: the lengths of the texts.
            known: whether there is one text of each of these lengths; else each text may have any of them.
        """
        left, expected = [list(one) for one in options], sorted(lengths)
        result = list[Text]()
        for number in range(count):
            tried = [self.best(left[:length], result, budget, rng) for length in sorted(set(expected))]
            text, away = min(tried, key=lambda one: one[1])
            if not text or (away >= self.tolerance and not _unmet(options, result)):
                again = [one for one in result if len(one) in expected]
                text = min(again, key=lambda one: self._nearest([one])[1]) if again else text
            if not text:
                break
            result.append(text)
            if known:
                expected.remove(len(text))
            if budget.left() <= 0 or (known and not expected):
                break
            for position, part in enumerate(options):
                others = sum(one > position for one in expected) if known else count - number - 1
                new = [token for at, token in _unmet(options, result) if at == position]
                left[position] = new if new and len(new) >= others else list(part)
        return result

    def best(
        self, options: Sequence[Sequence[int]], previous: Sequence[Text], budget: Budget, rng: np.random.Generator
    ) -> tuple[Text, float]:
        """Returns the nearest text of one length that is not in `previous`, and the mean distance of its states.

        The distance is infinite if there is no such text.
        """
        if not all(options):
            return (), math.inf
        if math.prod(len(one) for one in options) <= self.combinations:
            fresh = [one for one in itertools.product(*options) if one not in {*previous}]
            return self._nearest(fresh) if fresh else ((), math.inf)
        nearest: tuple[Text, float] = ((), math.inf)
        for _ in range(self.starts * (len(previous) + 1)):  # many of them end at a previous text
            text, away = self._descended(_fresh(options, previous, rng), rng)
            if text not in previous:
                nearest = min(nearest, (text, away), key=lambda one: one[1])
            if nearest[1] < self.tolerance or budget.left() <= 0:
                break
        return nearest

    def _nearest(self, texts: list[Text]) -> tuple[Text, float]:
        away = torch.cat([farthest(self.spans, states(self.entrance, part)).mean(1) for part in blocks(texts)])
        at = int(away.argmin())
        return texts[at], float(away[at])

    def _descended(self, options: Sequence[Sequence[int]], rng: np.random.Generator) -> tuple[Text, float]:
        text = tuple(int(rng.choice(one)) for one in options)
        away = self._nearest([text])[1]
        while True:
            before = away
            for position in rng.permutation(len(options)).tolist():
                if len(options[position]) > 1:
                    near = [(*text[:position], token, *text[position + 1 :]) for token in options[position]]
                    text, away = self._nearest(near)
            if away >= before - 1e-12:
                return text, away


def _unmet(options: Sequence[Sequence[int]], previous: Sequence[Text]) -> list[tuple[int, int]]:
    """Returns (position, token) of the options that are in no previous text."""
    met = {(position, token) for text in previous for position, token in enumerate(text)}
    every = [(position, token) for position, part in enumerate(options) for token in part]
    return [one for one in every if one not in met]


def _fresh(
    options: Sequence[Sequence[int]], previous: Sequence[Text], rng: np.random.Generator
) -> list[Sequence[int]]:  # fmt: skip
    """Returns the options, restricted at random to one token at some positions such that no previous text remains.

    It restricts one position if a token is in no previous text, else as many as needed.
    """
    free, alike = list(options), [one for one in previous if len(one) == len(options)]
    if not alike:
        return free
    if unmet := _unmet(options, previous):
        position, token = unmet[int(rng.integers(len(unmet)))]
        free[position] = [token]
        return free
    for position in rng.permutation(len(free)).tolist():
        token = int(rng.choice(free[position]))
        free[position] = [token]
        alike = [one for one in alike if one[position] == token]
        if not alike:
            break
    return free
