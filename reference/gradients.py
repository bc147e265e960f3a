"""Defences of gradients, literally: plain numbers, loops, nothing of Milkglass. The oracle of tests/gradients."""

from __future__ import annotations

import math
from decimal import Decimal


def clip(vector: list[float], most: float) -> list[float]:
    """Abadi et al. 2016, algorithm 1: g / max(1, |g| / C)."""
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / max(1.0, length / most) for x in vector]


def mean_of_clipped(vectors: list[list[float]], most: float) -> list[float]:
    """DP-SGD before its noise: each example's vector is clipped, then they are averaged."""
    kept = [clip(one, most) for one in vectors]
    return [math.fsum(column) / len(vectors) for column in zip(*kept, strict=True)]


def keep_largest(vector: list[float], ratio: str) -> list[float]:
    """All but the largest are set to 0; `ratio` of them are dropped, rounded down."""
    left = len(vector) - int(Decimal(ratio) * len(vector))
    order = sorted(range(len(vector)), key=lambda i: (-abs(vector[i]), i))
    chosen = set(order[:left])
    return [x if i in chosen else 0.0 for i, x in enumerate(vector)]


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Balle and Wang 2018, theorem 8, with sensitivity 1 and standard deviation `noise`."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return phi(1 / (2 * noise) - epsilon * noise) - math.exp(epsilon) * phi(-1 / (2 * noise) - epsilon * noise)
