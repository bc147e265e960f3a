"""One row's cosines with all rows of a table, of which rough values are known: the nearest rows, and a quantile.

Rough values decide wherever they cannot mislead. What they leave open, a few rows near a border or nearly as near as
each other, is measured in fp64 and rounded to ten decimals, so that results are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from milkglass.nearest.products import Cosines, Slack, exact
from milkglass.nearest.select import Ids, LikelyRow

COSINE_DECIMALS = 10  # cosines are compared to ten decimals, so that ties fall to the lower index on every machine
OUTSIDE_VALUE = -2.0  # the rough value of rows that do not take part


@dataclass(frozen=True)
class SeedRow:
    """One row's cosines with all rows of a table (n, d).

    Attributes:
        rough: (n,) fp32; `OUTSIDE_VALUE` for a row that does not take part.
        slack: the largest error of the other values.
        rank: (n,) by which equal cosines are ordered.
        likely: rows that reach a bound which some dozens of rows reach, and values that reach a bound which as many
            reach as the quantile leaves. A bound that is too high only costs time.
    """

    cosines: Cosines = field(repr=False)
    row: int
    rough: NDArray[np.float32] = field(repr=False)
    slack: Slack
    rank: Ids = field(repr=False)
    likely: LikelyRow = field(repr=False)

    def nearest(self, is_free: NDArray[np.bool_], count: int, at: float) -> Ids:
        """Returns the `count` nearest of the free rows (n,) that reach a quantile, nearest first.

        `at` is the index of the quantile, from 0, over all rows that take part, largest first; linear between two.
        """
        rows, values = self._candidates(is_free, count, at)
        order = np.argsort(-values)
        rows, values = rows[order], values[order]
        # Where no more rows than int(at) can be nearer than the last one, it reaches the quantile
        is_ordered = len(rows) == count and self._apart(values)
        if is_ordered and self._at_most_nearer(self.cosines.slack.below(values[-1])) <= int(at):
            return rows
        rows, cosines = self._measured(rows)
        return rows[: self._reaching_quantile(cosines[:count], at)]

    def _reaching_quantile(self, cosines: NDArray[np.float64], at: float) -> int:
        """Returns how many of these exact cosines, largest first, reach the quantile.

        The quantile is computed only if rough values leave one in doubt. A row that at most int(at) rows exceed reaches
        it. A row that int(at) + 2 exceed, and so both values between which the quantile lies, does not.
        """
        for number in range(len(cosines), 0, -1):
            cosine = float(cosines[number - 1])
            if self._at_most_nearer(cosine) <= int(at):
                return number
            if int(np.count_nonzero(self.likely.low_values > self.slack.above(cosine))) < int(at) + 2:
                return int(np.count_nonzero(cosines >= self.quantile(at)))
        return 0

    def quantile(self, at: float) -> float:
        """Returns the quantile of exact cosines: those surely above its two neighbours are counted, not measured."""
        index = int(at)
        rows, above = _around(self.rough, self._rough_pair(index), self.slack)
        rows, index = rows[self.rough[rows] > OUTSIDE_VALUE], index - above
        if self._coarse:
            values = self.cosines.measure(self.row, rows)
            near, above = _around(values, _pair(values, index), self.cosines.slack)
            rows, index = rows[near], index - above
        cosines = self._measured(rows)[1]
        high, low = float(cosines[index]), float(cosines[min(index + 1, len(cosines) - 1)])
        return round(high + (at - int(at)) * (low - high), COSINE_DECIMALS)

    def _apart(self, values: NDArray[np.float32]) -> bool:
        """Returns whether the order of fp32 values, largest first, is certain.

        Twice the slack would do, except for cosines that are rounded to one number.
        """
        return float((values[:-1] - values[1:]).min(initial=np.inf)) > 3 * self.cosines.slack.fixed

    @property
    def _coarse(self) -> bool:
        """Returns whether rough values have larger errors than those of fp32."""
        return self.slack != self.cosines.slack

    def _at_most_nearer(self, cosine: float) -> int:
        """Returns an upper bound on the number of rows with a larger cosine."""
        least = self.slack.below(cosine)
        return int(np.count_nonzero((self.likely.values if least >= self.likely.bounds[0] else self.rough) > least))

    def _candidates(self, is_free: NDArray[np.bool_], count: int, at: float) -> tuple[Ids, NDArray[np.float32]]:
        """Returns all free rows that may be among the `count` nearest and reach the quantile, with fp32 values."""
        (high, _), rows, values, _ = self.likely
        rows, values = rows[is_free[rows]], values[is_free[rows]]
        enough = len(rows) >= count
        least = _twice_below(_kth(values, count) if enough else self._rough_pair(int(at))[1], self.slack)
        if not enough or least < high:
            rows = np.flatnonzero(self.rough >= least)
            rows = rows[is_free[rows]]
            values = self.rough[rows]
        rows, values = _best(rows, values, count, self.slack)
        if not self._coarse:
            return rows, values
        return _best(rows, self.cosines.measure(self.row, rows), count, self.cosines.slack)

    def _rough_pair(self, index: int) -> tuple[float, float]:
        """Returns the rough values of an index and the next, from 0, largest first."""
        values = self.likely.low_values
        if len(values) < index + 2 or len(values) == len(self.rough):
            values = self.rough[self.rough > OUTSIDE_VALUE]
        return _pair(values, index)

    def _measured(self, rows: Ids) -> tuple[Ids, NDArray[np.float64]]:
        """Returns rows and exact cosines, nearest first, ties by rank."""
        cosines = np.round(exact(self.cosines.source, self.row, rows), COSINE_DECIMALS)
        order = np.lexsort((self.rank[rows], -cosines))
        return rows[order], cosines[order]


def _pair(values: NDArray[np.float32], index: int) -> tuple[float, float]:
    """Returns the values of an index and the next, from 0, largest first."""
    first, second = len(values) - 1 - index, max(0, len(values) - 2 - index)
    ranked = np.partition(values, [second, first])
    return float(ranked[first]), float(ranked[second])


def _best(rows: Ids, values: NDArray[np.float32], count: int, slack: Slack) -> tuple[Ids, NDArray[np.float32]]:
    """Returns the rows that may be among the `count` of the largest values."""
    if len(rows) <= count:
        return rows, values
    best = values >= _twice_below(_kth(values, count), slack)
    return rows[best], values[best]


def _around(values: NDArray[np.float32], pair: tuple[float, float], slack: Slack) -> tuple[Ids, int]:
    """Returns which values may be either of a pair, the larger first, and how many are surely larger."""
    upper, lower = slack.above(slack.above(pair[0])), _twice_below(pair[1], slack)
    return np.flatnonzero((values >= lower) & (values <= upper)), int(np.count_nonzero(values > upper))


def _twice_below(value: float, slack: Slack) -> float:
    """Returns a bound two slacks lower: a row reaches it roughly if its true cosine is that of the rough `value`."""
    return float(slack.below(slack.below(value)))


def _kth(values: NDArray[np.float32], count: int) -> float:
    return float(np.partition(values, len(values) - count)[len(values) - count])
