"""A share with its bootstrap interval (Efron 1979, percentile method)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 1000
LEVEL = 0.95
MAX_WEIGHTS = 4_000_000  # resampling weights held at a time
HEAPS = 2000  # sums that many units are dealt into, which moves an interval's width less than 1,000 draws do


@dataclass(frozen=True, slots=True)
class Interval:
    """A measure with its confidence interval.

    Attributes:
        low: of 95 %; nan where the value stands alone.
        high: likewise.
        units: how many independent units have any weight.
    """

    value: float
    low: float
    high: float
    units: int

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{100 * self.value:.1f} %"
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"

    @property
    def half_width(self) -> float:
        """Half of the interval's width; nan where the value stands alone."""
        return (self.high - self.low) / 2

    @property
    def alone(self) -> Interval:
        """The value without its interval, of a figure that is not a sample's."""
        return Interval(self.value, math.nan, math.nan, self.units)


def with_spread(measures: Mapping[str, Interval], of: str = "", scale: float = 100) -> dict[str, float]:
    """ "NAME" and half of the interval's width, "NAME +-", both followed by `of`. scale: 100 for percent."""
    values = {f"{name}{of}": scale * one.value for name, one in measures.items()}
    return values | {f"{name} +-{of}": scale * one.half_width for name, one in measures.items()}


UNDEFINED = Interval(float("nan"), float("nan"), float("nan"), 0)


def _draws(units: int, rng: np.random.Generator) -> Iterator[NDArray[np.float64]]:
    """(b, units) how often each unit is drawn, in blocks, DRAWS rows in all."""
    step = max(1, MAX_WEIGHTS // units)
    for start in range(0, DRAWS, step):
        yield rng.multinomial(units, np.full(units, 1 / units), size=min(step, DRAWS - start)).astype(np.float64)


def ratio(hits: NDArray[np.float64], weights: NDArray[np.float64], rng: np.random.Generator) -> Interval:
    """sum(hits) / sum(weights), both (u,), one entry an independent unit (a sentence), which are what is resampled. A
    share: of what can be above 1, such as a loss, take `resampled`.

    Tokens of one sentence fall together: resampling tokens would promise too much. No weight at all: the measure does
    not exist, and is nan. More than HEAPS units are dealt out at random, and their sums are resampled: heaps are as
    independent as units are, and there are no more draws in a longer text.
    """
    total = float(weights.sum())
    if total == 0:
        return UNDEFINED
    value, units = float(hits.sum()) / total, int((weights > 0).sum())
    if len(weights) > HEAPS:
        heap = rng.permutation(len(weights)) % HEAPS
        hits, weights = (np.bincount(heap, one).astype(np.float64) for one in (hits, weights))
    drawn: list[NDArray[np.float64]] = []
    for counts in _draws(len(weights), rng):
        below = counts @ weights
        drawn.append(np.divide(counts @ hits, below, out=np.full(len(below), np.nan), where=below > 0))
    low, high = np.nanquantile(np.concatenate(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return _open(Interval(value, float(low), float(high), units))


def share(hits: NDArray[np.bool_], rng: np.random.Generator) -> Interval:
    """The mean of independent yes-or-no units. Their bootstrap is a binomial draw, so it is drawn as one."""
    if not len(hits):
        return UNDEFINED
    mean = float(hits.mean())
    drawn = rng.binomial(len(hits), mean, size=DRAWS) / len(hits)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return _open(Interval(mean, float(low), float(high), len(hits)))


def _open(interval: Interval) -> Interval:
    """Resampling nothing but zeros, or ones, gives an interval without width, which would promise certainty. There the
    exact binomial bound over the units is taken (Clopper and Pearson 1934)."""
    reach = 1 - ((1 - LEVEL) / 2) ** (1 / interval.units)
    if interval.value <= 0:
        return Interval(interval.value, interval.low, max(interval.high, reach), interval.units)
    if interval.value >= 1:
        return Interval(interval.value, min(interval.low, 1 - reach), interval.high, interval.units)
    return interval


# The bootstrap of any statistic (Efron 1979, percentile method); `share` and `ratio` above are quicker.
#
# Out of scope: what is measured. Data on which every draw agrees (all right, or a perfect line) get
# an interval without width, which is no certainty: look at `units`.
Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def resampled(statistic: Statistic, units: int, rng: np.random.Generator) -> Interval:
    """statistic: (b, u) how often each of u independent units was drawn, to (b,) values; nan where it does not exist.

    The value is the statistic of each unit once. Draws without a value take no part; where none has one, it is nan.
    """
    if not units:
        return UNDEFINED
    value = float(statistic(np.ones((1, units)))[0])
    result = np.concatenate([statistic(counts) for counts in _draws(units, rng)])
    result = result[~np.isnan(result)]
    if not len(result):
        return Interval(value, float("nan"), float("nan"), units)
    low, high = np.quantile(result, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high), units)
