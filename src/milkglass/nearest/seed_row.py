"""Finds the rows nearest to one row, and quantiles of its cosines with all rows, from approximate cosines.

Approximate ("rough") cosines decide where their error cannot change the result. The few other rows, near the quantile
or nearly as near as each other, are measured in fp64 and rounded to ten decimals, so that results are the same on
every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from milkglass.nearest.products import Cosines, Slack, exact_cosines
from milkglass.nearest.select import Ids, LikelyRow

COSINE_DECIMALS = 10  # cosines are compared to ten decimals, so that ties fall to the lower index on every machine
OUTSIDE_VALUE = -2.0  # the rough value of rows that do not take part


@dataclass(frozen=True)
class SeedRow:
    """Finds a row's nearest rows in a table (n, d), and quantiles of its cosines with all rows.

    Attributes:
        cosines: measures cosines of the table's rows.
        row: the index of the row that is compared.
        rough: (n,) fp32 approximate cosines; `OUTSIDE_VALUE` for a row that does not take part.
        slack: the largest error of the approximate cosines of rows that take part.
        rank: (n,) decides between rows with equal cosines: the lower rank comes first.
        likely: the rows above a high bound, which some dozens of rows reach, and the values above a low bound, which
            enough rows reach for the quantile. A bound that is too high only costs time.
    """

    cosines: Cosines = field(repr=False)
    row: int
    rough: NDArray[np.float32] = field(repr=False)
    slack: Slack
    rank: Ids = field(repr=False)
    likely: LikelyRow = field(repr=False)

    def nearest(self, is_free: NDArray[np.bool_], count: int, quantile_index: float) -> Ids:
        """Returns the `count` nearest of the free rows (n,) that reach a quantile, nearest first.

        Args:
            is_free: (n,) whether each row may be among them.
            count: how many rows are wanted; fewer are returned if fewer reach the quantile.
            quantile_index: the index of the quantile among the cosines of all rows that take part, largest first, from
                0; between two cosines it is interpolated linearly.
        """
        rows, values = self._candidates(is_free, count, quantile_index)
        order = np.argsort(-values)
        rows, values = rows[order], values[order]
        is_complete = len(rows) == count and self._is_order_certain(values)
        # if at most int(quantile_index) rows can be nearer than the last one, it reaches the quantile
        if is_complete and self._max_nearer_count(self.cosines.slack.below(values[-1])) <= int(quantile_index):
            return rows
        rows, cosines = self._sort_by_cosine(rows)
        return rows[: self._count_reaching_quantile(cosines[:count], quantile_index)]

    def _count_reaching_quantile(self, cosines: NDArray[np.float64], quantile_index: float) -> int:
        """Returns how many of these exact cosines, largest first, reach the quantile.

        The quantile is computed only if rough values leave one in doubt. A row that at most int(quantile_index)
        rows exceed reaches it. A row that int(quantile_index) + 2 exceed does not: both values between which the
        quantile lies are larger.
        """
        for count in range(len(cosines), 0, -1):
            cosine = float(cosines[count - 1])
            if self._max_nearer_count(cosine) <= int(quantile_index):
                return count
            if int(np.count_nonzero(self.likely.low_values > self.slack.above(cosine))) < int(quantile_index) + 2:
                return int(np.count_nonzero(cosines >= self.quantile(quantile_index)))
        return 0

    def quantile(self, quantile_index: float) -> float:
        """Returns the quantile of exact cosines, for an index as in `nearest`.

        Rows that are surely above the two cosines around the quantile are only counted.
        """
        index = int(quantile_index)
        rows, above = _possible_members(self.rough, self._rough_values_at(index), self.slack)
        rows, index = rows[self.rough[rows] > OUTSIDE_VALUE], index - above
        if self._is_coarse:
            values = self.cosines.measure(self.row, rows)
            members, above = _possible_members(values, _values_at(values, index), self.cosines.slack)
            rows, index = rows[members], index - above
        cosines = self._sort_by_cosine(rows)[1]
        high, low = float(cosines[index]), float(cosines[min(index + 1, len(cosines) - 1)])
        return round(high + (quantile_index - int(quantile_index)) * (low - high), COSINE_DECIMALS)

    def _is_order_certain(self, values: NDArray[np.float32]) -> bool:
        """Returns whether the order of fp32 values, largest first, is certain.

        A gap of twice the slack would suffice, but not if exact cosines are rounded to one number.
        """
        return float((values[:-1] - values[1:]).min(initial=np.inf)) > 3 * self.cosines.slack.fixed

    @property
    def _is_coarse(self) -> bool:
        """Returns whether rough values have larger errors than those of fp32."""
        return self.slack != self.cosines.slack

    def _max_nearer_count(self, cosine: float) -> int:
        """Returns an upper bound on the number of rows with a larger cosine."""
        bound = self.slack.below(cosine)
        return int(np.count_nonzero((self.likely.values if bound >= self.likely.bounds[0] else self.rough) > bound))

    def _candidates(
        self, is_free: NDArray[np.bool_], count: int, quantile_index: float
    ) -> tuple[Ids, NDArray[np.float32]]:
        """Returns the free rows that may be among the `count` nearest and reach the quantile, with fp32 cosines."""
        rows, values = self.likely.columns, self.likely.values
        rows, values = rows[is_free[rows]], values[is_free[rows]]
        has_enough = len(rows) >= count
        last = _kth_largest(values, count) if has_enough else self._rough_values_at(int(quantile_index))[1]
        bound = _twice_below(last, self.slack)
        if not has_enough or bound < self.likely.bounds[0]:
            rows = np.flatnonzero(self.rough >= bound)
            rows = rows[is_free[rows]]
            values = self.rough[rows]
        rows, values = _select_best(rows, values, count, self.slack)
        if not self._is_coarse:
            return rows, values
        return _select_best(rows, self.cosines.measure(self.row, rows), count, self.cosines.slack)

    def _rough_values_at(self, index: int) -> tuple[float, float]:
        """Returns the rough values of an index and the next, from 0, largest first."""
        values = self.likely.low_values
        if len(values) < index + 2 or len(values) == len(self.rough):
            values = self.rough[self.rough > OUTSIDE_VALUE]
        return _values_at(values, index)

    def _sort_by_cosine(self, rows: Ids) -> tuple[Ids, NDArray[np.float64]]:
        """Returns rows and exact cosines, nearest first, ties by rank."""
        cosines = np.round(exact_cosines(self.cosines.source, self.row, rows), COSINE_DECIMALS)
        order = np.lexsort((self.rank[rows], -cosines))
        return rows[order], cosines[order]


def _values_at(values: NDArray[np.float32], index: int) -> tuple[float, float]:
    """Returns the values of an index and the next, from 0, largest first."""
    first, second = len(values) - 1 - index, max(0, len(values) - 2 - index)
    ranked = np.partition(values, [second, first])
    return float(ranked[first]), float(ranked[second])


def _select_best(rows: Ids, values: NDArray[np.float32], count: int, slack: Slack) -> tuple[Ids, NDArray[np.float32]]:
    """Returns the rows whose values may be among the `count` largest, and these values."""
    if len(rows) <= count:
        return rows, values
    is_best = values >= _twice_below(_kth_largest(values, count), slack)
    return rows[is_best], values[is_best]


def _possible_members(values: NDArray[np.float32], pair: tuple[float, float], slack: Slack) -> tuple[Ids, int]:
    """Returns the indices of the values that may be one of a pair, and how many values are surely larger than both.

    Args:
        values: (n,) approximate cosines.
        pair: two neighbours in the order of the values, the larger first.
        slack: the largest error of the values.
    """
    upper, lower = slack.above(slack.above(pair[0])), _twice_below(pair[1], slack)
    return np.flatnonzero((values >= lower) & (values <= upper)), int(np.count_nonzero(values > upper))


def _twice_below(value: float, slack: Slack) -> float:
    """Returns a bound two slacks below a rough value. A row with a lower rough value surely has a smaller cosine."""
    return float(slack.below(slack.below(value)))


def _kth_largest(values: NDArray[np.float32], count: int) -> float:
    """Returns the smallest of the `count` largest values."""
    return float(np.partition(values, len(values) - count)[len(values) - count])
