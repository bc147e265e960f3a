"""The frontier: the utility of each defence against the share of the content that the strongest attack reads.

It takes several comparisons on one data set, all with the same model, rows and training, so that "plain" has the same
utility in each. Attacks and attacked texts may differ; if a defence is in two of them, the result that reads more
counts. A dashed line is the best that the client does alone in seconds: below it a defence is useless. A second dashed
line is "plain", a client that trains the same model locally and sends nothing: defences are useful to those who cannot.

A defence is on the frontier if it is above the first line, not all content is read, and no other has both more utility
and less content read. Controls ("no defence, ...") are drawn, but neither are on the frontier nor keep others from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from milkglass.errors import UsageError
from milkglass.experiments.report.glossary import SPREAD
from milkglass.experiments.report.panels import GREY, Axis, svg_page, svg_text
from milkglass.experiments.report.summary import CONTENT, rows

PLAIN, ALONE, CONSTANT, CONTROL = "plain", "client alone", "commonest class", "no defence"
ALL_READ = 99.95  # percent of the content: nothing is hidden
ON, OFF = "#b4530a", "#0b4f6c"
LEFT, TOP, ACROSS, UP, NAMES = 52, 34, 560, 360, 340  # of the drawing: margins, axes, room for names, in pixels


@dataclass(frozen=True)
class FrontierPoint:
    """One defence.

    Attributes:
        defence: its name.
        utility, content: in percent.
        utility_spread, content_spread: half of their 95 % intervals; 0: the result has none.
    """

    defence: str
    utility: float
    content: float
    utility_spread: float = 0.0
    content_spread: float = 0.0

    @property
    def control(self) -> bool:
        return self.defence.startswith(CONTROL)

    def beaten(self, others: Sequence[FrontierPoint]) -> bool:
        """Returns whether another defence costs no more and leaks no more, by the figures alone."""
        return any(
            one.utility >= self.utility
            and one.content <= self.content
            and (one.utility, one.content) != (self.utility, self.content)
            for one in others
            if not one.control
        )


def points(results: Sequence[Mapping[str, float]], data: str) -> list[FrontierPoint]:
    """Returns the defences of several results that send something for each token.

    Raises:
        UsageError: "plain" differs, so that the results cannot be compared.
    """
    found: dict[str, FrontierPoint] = {}
    plain: set[float] = set()
    for figures in results:
        for row in rows(figures).get(data, []):
            where = f"{data}, {row.defence}"
            if row.defence == PLAIN:
                plain.add(round(row.utility, 1))
            if row.content is not None:
                widths = (f"{row.measure}{SPREAD}, {where}", f"{CONTENT.replace(', ', f'{SPREAD}, ', 1)}{where}")
                spreads = [figures.get(name, 0.0) for name in widths]
                one = FrontierPoint(row.defence, row.utility, row.content, *spreads)
                found[row.defence] = max(found.get(row.defence, one), one, key=lambda point: point.content)
    if len(plain) > 1:
        raise UsageError(f"plain has {sorted(plain)} in these results", "give results of one model and one training")
    return list(found.values())


def alone(results: Sequence[Mapping[str, float]], data: str) -> float | None:
    """Returns the best utility of a client that sends nothing. None: no result has it."""
    start = f"accuracy, {data}, {ALONE}"
    values = [value for figures in results for name, value in figures.items() if name.startswith(start)]
    return max(values, default=None)


def unplaced(results: Sequence[Mapping[str, float]], data: str) -> list[str]:
    """Returns the defences that have a utility but no point, since they send one vector for a text."""
    start, seen = f"accuracy, {data}, ", {one.defence for one in points(results, data)}
    names = dict.fromkeys(name.removeprefix(start) for figures in results for name in figures if name.startswith(start))
    return [one for one in names if one not in seen and one != CONSTANT and not one.startswith(ALONE)]


def drawn(every: Sequence[FrontierPoint], level: float | None, about: str, notes: Sequence[str] = ()) -> str:
    """Returns the frontier as SVG.

    Args:
        every: the points.
        level: the utility of the client alone.
        about: one line on what was measured.
        notes: further lines below it.
    """
    utilities = [one.utility + sign * one.utility_spread for one in every for sign in (-1, 1)]
    x, y = Axis(0.0, 100.0, ACROSS), Axis.over([*utilities, *([] if level is None else [level])], UP)
    bottom, listed = TOP + UP, sorted(every, key=lambda one: one.content)
    notes = [*notes, *([] if level is not None else ["No result here has a row of the client alone."])]
    below = max(bottom + 54, TOP + 18 * len(listed) + 24)  # the notes, under the list of names
    parts = [f'<path d="M{LEFT} {TOP}V{bottom}H{LEFT + ACROSS}" fill="none" stroke="{GREY}"/>']
    parts += [svg_text(LEFT + x.at(share), bottom + 16, str(share), "middle") for share in range(0, 101, 20)]
    parts += [svg_text(LEFT - 6, bottom - y.at(one) + 4, f"{one:.0f}", "end") for one in (y.low, y.high)]
    parts.append(svg_text(LEFT, TOP - 12, "accuracy, %", "start"))
    parts.append(
        svg_text(LEFT + ACROSS / 2, bottom + 34, "content tokens that the strongest attack reads, %", "middle")
    )
    parts += [svg_text(LEFT, below + 16 * number, one, "start", GREY) for number, one in enumerate([about, *notes])]
    if level is not None:
        at = bottom - y.at(level)
        parts += _line(at, f"the client alone, {level:.1f}")
    for one in every:
        if one.defence == PLAIN:
            parts += _line(bottom - y.at(one.utility), f"the client alone with the same model, {one.utility:.1f}")
    for number, one in enumerate(listed, 1):
        useful = not one.control and one.content < ALL_READ and (level is None or one.utility > level)
        parts += _point(number, one, ON if useful and not one.beaten(every) else OFF, x, y)
    return svg_page(LEFT + ACROSS + NAMES, below + 16 * len(notes) + 10, about, parts)


def _line(at: float, words: str) -> list[str]:
    """Returns a dashed line across, at this height in pixels."""
    return [
        f'<path d="M{LEFT} {at:.1f}h{ACROSS}" stroke="{GREY}" stroke-dasharray="5 4"/>',
        svg_text(LEFT + 6, at - 5, words, "start", GREY),
    ]


def _point(number: int, one: FrontierPoint, colour: str, x: Axis, y: Axis) -> list[str]:
    """Returns the point, its intervals, its number, and its line in the list of names."""
    across, up = LEFT + x.at(one.content), TOP + UP - y.at(one.utility)
    low, high = (TOP + UP - y.at(one.utility + sign * one.utility_spread) for sign in (-1, 1))
    start, stop = (LEFT + x.at(one.content + sign * one.content_spread) for sign in (-1, 1))
    bars = f"M{across:.1f} {low:.1f}V{high:.1f}M{start:.1f} {up:.1f}H{stop:.1f}"
    words = f"{number}  {one.defence}: {one.utility:.1f}, {one.content:.1f} read"
    return [
        f'<path d="{bars}" stroke="{colour}" stroke-opacity="0.5" fill="none"/>',
        f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4" fill="{colour}"><title>{escape(one.defence)}</title></circle>',
        svg_text(across + 6, up - 5, str(number), "start", colour),
        svg_text(LEFT + ACROSS + 16, TOP + 18 * number, words, "start", colour),
    ]


def of(results: Sequence[Mapping[str, Any]], data: str, about: str) -> str:
    """Returns the frontier of results as their files have them."""
    figures = [{name: one["measured"] for name, one in result["figures"].items()} for result in results]
    left = unplaced(figures, data)
    notes = [f"Not drawn, since one vector crosses for a text: {', '.join(left)}."] if left else []
    return drawn(points(figures, data), alone(figures, data), about, notes)
