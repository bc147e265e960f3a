"""Cost against the sizes of a table, for obfuscation and for the nearest rows: the points of the page's plots."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from frame.clustered import clustered
from frame.figure import Curve
from frame.rounds import seconds

from milkglass.nearest.top_k import ExactIndex
from milkglass.schemes.obfuslm import ObfusLM
from parts.obfuscate import bare_products

N, D, K, BETA = 16_000, 384, 10, 0.99  # where another size changes
SIZES = {"n": (4000, 8000, 16_000, 32_000), "d": (96, 192, 384, 768, 1536), "k": (5, 10, 20, 40)}
QUICK = {"n": (600, 900), "d": (16, 32), "k": (3, 5)}
ROUNDS = 2  # of which the faster counts: a point is no comparison


def measure(quick: bool) -> Iterator[Curve]:
    fixed = {"n": 600 if quick else N, "d": 32 if quick else D, "k": 5 if quick else K}
    for work, cost in (("obfuscation", _obfuscation), ("top-k", _top_k)):
        for axis, sizes in (QUICK if quick else SIZES).items():
            points = tuple((float(size), *cost(**{**fixed, axis: size})) for size in sizes)
            rest = ", ".join(f"{name} = {value:,}" for name, value in fixed.items() if name != axis)
            yield Curve(work, axis, points, rest)


def _obfuscation(n: int, d: int, k: int) -> tuple[float, float]:
    """EmbedCluster and WeightSynth, and the product of the rows that they need."""
    table, order, draws = clustered(n, d), np.random.default_rng(0).permutation(n), np.random.default_rng(1)
    scheme = ObfusLM(k=k, beta=min(BETA, 1 - 2 * k / n))
    clusters = len(ObfusLM(k=k, beta=scheme.beta, leftover="paper").cluster(table, order))
    return (
        _least(lambda: scheme.mixture(table, order, lambda count: draws.laplace(size=count))),
        _product(table, clusters),
    )


def _top_k(n: int, d: int, k: int) -> tuple[float, float]:
    """The k nearest of every row, and the product of all rows with all."""
    table = clustered(n, d)
    return _least(lambda: ExactIndex.of(table, k=k).top_k(table, k)), _product(table, n)


def _product(table: torch.Tensor, rows: int) -> float:
    """By the faster library."""
    return min(_least(product) for _, product in bare_products(table, rows))


def _least(work: Callable[[], object]) -> float:
    return min(seconds(work) for _ in range(ROUNDS))
