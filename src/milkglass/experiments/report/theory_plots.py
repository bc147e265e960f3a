"""GHOST's Figures 3 and 4 as one SVG: how large epsilon is, what decides it, and what grows with it.

    left     how many pairs have which local epsilon                              Figure 3, subplot (2, 2)
    middle   epsilon against the local epsilon, with the diagonal                 Figure 3, subplots (1, 2) and (2, 1)
    right    both deviations after training against the local epsilon, with the
             straight lines of least squares; upwards in powers of ten            Figure 4

Figure 4 has the global epsilon to the right. Where a drift is larger than every pair's deviations that is one number,
which the middle panel shows; so here the local one takes its place.

The numbers come from experiments/procedures/theory.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDE, HIGH, EDGE, GAP = 300, 260, 44, 24  # of a panel, its margin, and between two, in pixels
BARS = 16
LOSS, GRADIENT, GREY = "#0b4f6c", "#b4530a", "#4d5761"
LEAST = 1e-6  # a deviation below this is drawn as this: it has no logarithm of its own


@dataclass(frozen=True)
class Axis:
    """The numbers from `low` to `high` along so many pixels.

    Attributes:
        log: in powers of ten.
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
        """Pixels from the beginning, inside the axis."""
        if self.log:
            low, high, value = math.log10(self.low), math.log10(self.high), math.log10(max(value, LEAST))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) * self.pixels


@dataclass(frozen=True)
class Panel:
    """One of the three panels.

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
            svg_text(left, bottom + 16, f"{self.x.low:.3g}", "start"),
            svg_text(right, bottom + 16, f"{self.x.high:.3g}", "end"),
            svg_text(left - 4, bottom, f"{self.y.low:.2g}", "end"),
            svg_text(left - 4, 36, f"{self.y.high:.3g}", "end"),
        ]

    def points(self, xs: Sequence[float], ys: Sequence[float], colour: str) -> list[str]:
        places = [self.point(x, y) for x, y in zip(xs, ys, strict=True)]
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}" fill-opacity="0.6"/>' for x, y in places]

    def line(self, slope: float, intercept: float, colour: str) -> str:
        """On a logarithmic axis a curve."""
        steps = [self.x.low + (self.x.high - self.x.low) * i / 40 for i in range(41)]
        places = [self.point(x, slope * x + intercept) for x in steps]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def drawn(theory: Mapping[str, Any]) -> str:
    """theory.json as SVG."""
    pairs, lines = theory["pairs"], theory["lines"]
    parts = [*_histogram(pairs["local"]), *_bounds(pairs["local"], pairs["epsilon"]), *_growth(pairs, lines)]
    title = "Epsilon of each pair, and the deviations after training against it"
    whole = 3 * WIDE + 2 * GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {HIGH}" role="img" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="11" fill="#1c2126"><title>{escape(title)}</title>', *parts, "</svg>", ""])


def _axis(values: Iterable[float], up: bool = False, log: bool = False) -> Axis:
    return Axis.over(values, HIGH - EDGE - 32 if up else WIDE - EDGE - 8, log)


def _histogram(local: Sequence[float]) -> list[str]:
    x = _axis(local)
    counts = [0] * BARS
    for one in local:
        counts[min(BARS - 1, int(BARS * (one - x.low) / (x.high - x.low)))] += 1
    panel = Panel(0, x, _axis([0, *counts], up=True))
    parts, width = panel.frame("local epsilon", "pairs"), x.pixels / BARS
    for i, count in enumerate(counts):
        high = panel.y.at(count)
        parts.append(
            f'<rect x="{EDGE + i * width:.1f}" y="{HIGH - EDGE - high:.1f}" width="{width - 1:.1f}" '
            f'height="{high:.1f}" fill="{LOSS}"/>'
        )
    return parts


def _bounds(local: Sequence[float], epsilon: Sequence[float]) -> list[str]:
    both = [*local, *epsilon]
    panel = Panel(WIDE + GAP, _axis(both), _axis(both, up=True))
    diagonal = panel.line(1.0, 0.0, GREY)
    return [*panel.frame("local epsilon", "epsilon"), diagonal, *panel.points(local, epsilon, LOSS)]


def _growth(pairs: Mapping[str, Sequence[float]], lines: Mapping[str, Mapping[str, float]]) -> list[str]:
    kinds = (("loss", LOSS), ("gradient", GRADIENT))
    every = [one for kind, _ in kinds for one in pairs[f"{kind} after"]]
    panel = Panel(2 * (WIDE + GAP), _axis(pairs["local"]), _axis(every, up=True, log=True))
    parts = panel.frame("local epsilon", "deviation after training")
    for number, (kind, colour) in enumerate(kinds):
        parts += panel.points(pairs["local"], pairs[f"{kind} after"], colour)
        if (one := lines.get(f"{kind}, local epsilon")) is not None:
            parts.append(panel.line(one["slope"], one["intercept"], colour))
        parts.append(svg_text(panel.left + WIDE - 68 + 60 * number, 18, kind, "end", colour))
    return parts


def svg_text(x: float, y: float, words: str, anchor: str, colour: str = "#1c2126") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
