"""Computes shares and other statistics with their bootstrap interval (Efron 1979, percentile method)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BOOTSTRAP_DRAWS = 1000
CONFIDENCE_LEVEL = 0.95
INTERVAL_ENDS = ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2)  # quantiles of the draws
MAX_COUNTS = 4_000_000  # numbers of `_resampled_counts` held at a time
MAX_UNITS = 2000  # more units are dealt into so many buckets, which changes an interval less than the draws do


@dataclass(frozen=True, slots=True)
class Interval:
    """Holds a measure with its 95 % confidence interval.

    Attributes:
        value: the measure; nan if it does not exist.
        low: the lower end; nan if the value stands alone.
        high: the upper end; nan if the value stands alone.
        units: the number of independent units that have any weight.
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
        """Returns half of the interval's width; nan if the value stands alone."""
        return (self.high - self.low) / 2

    @property
    def without_interval(self) -> Interval:
        """Returns the value alone, for a figure that does not come from a sample."""
        return Interval(self.value, math.nan, math.nan, self.units)


def with_half_widths(measures: Mapping[str, Interval], scale: float = 100) -> dict[str, float]:
    """Returns each value as "NAME" and half of its interval's width as "NAME +-", times `scale`."""
    scaled = {name: scale * interval.value for name, interval in measures.items()}
    return scaled | {f"{name} +-": scale * interval.half_width for name, interval in measures.items()}


UNDEFINED = Interval(math.nan, math.nan, math.nan, 0)


def _resampled_counts(unit_count: int, rng: np.random.Generator) -> Iterator[NDArray[np.float64]]:
    """Yields (b, unit_count) how often each unit is drawn, in blocks of rows: BOOTSTRAP_DRAWS rows in all."""
    step = max(1, MAX_COUNTS // unit_count)
    for start in range(0, BOOTSTRAP_DRAWS, step):
        yield rng.multinomial(
            unit_count, np.full(unit_count, 1 / unit_count), size=min(step, BOOTSTRAP_DRAWS - start)
        ).astype(np.float64)


def quotients(numerators: NDArray[Any], denominators: NDArray[Any]) -> NDArray[np.float64]:
    """Returns the quotient of each pair; nan where the denominator is not above 0."""
    undefined = np.full(denominators.shape, np.nan)
    return np.divide(numerators, denominators, out=undefined, where=denominators > 0)


def ratio(hits: NDArray[np.float64], weights: NDArray[np.float64], rng: np.random.Generator) -> Interval:
    """Returns sum(hits) / sum(weights) with its interval.

    Units are resampled, so they must be independent: take sentences, not tokens. Tokens of one sentence depend on each
    other, and resampling them gives too narrow an interval. More than MAX_UNITS units are put into buckets at random,
    and the buckets' sums are resampled. For values that can be above 1, such as a loss, use `bootstrap`.

    Args:
        hits: (units,) each unit's part of the numerator.
        weights: (units,) each unit's part of the denominator.
        rng: draws the samples.

    Returns:
        The interval; `UNDEFINED` if the weights add up to 0.
    """
    total = float(weights.sum())
    if total == 0:
        return UNDEFINED
    value, units = float(hits.sum()) / total, int((weights > 0).sum())
    if len(weights) > MAX_UNITS:
        bucket = rng.permutation(len(weights)) % MAX_UNITS
        hits, weights = (np.bincount(bucket, values).astype(np.float64) for values in (hits, weights))
    drawn = [quotients(counts @ hits, counts @ weights) for counts in _resampled_counts(len(weights), rng)]
    low, high = np.nanquantile(np.concatenate(drawn), INTERVAL_ENDS)
    return _widen(Interval(value, float(low), float(high), units))


def proportion(hits: NDArray[np.bool_], rng: np.random.Generator) -> Interval:
    """Returns the share of units that are true, with its interval; `UNDEFINED` without units.

    Resampling yes-or-no units is a binomial draw, so no unit is resampled.
    """
    if not len(hits):
        return UNDEFINED
    mean = float(hits.mean())
    drawn = rng.binomial(len(hits), mean, size=BOOTSTRAP_DRAWS) / len(hits)
    low, high = np.quantile(drawn, INTERVAL_ENDS)
    return _widen(Interval(mean, float(low), float(high), len(hits)))


def _widen(interval: Interval) -> Interval:
    """Returns the interval, widened if all units are 0 or all are 1.

    Resampling equal units gives an interval without width, which would promise certainty. There the exact binomial
    bound over the units is taken (Clopper and Pearson 1934).
    """
    binomial_bound = 1 - INTERVAL_ENDS[0] ** (1 / interval.units)
    if interval.value <= 0:
        return Interval(interval.value, interval.low, max(interval.high, binomial_bound), interval.units)
    if interval.value >= 1:
        return Interval(interval.value, min(interval.low, 1 - binomial_bound), interval.high, interval.units)
    return interval


Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def bootstrap(statistic: Statistic, unit_count: int, rng: np.random.Generator) -> Interval:
    """Returns a statistic with its bootstrap interval. For shares, `proportion` and `ratio` are quicker.

    The value is the statistic of the data itself. If all draws agree, the interval has no width, which is no
    certainty: `Interval.units` says how much data there was.

    Args:
        statistic: takes (b, u) how often each of u independent units was drawn, and returns (b,) values, nan for a draw
            for which it does not exist. Such draws are left out.
        unit_count: u.
        rng: draws the samples.
    """
    if not unit_count:
        return UNDEFINED
    value = float(statistic(np.ones((1, unit_count)))[0])
    drawn = np.concatenate([statistic(counts) for counts in _resampled_counts(unit_count, rng)])
    drawn = drawn[~np.isnan(drawn)]
    if not len(drawn):
        return Interval(value, math.nan, math.nan, unit_count)
    low, high = np.quantile(drawn, INTERVAL_ENDS)
    return Interval(value, float(low), float(high), unit_count)
