"""Where the time goes, drawn as stacked bars: CMIF's Figure 4.

A bar a variant, a colour a part; a part that a subtraction makes negative is not drawn. The thin line is the range of
the totals. The numbers come from split_decoder.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from milkglass.experiments.record import read_records
from milkglass.plots import GREY, panels, plot_style, svg

PARTS = {"embedding": "#1b7f5c", "crossing": "#b4530a", "wire": "#7b3294", "server": "#0b4f6c", "other": "#9aa4ad"}


def drawn(result: Mapping[str, Any]) -> str:
    """A result of the bench as SVG."""
    with plot_style():
        return svg(figure(result), title(result))


def title(result: Mapping[str, Any]) -> str:
    return f"{result['model']}: seconds for {result['tokens']} tokens, medians of {result['rounds']}"


def figure(result: Mapping[str, Any]) -> Figure:
    figures = {(one.measure, one.variant): one for one in read_records(result)}
    totals = {name: one for (measure, name), one in figures.items() if measure == "total s"}
    whole, (axes,) = panels(1, 680, 110 + 34 * len(totals))
    lefts = [0.0] * len(totals)
    for part, colour in PARTS.items():
        widths = [max(0.0, figures[f"{part} s", name].value) for name in totals]
        axes.barh([*totals], widths, 0.5, lefts, color=colour, label=part)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, (name, total) in enumerate(totals.items()):
        axes.plot(
            [total.further_numbers["least"], total.further_numbers["most"]], [place + 0.35] * 2, color=GREY, linewidth=1
        )
        over = "" if name == "split" else f", {figures['% over split', name].value:+.1f} %"
        end = max(lefts[place], total.further_numbers["most"])
        axes.annotate(f"{total.value:.2f} s{over}", (end, place), (6, 0), textcoords="offset points", va="center")
    published = ", ".join(f"{model} +{each['% over split']:g} %" for model, each in result["published"].items())
    axes.set(xlabel=f"{title(result)}\nthe paper, over its split without an enclave: {published}")
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    whole.legend(loc="outside upper center", ncols=len(PARTS))
    return whole
