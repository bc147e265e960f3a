"""The bootstrap of any statistic (Efron 1979, percentile method); interval.py has the quick ones for shares.

What this module does not know: what is measured. Data on which every draw agrees (all right, or a perfect line) get an
interval without width, which is no certainty: look at `units`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from milkglass.metrics.interval import BLOCK, DRAWS, LEVEL, Interval

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def resampled(statistic: Statistic, units: int, rng: np.random.Generator) -> Interval:
    """statistic: (b, u) how often each of u independent units was drawn, to (b,) values; nan where it does not exist.

    The value is the statistic of each unit once. Draws without a value take no part; where none has one, it is nan.
    """
    if not units:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    value = float(statistic(np.ones((1, units)))[0])
    drawn: list[NDArray[np.float64]] = []
    step = max(1, BLOCK // units)
    for start in range(0, DRAWS, step):
        counts = rng.multinomial(units, np.full(units, 1 / units), size=min(step, DRAWS - start))
        drawn.append(statistic(counts.astype(np.float64)))
    result = np.concatenate(drawn)
    result = result[~np.isnan(result)]
    if not len(result):
        return Interval(value, float("nan"), float("nan"), units)
    low, high = np.quantile(result, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high), units)
