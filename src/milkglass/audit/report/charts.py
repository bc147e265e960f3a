"""Charts as hand-written SVG without scripts, readable on paper and with a title for screen readers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from milkglass.audit.report.result import BudgetPoint
from milkglass.metrics.interval import Interval

INK, SOFT, BAR = "#1c2126", "#4d5761", "#4f9dbd"
LINES = ("#0b4f6c", "#b25c00", "#4d5761")
ROW, LABEL, WIDE, LONG = 38, 190, 560, 26  # LONG: letters of a label's line


def bars(title: str, axis: str, rows: Mapping[str, Interval], lines: Mapping[str, float]) -> str:
    """Returns a chart with a horizontal bar for each row, and its interval as a line with ends.

    Args:
        title: of the chart.
        axis: what the scale counts, with its unit.
        rows: the bars.
        lines: what costs an attacker nothing, drawn as thin bars below.
    """
    rows = {name: one for name, one in rows.items() if one.units}
    lines = {name: value for name, value in lines.items() if not math.isnan(value)}
    bottom = ROW * (len(rows) + len(lines)) + 8
    room = WIDE - LABEL - 84
    parts = [
        f'<path d="M{LABEL + room * share:.1f} 4V{bottom}" stroke="#cfd6dc"/>'
        f'<text x="{LABEL + room * share:.1f}" y="{bottom + 16}" text-anchor="middle" fill="{SOFT}">'
        f"{100 * share:.0f}</text>"
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for i, (name, one) in enumerate(rows.items()):
        y = i * ROW + 8
        alone = math.isnan(one.low)
        parts += [
            _label(name, y),
            f'<rect x="{LABEL}" y="{y}" width="{room * one.value:.1f}" height="22" fill="{BAR}"/>',
            "" if alone else _whisker(LABEL + room * one.low, LABEL + room * one.high, y + 11),
            _figure(one.value, LABEL + room * (one.value if alone else max(one.value, one.high)) + 8, y, alone),
        ]
    for i, (name, value) in enumerate(lines.items()):
        y = (len(rows) + i) * ROW + 8
        parts += [
            _label(name, y),
            f'<rect x="{LABEL}" y="{y + 8}" width="{max(1, room * value):.1f}" height="6" fill="{SOFT}"/>',
            _figure(value, LABEL + room * value + 8, y),
        ]
    parts.append(f'<text x="{LABEL + room / 2:.1f}" y="{bottom + 36}" text-anchor="middle">{escape(axis)}</text>')
    return _svg(title, bottom + 44, parts)


def _whisker(low: float, high: float, y: float) -> str:
    path = f"M{low:.1f} {y - 7}V{y + 7}M{low:.1f} {y}H{high:.1f}M{high:.1f} {y - 7}V{y + 7}"
    return f'<path d="{path}" stroke="#fff" stroke-width="5"/><path d="{path}" stroke="{INK}" stroke-width="2"/>'


def curve(title: str, axes: tuple[str, str], points: Sequence[BudgetPoint]) -> str:
    """Returns a chart of the content tokens read against the tokens sent under one key (logarithmic).

    Args:
        title: of the chart.
        axes: the titles of the tokens' axis and of the shares' axis, with their units.
        points: the measurements, a line for each adversary.
    """
    points = [point for point in points if not math.isnan(point.content)]
    if not points:
        return ""
    left, top, high, room = 66, 12, 240, WIDE - 66 - 24
    exponents = [math.log10(max(1, point.tokens)) for point in points]
    low, most = min(exponents), max(exponents)
    span = max(most - low, 0.1)

    def place(point: BudgetPoint) -> tuple[float, float]:
        return left + room * (math.log10(max(1, point.tokens)) - low) / span, top + high * (1 - point.content)

    parts = [
        f'<path d="M{left} {top + high * (1 - share)}h{room}" stroke="#cfd6dc"/>'
        f'<text x="{left - 6}" y="{top + high * (1 - share) + 4}" text-anchor="end">{100 * share:.0f} %</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for tokens in sorted({point.tokens for point in points}):
        x = left + room * (math.log10(max(1, tokens)) - low) / span
        parts.append(f'<text x="{x:.1f}" y="{top + high + 20}" text-anchor="middle">{short(tokens)}</text>')
    across, upwards = (escape(one) for one in axes)
    parts.append(f'<text x="{left + room / 2}" y="{top + high + 40}" text-anchor="middle">{across}</text>')
    middle = f'x="{-(top + high / 2)}" y="14" transform="rotate(-90)"'
    parts.append(f'<text {middle} text-anchor="middle">{upwards}</text>')
    for number, adversary in enumerate(dict.fromkeys(point.adversary for point in points)):
        own = sorted((p for p in points if p.adversary == adversary), key=lambda p: p.tokens)
        colour = LINES[number % len(LINES)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(place, own))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="3"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in map(place, own)]
        y = top + high + 64 + 20 * number
        parts.append(f'<rect x="{left}" y="{y - 9}" width="22" height="5" fill="{colour}"/>')
        parts.append(f'<text x="{left + 30}" y="{y}">{escape(adversary)}</text>')
    count = len({point.adversary for point in points})
    return _svg(title, top + high + 64 + 20 * count, parts)


def short(count: int) -> str:
    """Returns a number in short form: `1200` as `1.2k`."""
    for size, letter in ((1_000_000, "M"), (1000, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _label(name: str, y: float) -> str:
    """Returns a label on one line or on two."""
    first, second = name, ""
    if len(name) > LONG and " " in name[:LONG]:
        cut = name[:LONG].rindex(" ")
        first, second = name[:cut], name[cut + 1 :]
    words = [(first, y + (16 if not second else 9)), *([(second, y + 24)] if second else [])]
    return "".join(f'<text x="{LABEL - 8}" y="{at}" text-anchor="end">{escape(part)}</text>' for part, at in words)


def _figure(value: float, x: float, y: float, least: bool = False) -> str:
    shown = f"{100 * value:.1f}" if value >= 0.001 or value == 0 else f"{100 * value:.1g}"
    return f'<text x="{x:.1f}" y="{y + 16}">{"≥ " if least else ""}{shown} %</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height:.0f}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}"><title>{escape(title)}</title>'
        + "".join(parts)
        + "</svg>"
    )
