"""Charts as SVG text, drawn by hand: no library, no script, readable on paper and by a screen reader's title."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from milkglass.audit.report.result import BudgetPoint
from milkglass.metrics.interval import Interval

INK, SOFT, BARS = "#1c2126", "#4d5761", ("#0b4f6c", "#b25c00", "#4d5761")
ROW, LABEL, WIDE = 34, 172, 520


def bars(title: str, rows: Mapping[str, Interval], lines: Mapping[str, float]) -> str:
    """A horizontal bar a row, with its interval; `lines` are what costs nothing, drawn as thin bars below."""
    rows = {name: one for name, one in rows.items() if one.units}
    lines = {name: value for name, value in lines.items() if not math.isnan(value)}
    height = ROW * (len(rows) + len(lines)) + 34
    room = WIDE - LABEL - 70
    parts = []
    for i, (name, one) in enumerate(rows.items()):
        y = i * ROW + 8
        parts += [
            _label(name, y),
            f'<rect x="{LABEL}" y="{y}" width="{room * one.value:.1f}" height="18" fill="{BARS[0]}"/>',
            f'<path d="M{LABEL + room * one.low:.1f} {y + 9}H{LABEL + room * one.high:.1f}" stroke="{BARS[1]}" '
            'stroke-width="3"/>',
            _figure(one.value, LABEL + room * max(one.value, one.high) + 6, y),
        ]
    for i, (name, value) in enumerate(lines.items()):
        y = (len(rows) + i) * ROW + 8
        parts += [
            _label(name, y),
            f'<rect x="{LABEL}" y="{y + 6}" width="{max(1, room * value):.1f}" height="6" fill="{SOFT}"/>',
            _figure(value, LABEL + room * value + 6, y),
        ]
    parts.append(_scale(height - 14, room))
    return _svg(title, height, parts)


def curve(title: str, points: Sequence[BudgetPoint]) -> str:
    """Share of content tokens read against the tokens sent under one key (logarithmic); a line an adversary."""
    points = [point for point in points if not math.isnan(point.content)]
    if not points:
        return ""
    left, top, high, room = 48, 12, 260, WIDE - 48 - 20
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
    for number, adversary in enumerate(dict.fromkeys(point.adversary for point in points)):
        own = sorted((p for p in points if p.adversary == adversary), key=lambda p: p.tokens)
        colour = BARS[number % len(BARS)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(place, own))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="3"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in map(place, own)]
        y = top + high + 44 + 20 * number
        parts.append(f'<rect x="{left}" y="{y - 9}" width="22" height="5" fill="{colour}"/>')
        parts.append(f'<text x="{left + 30}" y="{y}">{escape(adversary)}</text>')
    count = len({point.adversary for point in points})
    return _svg(title, top + high + 44 + 20 * count, parts)


def short(count: int) -> str:
    """`1200` as `1.2k`."""
    for size, letter in ((1_000_000, "M"), (1000, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _label(name: str, y: float) -> str:
    return f'<text x="{LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>'


def _figure(value: float, x: float, y: float) -> str:
    shown = f"{100 * value:.1f}" if value >= 0.001 or value == 0 else f"{100 * value:.1g}"
    return f'<text x="{x:.1f}" y="{y + 14}">{shown} %</text>'


def _scale(y: float, room: float) -> str:
    return "".join(
        f'<text x="{LABEL + room * share:.1f}" y="{y + 10}" text-anchor="middle" fill="{SOFT}">{100 * share:.0f}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    )


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height:.0f}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}"><title>{escape(title)}</title>'
        + "".join(parts)
        + "</svg>"
    )
