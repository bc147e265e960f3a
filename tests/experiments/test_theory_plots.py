"""Figures 3 and 4: every pair is drawn, where it belongs, and nothing breaks where all pairs are alike."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from milkglass.experiments.procedures import theory
from milkglass.experiments.report import theory_plots


def measured(count: int = 30, spread: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    losses, gradients = spread * rng.random(count), 5 + spread * rng.random(count)
    found = theory.theory_figures(losses, gradients, 2 * losses, 3 * gradients, (1.0, 2.0))
    return dict(json.loads(json.dumps(found.to_json())))


def test_every_pair_is_drawn() -> None:
    found = measured()
    histogram, bounds, growth = theory_plots.theory_figure(found).axes
    assert sum(bar.get_height() for bar in histogram.patches) == 30 and len(histogram.patches) == theory_plots.MAX_BARS
    _, pairs = bounds.lines
    assert pairs.get_xdata().tolist() == found["pairs"]["local"]
    assert pairs.get_ydata().tolist() == found["pairs"]["epsilon"]
    points = {line.get_label(): line.get_ydata().tolist() for line in growth.lines if len(line.get_xdata()) == 30}
    assert points == {kind: found["pairs"][f"{kind} after"] for kind in ("loss", "gradient")}
    assert growth.get_yscale() == "log"


def test_alike_pairs_are_drawn_without_a_line() -> None:
    found = measured(spread=0.0)
    assert found["lines"] == {}
    assert len(theory_plots.theory_figure(found).axes[2].lines) == 2
    assert "nan" not in theory_plots.theory_svg(found)


def test_a_drawing_is_the_same_again() -> None:
    assert theory_plots.theory_svg(measured()) == theory_plots.theory_svg(measured())
