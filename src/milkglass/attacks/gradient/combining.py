"""Encoders: one token a position, together such that all that enters the second layer is in the span of its gradients.

The first layer has told which tokens there were at each position, of all texts of the batch together. Which belong to
one text shows in the second: every state of a text depends on all of its tokens. While there are few combinations, all
are tried. Above that, a text starts at random and is changed one position after the other, each to the token with
which the states are nearest, until nothing changes; the best of several starts is taken. A text that was found takes
its tokens away from the others, where there are enough for each to have its own.

What this module does not know: decoders, how the first layer was read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from milkglass.attacks.gradient.first_layer import farthest
from milkglass.attacks.gradient.layers import Entrance
from milkglass.attacks.gradient.prefixes import Text, states
from milkglass.attacks.gradient.spans import Span
from milkglass.threat import Budget

TOKENS = 8192  # in a forward


@dataclass(frozen=True, eq=False)
class Combiner:
    """entrance, spans: of the second layer. tolerance: of every state. combinations: tried one by one up to so many.
    starts: of the search above that."""

    entrance: Entrance
    spans: Sequence[Span]
    tolerance: float
    combinations: int
    starts: int

    def texts(
        self, options: Sequence[Sequence[int]], lengths: Sequence[int], known: bool, budget: Budget,
        rng: np.random.Generator, count: int,
    ) -> list[Text]:  # fmt: skip
        """`count` texts of these lengths; not known: of any of them each. options: tokens of each position."""
        left, wanted, found = [list(one) for one in options], sorted(lengths), []
        for number in range(count):
            tried = [self.best(left[:length], budget, rng) for length in sorted(set(wanted))]
            text = min(tried, key=lambda one: one[1])[0]
            found.append(text)
            if known:
                wanted.remove(len(text))
            for position, token in enumerate(text):
                others = sum(one > position for one in wanted) if known else count - number - 1
                if len(left[position]) > others:
                    left[position].remove(token)
            if budget.left() <= 0 or (known and not wanted):
                break
            if any(not one for one in left[: min(wanted)]):
                break
        return found

    def best(self, options: Sequence[Sequence[int]], budget: Budget, rng: np.random.Generator) -> tuple[Text, float]:
        """The nearest text of one length, and the mean distance of its states; infinite where a position is empty."""
        if not all(options):
            return (), math.inf
        if math.prod(len(one) for one in options) <= self.combinations:
            return self._nearest(list(itertools.product(*options)))
        found: tuple[Text, float] = ((), math.inf)
        for _ in range(self.starts):
            found = min(found, self._descended(options, rng), key=lambda one: one[1])
            if found[1] < self.tolerance or budget.left() <= 0:
                break
        return found

    def _nearest(self, texts: list[Text]) -> tuple[Text, float]:
        step = max(1, TOKENS // len(texts[0]))
        blocks = [texts[start : start + step] for start in range(0, len(texts), step)]
        away = torch.cat([farthest(self.spans, states(self.entrance, some)).mean(1) for some in blocks])
        at = int(away.argmin())
        return texts[at], float(away[at])

    def _descended(self, options: Sequence[Sequence[int]], rng: np.random.Generator) -> tuple[Text, float]:
        text = tuple(int(rng.choice(one)) for one in options)
        away = math.inf
        while True:
            before = away
            for position in rng.permutation(len(options)).tolist():
                if len(options[position]) > 1:
                    near = [(*text[:position], token, *text[position + 1 :]) for token in options[position]]
                    text, away = self._nearest(near)
            if away >= before - 1e-12:
                return text, away
