"""Randomised response over all words (Kairouz et al. 2016, section 3.1): the word itself, or any other with equal odds.

    p(x | x) = e^eps / (e^eps + m - 1)         p(y | x) = 1 / (e^eps + m - 1) for each other of m words

It does not use which words are alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from milkglass.accounting import format_epsilon
from milkglass.noise.selection import BEST_WEIGHT
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.sanitizers.method import SanitizerMethod
from milkglass.sanitizers.sanitizer import UNKNOWN, Sanitizer
from milkglass.sanitizers.table import Ids, WordVectors


@dataclass(frozen=True, eq=False)
class RandomResponse(Sanitizer):
    """The mechanism. An unknown word becomes any word, with equal probabilities."""

    paper: ClassVar[Paper] = Paper(
        "Discrete Distribution Estimation under Local Privacy", "Kairouz, Bonawitz, Ramage", 2016, "ICML"
    )

    @property
    def guarantee(self) -> str | None:
        return f"{format_epsilon(self.epsilon)}-DP between any two words, for one word"

    def draw(self, places: Ids, stream: Stream) -> Ids:
        m, t = len(self.vectors), len(places)
        others = (m - 1) * math.ceil(BEST_WEIGHT * math.exp(-self.epsilon))  # whole numbers: the odds hold exactly
        keeps = stream.integers(BEST_WEIGHT + others, t) < BEST_WEIGHT
        other = (places + 1 + stream.integers(m - 1, t)) % m
        return np.where(places == UNKNOWN, stream.integers(m, t), np.where(keeps, places, other))


@dataclass(frozen=True)
class RandomResponseMethod(SanitizerMethod):
    name: ClassVar[str] = "random-response"

    def sanitizer(self, table: WordVectors, counts: NDArray[np.int64] | None) -> RandomResponse:
        return RandomResponse(table, self.epsilon)
