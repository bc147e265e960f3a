"""GHOST's Figures 3 and 4 as one SVG: how large epsilon is, what decides it, and what grows with it.

    left     how many pairs have which local epsilon                              Figure 3, subplot (2, 2)
    middle   epsilon against the local epsilon, with the diagonal                 Figure 3, subplots (1, 2) and (2, 1)
    right    both deviations after training against the local epsilon, with the
             straight lines of least squares; upwards in powers of ten            Figure 4

Figure 4 plots the global epsilon to the right. That is constant if one drift exceeds the deviations of every pair, as
the middle panel shows, so the local epsilon is used here. procedures/theory.py computes the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from milkglass.plots import COLOURS, GREY, MARKERS, panels, plot_style, svg

MAX_BARS = 16  # bars of the histogram
MIN_DRAWN = 1e-6  # what is below this is drawn as this: zero has no logarithm


def theory_svg(theory: Mapping[str, Any]) -> str:
    """Draws the three panels, as one SVG, of the document that `TheoryFigures.to_json` returns."""
    with plot_style():
        return svg(theory_figure(theory), "Epsilon of each pair, and the deviations after training against it")


def theory_figure(theory: Mapping[str, Any]) -> Figure:
    """Returns the three panels of the document that `TheoryFigures.to_json` returns."""
    pairs, lines = theory["pairs"], theory["lines"]
    local, epsilon = np.array(pairs["local"]), np.array(pairs["epsilon"])
    figure, (histogram, bounds, growth) = panels(3)
    histogram.hist(local, bins=MAX_BARS, color=COLOURS[0], rwidth=0.95)
    histogram.set(xlabel="local epsilon", ylabel="pairs")
    ends = [min(local.min(), epsilon.min()), max(local.max(), epsilon.max())]
    bounds.plot(ends, ends, color=GREY)
    bounds.plot(local, epsilon, "o", color=COLOURS[0], markersize=4, alpha=0.6)
    bounds.set(xlabel="local epsilon", ylabel="epsilon")
    for deviation, colour, marker in zip(("loss", "gradient"), COLOURS, MARKERS, strict=False):
        deviations_after = np.maximum(pairs[f"{deviation} after"], MIN_DRAWN)
        growth.plot(local, deviations_after, marker, color=colour, markersize=4, alpha=0.6, label=deviation)
        if (line := lines.get(f"{deviation}, local epsilon")) is not None:
            xs = np.linspace(local.min(), local.max(), 41)
            growth.plot(xs, np.maximum(line["slope"] * xs + line["intercept"], MIN_DRAWN), color=colour)
    growth.set(xlabel="local epsilon", ylabel="deviation after training", yscale="log")
    growth.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    growth.legend()
    return figure
