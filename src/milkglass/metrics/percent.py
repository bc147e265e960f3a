"""Writes shares in percent. What is neither 0 nor nearly 1 is never rounded to 0 % or 100 %.

A lower bound is rounded down, and so may be "at least 0 %".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from milkglass.metrics.interval import Interval

MIN_SHARE_WRITTEN_AS_100 = 0.9995  # from here on a share is written as 100 %
SMALL_SHARE = 0.01  # a smaller share is written with one decimal at least


def percent(share: float, is_lower_bound: bool = False, decimals: int = 0) -> str:
    """Returns a share in percent: "12 %", "0.4 %", "at least 11 %", "more than 99 %"; "-" for nan.

    From MIN_SHARE_WRITTEN_AS_100 on it is "100 %", even for a lower bound. A share below SMALL_SHARE has one decimal at
    least, unless it is written as 0.

    Args:
        share: from 0 to 1.
        is_lower_bound: whether the true share may be larger. Then "at least" is written, and the share is rounded down.
        decimals: the number of decimals.
    """
    if math.isnan(share):
        return "-"
    if share == 0 or share >= MIN_SHARE_WRITTEN_AS_100:
        return f"{100 * share:.{decimals}f} %" if share or not is_lower_bound else "at least 0 %"
    decimals = max(decimals, 1) if share < SMALL_SHARE else decimals
    unit = 10.0**-decimals  # in percent
    if is_lower_bound:
        rounded_down = math.floor(100 * share / unit + 1e-9) * unit
        return f"at least {rounded_down:.{decimals}f} %" if rounded_down else "at least 0 %"
    written = f"{100 * share:.{decimals}f}"
    if float(written) == 0:
        return f"less than {unit:.{decimals}f} %"
    return f"more than {100 - unit:.{decimals}f} %" if float(written) == 100 else f"{written} %"


def percent_to_one_decimal(share: float, is_lower_bound: bool = False) -> str:
    """Returns a share in percent with one decimal, such as "12.3 %"; "-" for nan.

    A share that would be 0.0 has one significant digit, such as "0.04 %". Spaces are non-breaking.

    Args:
        share: from 0 to 1.
        is_lower_bound: whether the true share may be larger. Then "≥" is written, and the share is rounded down.
    """
    if math.isnan(share):
        return "-"
    value, sign = 100 * share, ""
    rounds_to_zero = value < 0.05 or (is_lower_bound and value < 0.1)
    decimals = -math.floor(math.log10(value)) if rounds_to_zero and value else 1
    if is_lower_bound and share < 1:
        value, sign = math.floor(value * 10**decimals + 1e-9) / 10**decimals, "≥\u00a0"
    return f"{sign}{value:.{decimals}f}\u00a0%"


def percent_with_interval(share: Interval, is_lower_bound: bool = False) -> str:
    """Returns a share with its interval, "12 % (8-17)", without the interval if both ends round to the same percent.

    `is_lower_bound` is that of `percent`, and changes the share alone.
    """
    low, high = f"{100 * share.low:.0f}", f"{100 * share.high:.0f}"
    value = percent(share.value, is_lower_bound)
    return f"{value} ({low}-{high})" if low != high else value
