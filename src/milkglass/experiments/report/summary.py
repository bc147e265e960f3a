"""A comparison at a glance: the utility of each defence beside what the strongest attack reads, as rows and as a plot.

Only results of comparisons have both (experiments/kinds/comparison.py); other results have no rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

UTILITY = ("accuracy", "matthews", "f1", "pearson")
TOKENS, CONTENT = "tokens top-1, strongest, ", "content top-1, strongest, "
WIDE, HIGH, EDGE = 640, 360, 48  # of the drawing, and its margin, in pixels
ROOM = 2.0  # points above the best utility and below the worst


@dataclass(frozen=True)
class SummaryRow:
    """One defence on one data set.

    Attributes:
        measure: the name of the utility.
        utility: of the measure, in points.
        tokens, content: what the strongest attack reads, in percent.
    """

    data: str
    defence: str
    measure: str
    utility: float
    tokens: float
    content: float | None


def rows(figures: Mapping[str, float]) -> dict[str, list[SummaryRow]]:
    """Returns the rows of a comparison by data set, in the order of its figures.

    Args:
        figures: of a result, by name.
    """
    result: dict[str, list[SummaryRow]] = {}
    for name, tokens in figures.items():
        data, _, defence = name.removeprefix(TOKENS).partition(", ")
        measure = next((one for one in UTILITY if f"{one}, {data}, {defence}" in figures), None)
        if name.startswith(TOKENS) and measure is not None:
            utility = figures[f"{measure}, {data}, {defence}"]
            content = figures.get(f"{CONTENT}{data}, {defence}")
            result.setdefault(data, []).append(SummaryRow(data, defence, measure, utility, tokens, content))
    return result


def drawn(rows: Sequence[SummaryRow]) -> str:
    """Returns one data set's rows as SVG, what is read against utility. Each point has its row's number."""
    low, high = min(one.utility for one in rows) - ROOM, max(one.utility for one in rows) + ROOM
    across, up = WIDE - 2 * EDGE, HIGH - 2 * EDGE
    title = f"{rows[0].data}: {rows[0].measure} against what the strongest attack reads"
    parts = [
        f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(title)}" font-size="13" fill="#1c2126">',
        f'<path d="M{EDGE} {EDGE}V{HIGH - EDGE}H{WIDE - EDGE}" fill="none" stroke="#4d5761"/>',
        f'<text x="{WIDE / 2}" y="{HIGH - 10}" text-anchor="middle">tokens that the strongest attack reads, %</text>',
        f'<text x="{EDGE}" y="{EDGE - 16}">{escape(rows[0].measure)}</text>',
    ]
    for share in range(0, 101, 25):
        x = EDGE + across * share / 100
        parts.append(f'<text x="{x:.1f}" y="{HIGH - EDGE + 18}" text-anchor="middle">{share}</text>')
    for value in (low + ROOM, high - ROOM):
        y = HIGH - EDGE - up * (value - low) / (high - low)
        parts.append(f'<text x="{EDGE - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.0f}</text>')
    for number, one in enumerate(rows, 1):
        x, y = EDGE + across * one.tokens / 100, HIGH - EDGE - up * (one.utility - low) / (high - low)
        info = f"<title>{escape(one.defence)}</title>"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#0b4f6c">{info}</circle>')
        parts.append(f'<text x="{x + 7:.1f}" y="{y - 5:.1f}">{number}</text>')
    return "\n".join([*parts, "</svg>"])
