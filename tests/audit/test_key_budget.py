"""Sizes, crossings and what is left of a scene."""

from __future__ import annotations

import pytest

from milkglass.audit.key_budget import crossing, sizes, spent
from milkglass.audit.report.result import BudgetPoint


def test_sizes_grow_by_half_decades_and_end_with_everything() -> None:
    assert sizes(50_000) == [1000, 3000, 10_000, 32_000, 50_000]
    assert sizes(34_000) == [1000, 3000, 10_000, 34_000]
    assert sizes(500) == [500]


def test_a_crossing_lies_between_two_points_on_a_logarithmic_scale() -> None:
    points = [BudgetPoint("a", 1000, 0.0, 0.0), BudgetPoint("a", 100_000, 0.0, 0.5)]
    assert crossing(points, 0.25) == 10_000
    assert crossing(points, 0.5) == 100_000
    assert crossing(points, 0.6) is None
    assert crossing([BudgetPoint("a", 1000, 0.0, 0.7)], 0.1) == 1000


def test_each_attacker_has_its_own_thresholds() -> None:
    points = [
        BudgetPoint("same", 1000, 0.5, 0.3),
        BudgetPoint("other", 1000, 0.1, 0.0),
        BudgetPoint("other", 10_000, 0.2, 0.2),
    ]
    found = spent(points)
    assert found["same"] == {"10 %": 1000, "25 %": 1000}
    assert found["other"]["10 %"] == pytest.approx(3162, abs=1)
    assert list(found["other"]) == ["10 %"]
