"""Plots figures over epsilon, one panel for each measure, as CMIF's Figure 3 and ObfusLM's Table 10.

It plots variants that differ in the parameter "epsilon" alone, if there are two or more, with a line for each state of
their models ("before", "clear", "after"). The figures of the variant without parameters are dashed. A vertical bar is
an interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milkglass.experiments.record import ResultRecord
from milkglass.plots import COLOURS, MARKERS, panels, plot_style, svg

Point = tuple[float, float, float]  # epsilon, figure, half-width of its interval


@dataclass(frozen=True, slots=True)
class Curves:
    """Holds the figures of one measure over epsilon.

    Attributes:
        measure: the name of the measure.
        lines: the points of each line, in order of epsilon, by the state of the models ("before" and alike).
        plain_values: the plain variant's figure, by the same states.
    """

    measure: str
    lines: Mapping[str, tuple[Point, ...]]
    plain_values: Mapping[str, float]


def curves_of(records: Sequence[ResultRecord], variants: Mapping[str, Mapping[str, Any]]) -> tuple[Curves, ...]:
    """Returns the curves of each measure that has a line of two points or more, in the order of the records.

    Args:
        records: the figures of a result.
        variants: the parameters of each variant, by its name; the plain one has none.
    """
    epsilons = _epsilons(variants)
    records_with_state = [record for record in records if record.when and not record.attack]
    curves = []
    for measure in dict.fromkeys(record.measure for record in records_with_state):
        lines: dict[str, list[Point]] = {}
        for record in records_with_state:
            if record.measure == measure and record.variant in epsilons:
                point = (epsilons[record.variant], record.value, record.half_width or 0.0)
                lines.setdefault(record.when, []).append(point)
        plain_values = {
            record.when: record.value
            for record in records_with_state
            if record.measure == measure and not variants.get(record.variant, True)
        }
        shown_plain_values = {when: value for when, value in plain_values.items() if when in lines}
        if curve_lines := {when: tuple(sorted(line)) for when, line in lines.items() if len(line) > 1}:
            curves.append(Curves(measure, curve_lines, shown_plain_values))
    return tuple(curves)


def _epsilons(variants: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns the epsilon of each variant; none if the variants differ in anything else."""
    with_epsilon = {name: variant for name, variant in variants.items() if "epsilon" in variant}
    other_parameters = [
        {key: value for key, value in entry.items() if key != "epsilon"} for entry in with_epsilon.values()
    ]
    if any(parameters != other_parameters[0] for parameters in other_parameters):
        return {}
    return {name: float(parameters["epsilon"]) for name, parameters in with_epsilon.items()}


def curves_svg(curves_of_panels: Sequence[Curves]) -> str:
    """Returns the curves as one SVG, with a panel for each measure."""
    with plot_style():
        figure, axes = panels(len(curves_of_panels))
        for panel, curves in zip(axes, curves_of_panels, strict=True):
            for index, (when, line) in enumerate(curves.lines.items()):
                colour = COLOURS[index % len(COLOURS)]
                marker = MARKERS[index % len(MARKERS)]
                xs, ys, half_widths = zip(*line, strict=True)
                panel.errorbar(xs, ys, half_widths, color=colour, marker=marker, markersize=4, capsize=2, label=when)
                if when in curves.plain_values:
                    panel.axhline(curves.plain_values[when], color=colour, linestyle="--", linewidth=1)
            panel.set(xlabel="epsilon" + (" (dashed: plain)" if curves.plain_values else ""), title=curves.measure)
            panel.legend()
        return svg(figure, "figures over epsilon")
