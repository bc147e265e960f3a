"""One row's cosines with all rows of a table, of which rough values are known: the nearest ones, and a quantile.

Rough values decide wherever they cannot mislead. What they leave open, a few rows near a border, is measured in fp64
and rounded to ten decimals, so that the answers are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.nearest.cosines import exact
from milkglass.nearest.select import Ids

DECIMALS = 10  # cosines are compared to ten decimals, so that ties fall to the lower index on every machine
OUTSIDE = -2.0  # the rough value of rows that do not take part


@dataclass(frozen=True)
class SeedRow:
    """Attributes:
    table: (n, d).
    row: whose cosines these are; it takes part itself.
    rough: (n,) fp32; `OUTSIDE` where a row does not take part.
    slack: by how much the others are off at most.
    place: (n,) the order in which equal cosines come.
    likely: values that some dozens of rows reach, and as many as the quantile leaves; a guess of the second that is too
        high costs time only.
    """

    table: torch.Tensor = field(repr=False)
    row: int
    rough: NDArray[np.float32] = field(repr=False)
    slack: float
    place: Ids = field(repr=False)
    likely: tuple[float, float]

    def nearest(self, free: NDArray[np.bool_], count: int, at: float) -> Ids:
        """The `count` nearest free rows, nearest first, of those that reach the quantile at index `at` (from 0, of all
        that take part, largest first; linear between two)."""
        rows, cosines = self._measured(self._candidates(free, count, at))
        rows, cosines = rows[:count], cosines[:count]
        # No more rows than int(at) can be nearer than the last one: it reaches the quantile
        if len(rows) == count and np.count_nonzero(self.rough > cosines[-1] - self.slack) <= int(at):
            return rows
        reach: NDArray[np.bool_] = cosines >= self.quantile(at)
        return rows[reach]

    def quantile(self, at: float) -> float:
        """From exact cosines: what is surely above the two between which it lies is counted, what is near measured."""
        upper, lower = self._rough_pair(at)
        above = int(np.count_nonzero(self.rough > upper + 2 * self.slack))
        near = (self.rough >= lower - 2 * self.slack) & (self.rough <= upper + 2 * self.slack)
        cosines = self._measured(np.flatnonzero(near & (self.rough > OUTSIDE)))[1]
        first = int(at) - above
        high, low = float(cosines[first]), float(cosines[min(first + 1, len(cosines) - 1)])
        return round(high + (at - int(at)) * (low - high), DECIMALS)

    def _candidates(self, free: NDArray[np.bool_], count: int, at: float) -> Ids:
        """All free rows that may be among the `count` nearest, and reach the quantile."""
        rows = self._reaching(self.likely[0], free)
        if len(rows) >= count:
            cut = self._cut(rows, count)
            return rows[self.rough[rows] >= cut] if cut >= self.likely[0] else self._reaching(cut, free)
        least = self._rough_pair(at)[1] - 2 * self.slack
        rows = self._reaching(least, free)
        return rows[self.rough[rows] >= self._cut(rows, count)] if len(rows) > count else rows

    def _cut(self, rows: Ids, count: int) -> float:
        """What a row reaches, roughly, that may be among the `count` nearest of these."""
        values = self.rough[rows]
        return float(np.partition(values, len(values) - count)[len(values) - count]) - 2 * self.slack

    def _reaching(self, bound: float, free: NDArray[np.bool_]) -> Ids:
        rows = np.flatnonzero(self.rough >= bound)
        return rows[free[rows]]

    def _rough_pair(self, at: float) -> tuple[float, float]:
        """The rough values of index int(at) and the next, from 0, largest first."""
        index = int(at)
        values = self.rough[self.rough >= self.likely[1]]
        if len(values) < index + 2:
            values = self.rough[self.rough > OUTSIDE]
        last = min(index + 1, len(values) - 1)
        ranked = np.partition(values, [len(values) - 1 - last, len(values) - 1 - index])
        return float(ranked[len(values) - 1 - index]), float(ranked[len(values) - 1 - last])

    def _measured(self, rows: Ids) -> tuple[Ids, NDArray[np.float64]]:
        """Rows and exact cosines, nearest first, ties by place."""
        cosines = np.round(exact(self.table, self.row, rows), DECIMALS)
        by = np.lexsort((self.place[rows], -cosines))
        return rows[by], cosines[by]
