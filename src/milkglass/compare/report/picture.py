"""The picture of a comparison: what a way is worth, against the share of names and other content words that is read."""

from __future__ import annotations

import math

from milkglass.compare.result import Compared, Group, WayResult
from milkglass.plots import COLOURS, GREY, INK, panels, styled, svg

WIDE, HIGH = 760, 440
MARKERS: dict[Group, str] = {
    "nothing is sent": "D", "names are masked": "s", "words are replaced": "^", "words are scrambled": "o",
    "states are sent": "v", "confidential hardware": "P", "sent as it is": "X",
}  # fmt: skip
AXIS = {"accuracy": "right answers, %", "pearson": "correlation with the true scores", "loss": "loss, nats a token"}


def drawn(result: Compared) -> str:
    """Returns the picture as SVG; "" if no way is done."""
    points = [one for one in result.done if not math.isnan(one.read)]
    if not points:
        return ""
    scale = 100 if result.measure == "accuracy" else 1
    with styled():
        figure, (axes,) = panels(1, WIDE, HIGH)
        for number, one in enumerate(points):
            assert one.quality is not None
            value, low, high = (scale * part for part in (one.quality.value, one.quality.low, one.quality.high))
            axes.errorbar(
                100 * one.read, value, [[value - low], [high - value]], fmt=MARKERS[one.group],
                color=COLOURS[number % len(COLOURS)], markersize=8, elinewidth=1, alpha=0.95,
            )  # fmt: skip
        home = result.home
        if home is not None and home.quality is not None:
            axes.axhline(scale * home.quality.value, color=GREY, linestyle="--", linewidth=1)
        axes.set(xlim=(-4, 104), xlabel="names and other content words that are read, %", ylabel=AXIS[result.measure])
        axes.margins(y=0.15)
        figure.draw_without_rendering()
        labelled(axes, points, scale)
        return svg(figure, "What each way is worth, against what is read of it")


def labelled(axes: object, points: list[WayResult], scale: float) -> None:
    """Writes each way's name beside its point, at the first of several places where it covers no other name."""
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    taken: list[object] = []
    inside = axes.get_window_extent(renderer)  # type: ignore[attr-defined]
    for one in sorted(points, key=lambda it: -(it.quality.value if it.quality else 0)):
        assert one.quality is not None
        best = None
        for dx, dy, ha in ((9, 4, "left"), (-9, 4, "right"), (9, -14, "left"), (-9, -14, "right"), (9, 18, "left"),
                           (-9, 18, "right"), (9, -28, "left"), (-9, -28, "right")):  # fmt: skip
            text = axes.annotate(  # type: ignore[attr-defined]
                one.name, (100 * one.read, scale * one.quality.value), (dx, dy), textcoords="offset points", ha=ha,
                fontsize=12, color=INK,
            )  # fmt: skip
            box = text.get_window_extent(renderer)
            free = not any(box.overlaps(other) for other in taken)
            if free and inside.x0 <= box.x0 and box.x1 <= inside.x1:
                best = box
                break
            text.remove()
        if best is None:
            text = axes.annotate(  # type: ignore[attr-defined]
                one.name, (100 * one.read, scale * one.quality.value), (9, 4), textcoords="offset points", fontsize=12,
            )  # fmt: skip
            best = text.get_window_extent(renderer)
        taken.append(best)
