"""Where the time goes, drawn as stacked bars: CMIF's Figure 4.

A bar a variant, a colour a part; a part that a subtraction makes negative is not drawn. The thin line is the range of
the totals. The numbers come from split_decoder.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from milkglass.experiments.report.panels import GREY, svg_page, svg_text

PARTS = {"embedding": "#3d7a37", "crossing": "#b4530a", "wire": "#6b3fa0", "server": "#0b4f6c", "other": "#9aa4ad"}
TOTAL = "total s, "
LEFT, WIDE, ROW, BAR = 130, 440, 34, 18  # of the names, of the longest bar, a bar with its gap, a bar, in pixels
TOP, FOOT, RIGHT = 36, 40, 110


def drawn(result: Mapping[str, Any]) -> str:
    """A result of the bench as SVG."""
    figures = result["figures"]
    names = [name.removeprefix(TOTAL) for name in figures if name.startswith(TOTAL)]
    longest = max(figures[TOTAL + name]["most"] for name in names)
    high = TOP + ROW * len(names) + FOOT
    title = f"{result['model']}: seconds for {result['tokens']} tokens, medians of {result['rounds']}"
    parts = list[str]()
    for number, (part, colour) in enumerate(PARTS.items()):
        x = LEFT + 90 * number
        parts.append(f'<path d="M{x} 8h10v10h-10z" fill="{colour}"/>{svg_text(x + 14, 17, part, "start")}')
    for number, name in enumerate(names):
        parts += _bar(TOP + ROW * number, name, figures, longest)
    published = ", ".join(f"{model} +{each['% over split']:g} %" for model, each in result["published"].items())
    parts.append(svg_text(LEFT, high - 22, title, "start", GREY))
    parts.append(svg_text(LEFT, high - 7, f"the paper, over its split without an enclave: {published}", "start", GREY))
    return svg_page(LEFT + WIDE + RIGHT, high, title, parts)


def _bar(top: float, name: str, figures: Mapping[str, Mapping[str, float]], longest: float) -> list[str]:
    total, x = figures[TOTAL + name], float(LEFT)
    parts = [svg_text(LEFT - 6, top + 13, name, "end")]
    for part, colour in PARTS.items():
        width = max(0.0, figures[f"{part} s, {name}"]["measured"]) / longest * WIDE
        parts.append(
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}">'
            f"<title>{escape(part)}</title></rect>"
        )
        x += width
    low, high = (LEFT + total[end] / longest * WIDE for end in ("least", "most"))
    parts.append(f'<path d="M{low:.1f} {top + BAR + 4}H{high:.1f}" fill="none" stroke="{GREY}"/>')
    over = figures[f"% over split, {name}"]["measured"]
    label = f"{total['measured']:.2f} s" + ("" if name == "split" else f", {over:+.1f} %")
    return [*parts, svg_text(max(x, high) + 6, top + 13, label, "start")]
