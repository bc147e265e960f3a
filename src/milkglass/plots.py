"""Draws SVG with matplotlib: equal files for equal figures, and colours that colour-blind people can tell apart."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from math import hypot
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

INK, GREY, GRID = "#1c2126", "#4d5761", "#cfd6dc"
COLOURS = ("#0b4f6c", "#b4530a", "#7b3294", "#1b7f5c")  # dark enough for text; lines have markers of their own too
MARKERS = ("o", "s", "D", "^")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "milkglass", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 12,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
    "axes.titlesize": 12, "axes.titlelocation": "left", "text.parse_math": False, "svg.id": None,
}  # fmt: skip
# Where a name may be put beside its point: offsets in points, the first that fits is taken
NAME_OFFSETS = tuple((x, y) for y in (4, -14, 20, -30, 36, -46) for x in (9, -9))
# Where a name may be put if none of these fits, the nearest first: many points lie close together
DISTANT_X, DISTANT_Y = (9, -9, 40, -40, 80, -80, 120, -120), range(-142, 149, 16)
DISTANT_OFFSETS = tuple(sorted(((x, y) for y in DISTANT_Y for x in DISTANT_X), key=lambda offset: hypot(*offset)))
MARKER_PIXELS = 4  # half the width of a point, which no name covers
LINE_PIXELS = 14  # from one line of a name to the next
FAR_PIXELS = 14  # a name that is further from its point in either direction is joined to it by a line
Box = tuple[float, float, float, float]  # left, right, bottom and top, in pixels


def plot_style() -> Any:
    """Returns the context in which figures are drawn."""
    return rc_context(STYLE)


def panels(count: int, width: float = 320, height: float = 280) -> tuple[Figure, list[Any]]:
    """Returns a figure and its axes, which stand side by side.

    Args:
        count: the number of axes.
        width: the width of each, in pixels.
        height: the height of each, in pixels.
    """
    figure = Figure(figsize=(count * width / 72, height / 72), dpi=72, layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def write_names(
    axes: Any, points: Sequence[tuple[float, float]], names: Sequence[str], colours: Sequence[str] | None = None,
    bars: Sequence[tuple[float, float]] = (),
) -> None:  # fmt: skip
    """Writes a name beside each point, at the first of several places where it covers no other name and no point.

    Args:
        axes: matplotlib's axes, whose limits no longer change.
        points: (x, y) in the axes' units.
        names: a name for each point. It may have several lines.
        colours: the colour of each name, which shows to which point it belongs. None: INK.
        bars: (low, high) of each point's error bar in the axes' units, which names keep off where they can.
    """
    axes.figure.draw_without_rendering()  # sets where the axes lie
    pixels = [axes.transData.transform(point) for point in points]
    axes_box = axes.get_window_extent()
    taken_boxes = [(x - MARKER_PIXELS, x + MARKER_PIXELS, y - MARKER_PIXELS, y + MARKER_PIXELS) for x, y in pixels]
    bar_boxes = list[Box]()
    for (x, _), (low, high) in zip(points, bars, strict=bool(bars)):
        (left, bottom), (_, top) = axes.transData.transform((x, low)), axes.transData.transform((x, high))
        bar_boxes.append((left - 1, left + 1, min(bottom, top), max(bottom, top)))
    named_points = zip(points, pixels, names, colours or [INK] * len(names), strict=True)
    for point, (x, y), name, colour in sorted(named_points, key=lambda named_point: -named_point[0][1]):
        for offsets in (NAME_OFFSETS, DISTANT_OFFSETS):
            boxes = [(dx, dy, _text_box(x, y, dx, dy, name)) for dx, dy in offsets]
            free_boxes = [
                (dx, dy, box)
                for dx, dy, box in boxes
                if _box_contains((axes_box.x0, axes_box.x1, axes_box.y0, axes_box.y1), box)
                and not any(_boxes_overlap(box, taken) for taken in taken_boxes)
            ]
            if free_boxes:
                break
        clear_boxes = (place for place in free_boxes if not any(_boxes_overlap(place[2], bar) for bar in bar_boxes))
        dx, dy, box = next(clear_boxes, next(iter(free_boxes), boxes[0]))
        taken_boxes.append(box)
        alignment = "left" if dx > 0 else "right"
        is_far = max(abs(dx), abs(dy)) > FAR_PIXELS  # another point may be nearer: a thin line leads to the name's own
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4} if is_far else None
        axes.annotate(
            name, point, (dx, dy), textcoords="offset points", ha=alignment, color=colour, fontsize=12, arrowprops=line,
            linespacing=1.0,
        )  # fmt: skip


def _text_box(x: float, y: float, dx: float, dy: float, text: str) -> Box:
    """Estimates the box of a text of 12 points, which begins (dx > 0) or ends (dx, dy) pixels from the point (x, y).

    The base of its last line is at y + dy.
    """
    lines = text.split("\n")
    width = 7.2 * max(map(len, lines))
    left = x + dx if dx > 0 else x + dx - width
    return left, left + width, y + dy - 3, y + dy + 11 + LINE_PIXELS * (len(lines) - 1)


def _box_contains(outer: Box, box: Box) -> bool:
    """Returns whether a box lies inside another."""
    return outer[0] <= box[0] and box[1] <= outer[1] and outer[2] <= box[2] and box[3] <= outer[3]


def _boxes_overlap(box: Box, other: Box) -> bool:
    """Returns whether two boxes share a point."""
    return box[0] < other[1] and other[0] < box[1] and box[2] < other[3] and other[2] < box[3]


def svg(figure: Figure, title: str) -> str:
    """Returns the figure as an SVG element without a size of its own, with a title for screen readers."""
    buffer = io.StringIO()
    with plot_style():
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    head = re.sub(r' (?:width|height|version|xmlns:xlink)="[^"]*"', "", text[: text.index(">")])
    head = head.replace("<svg", '<svg role="img"', 1)
    body = re.sub(r' id="[a-z][\w.]*_\d+"', "", text[text.index(">") :])  # several drawings share a page
    body = body.replace("xlink:href", "href")
    return f"{head}><title>{escape(title)}</title>{body[1:]}"
