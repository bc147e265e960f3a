"""Figures 3 and 4: every pair is drawn, where it belongs, and nothing breaks where all pairs are alike."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from milkglass.experiments.procedures import theory
from milkglass.experiments.report import theory_plots
from milkglass.experiments.report.panels import GAP, WIDE, Axis

NAME = "{http://www.w3.org/2000/svg}"


def told(count: int = 30, spread: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    losses, gradients = spread * rng.random(count), 5 + spread * rng.random(count)
    found = theory.figures(losses, gradients, 2 * losses, 3 * gradients, (1.0, 2.0))
    return dict(json.loads(json.dumps(found.to_json())))


def circles(svg: str) -> list[tuple[float, float]]:
    return [
        (float(one.get("cx", "")), float(one.get("cy", "")))
        for one in ElementTree.fromstring(svg).iter(f"{NAME}circle")
    ]


def test_every_pair_is_drawn() -> None:
    svg = theory_plots.drawn(told())
    points = circles(svg)
    assert len(points) == 30 + 2 * 30  # epsilon; loss and gradient
    root = ElementTree.fromstring(svg)
    bars = [float(one.get("height", "")) for one in root.iter(f"{NAME}rect")]
    assert len(bars) == theory_plots.BARS
    most = int([*root.iter(f"{NAME}text")][5].text or "")  # what the first axis ends with
    assert sum(bars) / max(bars) * most == pytest.approx(30, abs=0.1)


def test_larger_gradients_are_to_the_right_and_higher() -> None:
    found = told()
    points = circles(theory_plots.drawn(found))[-30:]  # the last are the gradients after training
    by_epsilon = np.argsort(found["pairs"]["local"])
    across = np.array([x for x, _ in points])[by_epsilon]
    down = np.array([y for _, y in points])[by_epsilon]
    assert (np.diff(across) >= 0).all()
    assert (np.diff(down) <= 0).all()  # three times the local epsilon here
    assert across.max() <= 3 * WIDE + 2 * GAP


def test_alike_pairs_are_drawn_without_a_line() -> None:
    found = told(spread=0.0)
    assert found["lines"] == {}
    svg = theory_plots.drawn(found)
    assert len(circles(svg)) == 90
    assert not re.search("nan|inf", svg)


def test_powers_of_ten_stand_at_equal_distances() -> None:
    axis = Axis.over([0.01, 100.0], 400, log=True)
    assert [axis.at(one) for one in (0.01, 0.1, 1, 10, 100)] == pytest.approx([0, 100, 200, 300, 400])
    assert axis.at(0.0) == 0
