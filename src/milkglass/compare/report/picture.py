"""The picture of a comparison: what a way is worth, against the share of names and other content words that is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from milkglass.compare.result import Compared, Group, WayResult
from milkglass.plots import COLOURS, GREY, INK, panels, styled, svg

WIDE, HIGH = 640, 420
Box = tuple[float, float, float, float]
OFFSETS = tuple((x, y) for y in (4, -14, 20, -30, 36, -46) for x in (9, -9))  # of a label, in points
MARKERS: dict[Group, str] = {
    "nothing is sent": "D", "names are masked": "s", "words are replaced": "^", "words are scrambled": "o",
    "states are sent": "v", "confidential hardware": "P", "sent as it is": "X",
}  # fmt: skip
AXIS = {"accuracy": "right answers, %", "pearson": "correlation with the true scores", "loss": "loss, nats a token"}


def picture_svg(result: Compared) -> str:
    """Returns the picture as SVG; "" if no way is done."""
    points = [one for one in result.finished if not math.isnan(one.percent_read)]
    if not points:
        return ""
    scale = 100 if result.measure == "accuracy" else 1
    with styled():
        figure, (axes,) = panels(1, WIDE, HIGH)
        for number, one in enumerate(points):
            assert one.quality is not None
            value, low, high = (scale * part for part in (one.quality.value, one.quality.low, one.quality.high))
            axes.errorbar(
                100 * one.percent_read, value, [[value - low], [high - value]], fmt=MARKERS[one.group],
                color=COLOURS[number % len(COLOURS)], markersize=8, elinewidth=1, alpha=0.95,
            )  # fmt: skip
        home = result.best_local
        if home is not None and home.quality is not None:
            axes.axhline(scale * home.quality.value, color=GREY, linestyle="--", linewidth=1)
        axes.set(xlim=(-4, 104), xlabel="names and other content words that are read, %", ylabel=AXIS[result.measure])
        axes.margins(y=0.15)
        if result.measure == "loss":  # up is better, as for the other measures
            axes.invert_yaxis()
        labelled(axes, points, scale)
        return svg(figure, "What each way is worth, against what is read of it")


def labelled(axes: Any, points: Sequence[WayResult], scale: float) -> None:
    """Writes each way's name beside its point, at the first of several places where it covers no other name."""
    axes.figure.draw_without_rendering()  # sets where the axes lie
    inside, taken = axes.get_window_extent(), list[Box]()
    for one in sorted(points, key=lambda it: -(it.quality.value if it.quality else 0)):
        assert one.quality is not None
        place = 100 * one.percent_read, scale * one.quality.value
        x, y = axes.transData.transform(place)
        boxes = [(dx, dy, _box(x, y, dx, dy, one.name)) for dx, dy in OFFSETS]
        free = (
            it
            for it in boxes
            if it[2][0] >= inside.x0 and it[2][1] <= inside.x1 and not any(_meet(it[2], other) for other in taken)
        )
        dx, dy, box = next(free, boxes[0])
        taken.append(box)
        side = "left" if dx > 0 else "right"
        axes.annotate(one.name, place, (dx, dy), textcoords="offset points", ha=side, color=INK, fontsize=12)


def _box(x: float, y: float, dx: float, dy: float, words: str) -> Box:
    """Returns about where a text of 12 points lies: left, right, bottom and top in pixels."""
    width = 7.2 * len(words)
    left = x + dx if dx > 0 else x + dx - width
    return left, left + width, y + dy - 3, y + dy + 11


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]
