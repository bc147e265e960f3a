"""GHOST's Figures 3 and 4 as one SVG: how large epsilon is, what decides it, and what grows with it.

    left     how many pairs have which local epsilon                              Figure 3, subplot (2, 2)
    middle   epsilon against the local epsilon, with the diagonal                 Figure 3, subplots (1, 2) and (2, 1)
    right    both deviations after training against the local epsilon, with the
             straight lines of least squares; upwards in powers of ten            Figure 4

Figure 4 has the global epsilon to the right. If a drift exceeds every pair's deviations it is constant, which the
middle panel shows. So the local epsilon is used here. procedures/theory.py computes the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from milkglass.experiments.report.panels import EDGE, GAP, GREY, HIGH, WIDE, Axis, Panel, svg_page, svg_text

BARS = 16
LOSS, GRADIENT = "#0b4f6c", "#b4530a"


def drawn(theory: Mapping[str, Any]) -> str:
    """Returns theory.json as SVG."""
    pairs, lines = theory["pairs"], theory["lines"]
    parts = [*_histogram(pairs["local"]), *_bounds(pairs["local"], pairs["epsilon"]), *_growth(pairs, lines)]
    title = "Epsilon of each pair, and the deviations after training against it"
    return svg_page(3 * WIDE + 2 * GAP, HIGH, title, parts)


def _axis(values: Iterable[float], up: bool = False, log: bool = False) -> Axis:
    return Axis.over(values, HIGH - EDGE - 32 if up else WIDE - EDGE - 8, log)


def _histogram(local: Sequence[float]) -> list[str]:
    x = _axis(local)
    counts = [0] * BARS
    for one in local:
        counts[min(BARS - 1, int(BARS * (one - x.low) / (x.high - x.low)))] += 1
    panel = Panel(0, x, _axis([0, *counts], up=True))
    parts, width = panel.frame("local epsilon", "pairs"), x.pixels / BARS
    for i, count in enumerate(counts):
        high = panel.y.at(count)
        parts.append(
            f'<rect x="{EDGE + i * width:.1f}" y="{HIGH - EDGE - high:.1f}" width="{width - 1:.1f}" '
            f'height="{high:.1f}" fill="{LOSS}"/>'
        )
    return parts


def _bounds(local: Sequence[float], epsilon: Sequence[float]) -> list[str]:
    both = [*local, *epsilon]
    panel = Panel(WIDE + GAP, _axis(both), _axis(both, up=True))
    diagonal = panel.line(1.0, 0.0, GREY)
    return [*panel.frame("local epsilon", "epsilon"), diagonal, *panel.points(local, epsilon, LOSS)]


def _growth(pairs: Mapping[str, Sequence[float]], lines: Mapping[str, Mapping[str, float]]) -> list[str]:
    kinds = (("loss", LOSS), ("gradient", GRADIENT))
    every = [one for kind, _ in kinds for one in pairs[f"{kind} after"]]
    panel = Panel(2 * (WIDE + GAP), _axis(pairs["local"]), _axis(every, up=True, log=True))
    parts = panel.frame("local epsilon", "deviation after training")
    for number, (kind, colour) in enumerate(kinds):
        parts += panel.points(pairs["local"], pairs[f"{kind} after"], colour)
        if (one := lines.get(f"{kind}, local epsilon")) is not None:
            parts.append(panel.line(one["slope"], one["intercept"], colour))
        parts.append(svg_text(panel.left + WIDE - 68 + 60 * number, 18, kind, "end", colour))
    return parts
