"""Plots figures over epsilon, one panel for each measure, as CMIF's Figure 3 and ObfusLM's Table 10.

It plots variants called "epsilon=E" if there are two or more, with a line for each word after the variant ("before",
"clear", "after"). The levels of the variant "plain" are dashed. A vertical bar is an interval.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from milkglass.experiments.report.glossary import SPREAD
from milkglass.experiments.report.panels import EDGE, GAP, GREY, HIGH, WIDE, Axis, Panel, svg_text

NAME = re.compile(r"(?P<measure>[^,]+), epsilon=(?P<epsilon>\d+(?:\.\d+)?) (?P<when>\w+)")
COLOURS = ("#0b4f6c", "#b4530a", "#3d7a37", "#6b3fa0")
Point = tuple[float, float, float]  # epsilon, figure, half of its interval's width


@dataclass(frozen=True, slots=True)
class Curves:
    """One measure over epsilon.

    Attributes:
        measure: its name.
        lines: by the word after the variant, in order of epsilon.
        levels: of the plain variant, by the same words.
    """

    measure: str
    lines: Mapping[str, tuple[Point, ...]]
    levels: Mapping[str, float]


def of(figures: Mapping[str, float]) -> tuple[Curves, ...]:
    """Returns the measures of a result that have a line of two points, in the figures' order."""
    points: dict[str, dict[str, list[Point]]] = {}
    for name, value in figures.items():
        match = NAME.fullmatch(name)
        if match is None or match["measure"].endswith(SPREAD):
            continue
        spread = figures.get(name.replace(match["measure"], match["measure"] + SPREAD, 1), 0.0)
        lines = points.setdefault(match["measure"], {})
        lines.setdefault(match["when"], []).append((float(match["epsilon"]), value, spread))
    result = []
    for measure, lines in points.items():
        drawn = {when: tuple(sorted(line)) for when, line in lines.items() if len(line) > 1}
        plain = ((when, figures.get(f"{measure}, plain {when}")) for when in lines)
        if drawn:
            result.append(Curves(measure, drawn, {when: value for when, value in plain if value is not None}))
    return tuple(result)


def svg(every: Sequence[Curves]) -> str:
    """Returns all panels side by side."""
    whole = len(every) * (WIDE + GAP)
    head = (
        f'<svg viewBox="0 0 {whole} {HIGH}" role="img" aria-label="figures over epsilon" font-size="11" fill="#1c2126">'
    )
    return "\n".join([head, *(part for i, one in enumerate(every) for part in _panel(i * (WIDE + GAP), one)), "</svg>"])


def _panel(left: float, one: Curves) -> list[str]:
    points = [point for line in one.lines.values() for point in line]
    ends = [value + sign * spread for _, value, spread in points for sign in (-1, 1)]
    x = Axis.over([point[0] for point in points], WIDE - EDGE - 8)
    panel = Panel(left, x, Axis.over([*ends, *one.levels.values()], HIGH - EDGE - 32))
    parts = panel.frame("epsilon", one.measure)
    for number, (when, line) in enumerate(one.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = "L".join("{:.1f} {:.1f}".format(*panel.point(at, value)) for at, value, _ in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += panel.points([point[0] for point in line], [point[1] for point in line], colour)
        for at, value, spread in line:
            (across, low), (_, high) = panel.point(at, value - spread), panel.point(at, value + spread)
            parts.append(f'<path d="M{across:.1f} {low:.1f}V{high:.1f}" fill="none" stroke="{colour}"/>')
        parts.append(svg_text(left + WIDE - 8 - 46 * number, 18, when, "end", colour))
        if when in one.levels:
            start, stop = panel.point(x.low, one.levels[when]), panel.point(x.high, one.levels[when])
            dashed = f'fill="none" stroke="{colour}" stroke-dasharray="4 3"'
            parts.append(f'<path d="M{start[0]:.1f} {start[1]:.1f}H{stop[0]:.1f}" {dashed}/>')
    return [*parts, svg_text(left + EDGE + 4, HIGH - EDGE - 6, "dashed: plain", "start", GREY)] if one.levels else parts
