"""Shares in percent say no more than was measured."""

from __future__ import annotations

import math

import pytest

from milkglass.metrics.interval import Interval
from milkglass.metrics.percent import percent, percent_with_interval


@pytest.mark.parametrize(
    ("share", "final", "lower_bound"),
    [
        (math.nan, "-", "-"),
        (0.0, "0 %", "at least 0 %"),
        (0.0002, "less than 0.1 %", "at least 0 %"),
        (0.0044, "0.4 %", "at least 0.4 %"),
        (0.0049, "0.5 %", "at least 0.4 %"),
        (0.29, "29 %", "at least 29 %"),  # a little less in fp64
        (0.668, "67 %", "at least 66 %"),
        (0.9951, "more than 99 %", "at least 99 %"),
        (0.9996, "100 %", "100 %"),
        (1.0, "100 %", "100 %"),
    ],
)
def test_a_share_is_not_written_as_more_or_less_than_it_is(share: float, final: str, lower_bound: str) -> None:
    assert percent(share) == final and percent(share, is_lower_bound=True) == lower_bound


def test_a_share_with_decimals() -> None:
    assert percent(0.10991, decimals=1) == "11.0 %" and percent(0.10991, True, 1) == "at least 10.9 %"
    assert percent(0.9994, decimals=1) == "99.9 %" and percent(0.99949, decimals=1) == "99.9 %"
    assert percent(0.0004, decimals=1) == "less than 0.1 %"


def test_an_interval_of_one_written_figure_is_left_out() -> None:
    assert percent_with_interval(Interval(0.12, 0.08, 0.171, 9)) == "12 % (8-17)"
    assert percent_with_interval(Interval(1.0, 0.996, 1.0, 9)) == "100 %"
    assert percent_with_interval(Interval(0.668, 0.61, 0.72, 9), is_lower_bound=True) == "at least 66 % (61-72)"
