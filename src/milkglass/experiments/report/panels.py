"""Axes and panels of the plots of results, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDE, HIGH, EDGE, GAP = 300, 260, 44, 24  # of a panel, its margin, and between two, in pixels
GREY = "#4d5761"
LEAST = 1e-6  # on a logarithmic axis, what is below this is drawn as this: zero has no logarithm


@dataclass(frozen=True)
class Axis:
    """Maps the numbers from `low` to `high` to pixels.

    Attributes:
        log: whether the axis is logarithmic.
    """

    low: float
    high: float
    pixels: float
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], pixels: float, log: bool = False) -> Axis:
        drawn = [max(one, LEAST) if log else one for one in values]
        low, high = min(drawn), max(drawn)
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - 1, high + 1)
        return cls(low, high, pixels, log)

    def at(self, value: float) -> float:
        """Returns the pixels from the beginning, clipped to the axis."""
        if self.log:
            low, high, value = math.log10(self.low), math.log10(self.high), math.log10(max(value, LEAST))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) * self.pixels


@dataclass(frozen=True)
class Panel:
    """A pair of axes and what is drawn between them.

    Attributes:
        left: where it begins.
        x, y: its axes, y upwards.
    """

    left: float
    x: Axis
    y: Axis

    def point(self, x: float, y: float) -> tuple[float, float]:
        return self.left + EDGE + self.x.at(x), HIGH - EDGE - self.y.at(y)

    def frame(self, across: str, up: str) -> list[str]:
        left, right, bottom = self.left + EDGE, self.left + WIDE - 8, HIGH - EDGE
        return [
            f'<path d="M{left} 28V{bottom}H{right}" fill="none" stroke="{GREY}"/>',
            svg_text(left, 18, up, "start"),
            svg_text((left + right) / 2, HIGH - 8, across, "middle"),
            svg_text(left, bottom + 16, _label(self.x.low), "start"),
            svg_text(right, bottom + 16, _label(self.x.high), "end"),
            svg_text(left - 4, bottom, f"{self.y.low:.2g}", "end"),
            svg_text(left - 4, 36, _label(self.y.high), "end"),
        ]

    def points(self, xs: Sequence[float], ys: Sequence[float], colour: str) -> list[str]:
        places = [self.point(x, y) for x, y in zip(xs, ys, strict=True)]
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}" fill-opacity="0.6"/>' for x, y in places]

    def line(self, slope: float, intercept: float, colour: str) -> str:
        """Returns a straight line, which is a curve on a logarithmic axis."""
        steps = [self.x.low + (self.x.high - self.x.low) * i / 40 for i in range(41)]
        places = [self.point(x, slope * x + intercept) for x in steps]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def svg_page(width: float, high: float, title: str, parts: Iterable[str]) -> str:
    """Returns a drawing as a file of its own."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {high}" role="img" font-family="sans-serif" '
        f'font-size="11" fill="#1c2126"><title>{escape(title)}</title>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def svg_text(x: float, y: float, words: str, anchor: str, colour: str = "#1c2126") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
