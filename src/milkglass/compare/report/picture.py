"""The picture of a comparison: what a way is worth, against the share of names and other content words that is read."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from milkglass.compare.result import ComparisonResult, WayGroup, WayResult
from milkglass.plots import GREY, INK, panels, plot_style, svg, write_names

WIDTH_PIXELS, HEIGHT_PIXELS = 640, 460
MARKER_SIZE, RING_STEP = 8.0, 6.0  # points; a marker that would hide others is a ring around them
NEAR_READ, NEAR_VALUE = 2.0, 0.03  # percent of the axis, and of the distance between the highest and the lowest way
STYLES: dict[WayGroup, tuple[str, str]] = {  # marker and colour
    "nothing is sent": ("D", "#1b7f5c"), "names are masked": ("s", "#7b3294"), "words are replaced": ("^", "#8a6d00"),
    "words are scrambled": ("o", "#b4530a"), "states are sent": ("v", "#a01c44"),
    "confidential hardware": ("P", "#0b4f6c"), "sent as it is": ("X", INK),
}  # fmt: skip
NAME_LINE_CHARACTERS = 24  # of a name that several ways share
AXIS = {"accuracy": "right answers, %", "pearson": "correlation with the true scores", "loss": "loss, nats a token"}


def picture_svg(result: ComparisonResult) -> str:
    """Returns the picture as SVG; "" if no way is done."""
    points = drawn_ways(result)
    if not points:
        return ""
    scale = 100 if result.measure == "accuracy" else 1
    with plot_style():
        figure, (axes,) = panels(1, WIDTH_PIXELS, HEIGHT_PIXELS)
        places = [(100 * way.share_read, scale * way.quality.value) for way in points if way.quality]
        colours, labelled_groups = [STYLES[point.group][1] for point in points], set[WayGroup]()
        for point, (read, value), ring, colour in zip(points, places, _rings(places), colours, strict=True):
            assert point.quality is not None
            ends = (scale * point.quality.low, scale * point.quality.high)
            axes.plot((read, read), ends, "_-", color=colour, linewidth=1, markersize=6)
            if point.group not in labelled_groups:  # the legend has the marker itself, not a ring
                axes.plot([], [], STYLES[point.group][0], color=colour, markersize=MARKER_SIZE, label=point.group)
            axes.plot(
                read, value, STYLES[point.group][0], color=colour, markersize=MARKER_SIZE + RING_STEP * ring,
                fillstyle="none" if ring else "full", alpha=0.95,
            )  # fmt: skip
            labelled_groups.add(point.group)
        best_local = result.best_local
        if best_local is not None and best_local.quality is not None:
            axes.axhline(scale * best_local.quality.value, color=GREY, linestyle="--", linewidth=1)
        axes.set(xlim=(-4, 104), xlabel="names and other content words that are read, %", ylabel=AXIS[result.measure])
        axes.margins(y=0.15)
        if result.measure == "accuracy":
            bottom, top = axes.get_ylim()
            axes.set_ylim(max(bottom, -3), min(top, 103))
        if result.measure == "loss":  # up is better, as for the other measures
            axes.invert_yaxis()
        figure.legend(loc="outside lower left", ncols=3, fontsize=11)
        bars = [(scale * way.quality.low, scale * way.quality.high) for way in points if way.quality]
        crowds = _crowds(places)
        write_names(
            axes, [places[crowd[0]] for crowd in crowds],
            [_joint_name(points[i].name for i in crowd) for crowd in crowds],
            [colours[crowd[0]] if len({colours[i] for i in crowd}) == 1 else INK for crowd in crowds],
            [bars[crowd[0]] for crowd in crowds],
        )  # fmt: skip
        return svg(figure, "What each way is worth, against what is read of it")


def drawn_ways(result: ComparisonResult) -> list[WayResult]:
    """Returns the ways of which it is known what share of content words is read."""
    return [way for way in result.finished_ways if not math.isnan(way.share_read)]


def _near_points(points: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Returns for each point (x, y) the indices of the earlier ones that its marker would hide."""
    values = [y for _, y in points]
    near_value = NEAR_VALUE * (max(values) - min(values))
    return [
        [
            i
            for i, (there, value) in enumerate(points[:end])
            if abs(x - there) <= NEAR_READ and abs(y - value) <= near_value
        ]
        for end, (x, y) in enumerate(points)
    ]


def _rings(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the ring of each point (x, y): 0, or one more than those of earlier points that it would hide."""
    rings = list[int]()
    for near in _near_points(points):
        rings.append(1 + max((rings[i] for i in near), default=-1))
    return rings


def _crowds(points: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Returns the indices of points (x, y) that share a name: a point, and those that are rings around it."""
    crowds, crowd_of = list[list[int]](), list[int]()
    for i, near in enumerate(_near_points(points)):
        if not near:
            crowds.append([])
        crowd_of.append(crowd_of[near[0]] if near else len(crowds) - 1)
        crowds[crowd_of[i]].append(i)
    return crowds


def _joint_name(names: Iterable[str]) -> str:
    """Returns names in a row, in lines of NAME_LINE_CHARACTERS at most."""
    return textwrap.fill(", ".join(names), NAME_LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False)
