"""FoundSymbols by weighted k-means with a price on mass, over vectors of tokens and what their labels say.

    token t goes to the symbol j of least  |x_t - c_j|^2 + price_j
    c_j = mean of its tokens, weighted by sqrt(mass_t)
    price_j <- 0.7 price_j + 0.3 P log(m load_j + 0.05),    load_j the symbol's share of all mass, P `mass_price`

x_t is a token's vector, centred and of length 1, then `label_weight` times its label score (label_score.py). The first
centres are tokens drawn with probabilities in proportion to sqrt(mass), without repetition.

Out of scope: what a symbol must keep (diversity.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.parameters import limited, require
from milkglass.progress import Progress
from milkglass.schemes.mixture import Ids
from milkglass.schemes.scheme import Draws
from milkglass.schemes.symbols.finder import Evidence, Floats, FoundSymbols, MapFinder, Vectors
from milkglass.schemes.symbols.label_score import label_scores, with_neighbours

BLOCK = 4096  # rows of distances held at a time
KEPT, FLOOR = 0.7, 0.05  # of the price: how much stays from one round to the next, and what bounds it from below


@dataclass(frozen=True)
class KMeans(MapFinder):
    """The way and its parameters.

    Attributes:
        vectors: each token alone through the public encoder, mean of its last states ("encoder"), or its row of the
            input table ("table").
        label_weight: of the label score; 0: labels are not used.
        mass_price: how dear a symbol of more than its share of running text is; 0: no price.
        rounds: of assignment.
    """

    vectors: Vectors = "encoder"
    label_weight: float = limited(1.0)
    mass_price: float = limited(0.3)
    rounds: int = limited(25, least=1)

    def __post_init__(self) -> None:
        require(self)

    def find(
        self, evidence: Evidence, tokens: Ids, mass: NDArray[np.float64], symbols: int,
        draws: Callable[[str], Draws], progress: Progress,
    ) -> FoundSymbols:  # fmt: skip
        """Draws from "symbols/start"."""
        points = self.points(evidence)[tokens]
        drawn, weights = draws("symbols/start"), np.sqrt(mass)
        centres, price = points[sample(weights, symbols, drawn)].copy(), np.zeros(symbols)
        for done in range(self.rounds):
            numbers = assign(points, centres, price)
            total = np.bincount(numbers, weights, symbols)
            centres = sums(points * weights[:, None].astype(np.float32), numbers, symbols)
            centres /= np.maximum(total, 1e-12)[:, None].astype(np.float32)
            if len(empty := np.flatnonzero(total == 0)):
                centres[empty] = points[sample(weights, len(empty), drawn)]
            load = np.bincount(numbers, mass, symbols).astype(np.float64)
            price = next_price(price, load, self.mass_price)
            progress(1000 * (done + 1) // self.rounds - 1000 * done // self.rounds)
        return FoundSymbols(numbers, points)

    def points(self, evidence: Evidence) -> Floats:
        """(n, f) x_t above, of all tokens."""
        unit = centred(evidence.vectors(self.vectors))
        if not self.label_weight or evidence.labelled is None:
            return unit
        scores, trust = label_scores(evidence.labelled, len(unit))
        return np.concatenate([unit, np.float32(self.label_weight) * with_neighbours(scores, trust, unit)], axis=1)


def centred(vectors: Floats) -> Floats:
    """(n, d) x_t above: less their mean, then of length 1."""
    apart = vectors.astype(np.float32) - vectors.astype(np.float32).mean(0)
    result: Floats = apart / (np.linalg.norm(apart, axis=1, keepdims=True) + 1e-9)
    return result


def assign(points: Floats, centres: Floats, price: NDArray[np.float64]) -> Ids:
    """(c,) the cheapest symbol of each token; ties fall to the lower number. |x|^2 is the same for all symbols."""
    own = (centres.astype(np.float64) ** 2).sum(1) + price
    parts = [
        (own - 2.0 * (points[start : start + BLOCK] @ centres.T)).argmin(1) for start in range(0, len(points), BLOCK)
    ]
    return np.concatenate(parts).astype(np.int64)


def next_price(price: NDArray[np.float64], mass: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """(m,) the prices of the next round. mass: (m,) of the symbols."""
    load = mass / mass.sum()
    return KEPT * price + (1 - KEPT) * factor * np.log(load * len(load) + FLOOR)


def sums(rows: Floats, numbers: Ids, symbols: int) -> Floats:
    """(m, f) the sum of the rows of each symbol."""
    result = np.zeros((symbols, rows.shape[1]), np.float32)
    np.add.at(result, numbers, rows)
    return result


def sample(weights: NDArray[np.float64], count: int, drawn: Draws) -> Ids:
    """`count` places without repetition, in proportion to their weights: those of the first arrivals of Poisson
    processes with these rates."""
    arrivals = -np.log(drawn.uniform(len(weights))) / weights
    return np.argsort(arrivals, kind="stable")[:count].astype(np.int64)
