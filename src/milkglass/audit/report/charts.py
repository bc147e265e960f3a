"""The charts of an audit's page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, NullLocator

from milkglass.audit.report.result import BudgetPoint
from milkglass.metrics.interval import Interval
from milkglass.metrics.percent import percent_to_one_decimal
from milkglass.plots import COLOURS, GREY, INK, MARKERS, panels, plot_style, svg

BAR_COLOUR = "#4f9dbd"
WIDTH_PIXELS, ROW_PIXELS = 480, 40  # the width of a chart, and the height of a bar with its gap, in pixels
MAX_LINE_CHARACTERS = 26  # characters of a label's line


def bars(title: str, axis: str, rows: Mapping[str, Interval], floors: Mapping[str, float]) -> str:
    """Returns a chart (SVG) with a horizontal bar for each row, and its interval as a line with ends.

    Without a bar it is "".

    Args:
        title: describes the chart for those who cannot see it.
        axis: what the scale counts, with its unit.
        rows: the figures by their labels.
        floors: shares that cost an attacker nothing, drawn as thin bars below.
    """
    rows = {name: interval for name, interval in rows.items() if interval.units}
    floors = {name: value for name, value in floors.items() if not math.isnan(value)}
    labels = ["\n".join(textwrap.wrap(name, MAX_LINE_CHARACTERS)) for name in (*rows, *floors)]
    if not labels:
        return ""
    with plot_style():
        figure, (axes,) = panels(1, WIDTH_PIXELS, ROW_PIXELS * len(labels) + 64)
        for place, row in enumerate(rows.values()):
            has_interval = not math.isnan(row.low)
            axes.barh(place, 100 * row.value, 0.55, color=BAR_COLOUR)
            if has_interval:
                ends = [[100 * max(0.0, row.value - row.low)], [100 * max(0.0, row.high - row.value)]]
                for width, colour in ((5, "white"), (2, INK)):
                    axes.errorbar(100 * row.value, place, xerr=ends, color=colour, elinewidth=width, capsize=5)
            end = max(row.value, row.high) if has_interval else row.value
            _write_share(axes, row.value, end, place, is_lower_bound=not has_interval)
        for place, value in enumerate(floors.values(), len(rows)):
            axes.barh(place, 100 * value, 0.15, color=GREY)
            _write_share(axes, value, value, place)
        axes.set(xlim=(0, 100), ylim=(len(labels) - 0.5, -0.5), xlabel=axis, xticks=range(0, 101, 25))
        axes.set_yticks(range(len(labels)), labels)
        axes.grid(axis="y", visible=False)
        return svg(figure, title)


def _write_share(axes: Any, value: float, end: float, place: int, is_lower_bound: bool = False) -> None:
    """Writes a share beside the end of its bar."""
    label = percent_to_one_decimal(value, is_lower_bound)
    axes.annotate(label, (100 * end, place), (8, 0), textcoords="offset points", va="center")


def curve(title: str, axes_titles: tuple[str, str], points: Sequence[BudgetPoint]) -> str:
    """Returns a chart (SVG) of the content tokens read against the tokens sent under one key (logarithmic).

    Without a point it is "".

    Args:
        title: describes the chart for those who cannot see it.
        axes_titles: the titles of the tokens' axis and of the shares' axis, with their units.
        points: the measurements, a line for each adversary.
    """
    points = [point for point in points if not math.isnan(point.content)]
    if not points:
        return ""
    with plot_style():
        figure, (axes,) = panels(1, WIDTH_PIXELS, 380)
        for index, adversary in enumerate(dict.fromkeys(point.adversary for point in points)):
            adversary_points = sorted(
                (max(1, point.tokens), 100 * point.content) for point in points if point.adversary == adversary
            )
            style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            axes.plot(*zip(*adversary_points, strict=True), label=adversary, linewidth=2.5, clip_on=False, **style)
        axes.set(xscale="log", ylim=(0, 100), xlabel=axes_titles[0], ylabel=axes_titles[1], yticks=range(0, 101, 25))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(_labelled_sizes(sorted({max(1, point.tokens) for point in points})))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, place: short_number(round(tokens))))
        figure.legend(loc="outside lower left", alignment="left")
        return svg(figure, title)


def _labelled_sizes(sizes: Sequence[int]) -> list[int]:
    """Returns the sizes whose labels do not overlap on the logarithmic axis, the last one among them."""
    min_ratio = (sizes[-1] / sizes[0]) ** (1 / 14)
    labelled_sizes: list[int] = []
    for size in reversed(sizes):
        if not labelled_sizes or labelled_sizes[-1] >= min_ratio * size:
            labelled_sizes.append(size)
    return labelled_sizes


def short_number(count: int) -> str:
    """Returns a number in short form: `1200` as `1.2k`."""
    for size, letter in ((1_000_000, "M"), (1000, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
