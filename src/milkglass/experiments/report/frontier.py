"""Plots the utility of each defence against what the strongest attack reads, for one result or several.

For one result it plots every defence against the share of tokens read. For several results on one data set it also
marks the frontier. These are comparisons with the same model, rows and training, so that "plain" has the same utility
in each. Attacks and attacked texts may differ; if a defence is in two of them, the result that reads more counts. A
dashed line is the best that the client does alone in seconds: below it a defence is useless. A second dashed line is
"plain", a client that trains the same model locally and sends nothing: a defence serves a client that cannot train
locally.

A defence is on the frontier (the Pareto frontier) if it is above the first line, not all of its content is read, and no
other is at least as good in both figures and better in one. Controls ("no defence, ...") are drawn, but neither are on
the frontier nor keep others from it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milkglass.errors import UsageError
from milkglass.experiments.record import CLIENT_ALONE, COMMONEST_CLASS, STRONGEST_ATTACK, ResultRecord, read_records
from milkglass.plots import COLOURS, GREY, panels, plot_style, svg, write_names

UTILITY_MEASURES = ("accuracy", "matthews", "f1", "pearson")  # the first of these that a result has is its utility
PLAIN_VARIANT, CONTROL_PREFIX = "plain", "no defence"
ALL_READ_PERCENT = 99.95  # from this share of the content on, nothing counts as hidden
OFF_FRONTIER_COLOUR, ON_FRONTIER_COLOUR = COLOURS[:2]


@dataclass(frozen=True)
class DefencePoint:
    """Holds the utility of one defence on one data set, and what is read of what it sends.

    Attributes:
        data: the name of the data set.
        defence: the name of the defence.
        measure: the measure of the utility, such as "accuracy".
        utility: the value of the measure times 100.
        tokens: what the strongest attack reads of all tokens, in percent.
        content: what the strongest attack reads of content tokens, in percent. None: the attack reads words without
            their order, so that there is no such figure.
        utility_half_width: the half-width of the 95 % interval of the utility; 0: the result has none.
        content_half_width: the half-width of the 95 % interval of `content`; 0: the result has none.
    """

    data: str
    defence: str
    measure: str
    utility: float
    tokens: float
    content: float | None = None
    utility_half_width: float = 0.0
    content_half_width: float = 0.0

    @property
    def is_control(self) -> bool:
        """Returns whether this is no defence but a control, by its name."""
        return self.defence.startswith(CONTROL_PREFIX)

    @property
    def content_read(self) -> float:
        """Returns what is read of the content in percent, or of all tokens if there is no such figure."""
        return self.tokens if self.content is None else self.content

    def is_dominated(self, others: Sequence[DefencePoint]) -> bool:
        """Returns whether another defence, controls aside, is no worse in both figures and better in one."""
        return any(
            other.utility >= self.utility
            and other.content_read <= self.content_read
            and (other.utility, other.content_read) != (self.utility, self.content_read)
            for other in others
            if not other.is_control
        )


def points_by_data(records: Iterable[ResultRecord]) -> dict[str, list[DefencePoint]]:
    """Returns the defences of a comparison by data set, in the order of its figures; {} for any other result."""
    records = [*records]
    own_records = [record for record in records if not record.attack and not record.note]
    utility_records = {(record.data, record.variant, record.measure): record for record in own_records}
    content_records = [
        record for record in records if (record.measure, record.attack) == ("content top-1", STRONGEST_ATTACK)
    ]
    content_by_variant = {(record.data, record.variant): record for record in content_records}
    points: dict[str, list[DefencePoint]] = {}
    for record in records:
        possible_records = (utility_records.get((record.data, record.variant, measure)) for measure in UTILITY_MEASURES)
        utility = next((found for found in possible_records if found is not None), None)
        if (record.measure, record.attack) == ("tokens top-1", STRONGEST_ATTACK) and utility is not None:
            content_read = content_by_variant.get((record.data, record.variant))
            point = DefencePoint(
                record.data, record.variant, utility.measure, utility.value, record.value,
                None if content_read is None else content_read.value,
                utility.half_width or 0.0, 0.0 if content_read is None else content_read.half_width or 0.0,
            )  # fmt: skip
            points.setdefault(record.data, []).append(point)
    return points


def one_result_svg(points: Sequence[DefencePoint]) -> str:
    """Returns one result's defences on one data set as SVG. Each point has the number of its row in the table."""
    with plot_style():
        figure, (axes,) = panels(1, 500, 320)
        coordinates = [(point.tokens, point.utility) for point in points]
        axes.scatter(*zip(*coordinates, strict=True), color=OFF_FRONTIER_COLOUR)
        axes.set(xlim=(-2, 102), xlabel="tokens that the strongest attack reads, %", ylabel=points[0].measure)
        axes.margins(y=0.12)
        write_names(axes, coordinates, [str(number) for number in range(1, len(points) + 1)])
        return svg(figure, f"{points[0].data}: {points[0].measure} against what the strongest attack reads")


# --- several results --------------------------------------------------------------------------------------------------
def points_of_results(results: Sequence[Sequence[ResultRecord]], data: str) -> list[DefencePoint]:
    """Returns the point of each defence that has a content figure.

    Of a defence in several results, it is the point of the one of which more is read.

    Raises:
        UsageError: "plain" differs, so that the results cannot be compared.
    """
    all_points = [defence_point for records in results for defence_point in points_by_data(records).get(data, ())]
    plain_utilities = {round(point.utility, 1) for point in all_points if point.defence == PLAIN_VARIANT}
    if len(plain_utilities) > 1:
        raise UsageError(
            f"plain has {sorted(plain_utilities)} in these results", "give results of one model and one training"
        )
    point_of_defence: dict[str, DefencePoint] = {}
    for point in all_points:
        if point.content is not None:
            earlier_point = point_of_defence.get(point.defence, point)
            point_of_defence[point.defence] = max(earlier_point, point, key=lambda candidate: candidate.content_read)
    return list(point_of_defence.values())


def _accuracy_records(results: Sequence[Sequence[ResultRecord]], data: str) -> list[ResultRecord]:
    """Returns the accuracies of all variants on a data set, without those of attacks."""
    all_records = (record for records in results for record in records)
    return [record for record in all_records if (record.measure, record.data, record.attack) == ("accuracy", data, "")]


def best_alone_utility(results: Sequence[Sequence[ResultRecord]], data: str) -> float | None:
    """Returns the best utility of a client that sends nothing; None if no result has it."""
    return max(
        (accuracy.value for accuracy in _accuracy_records(results, data) if accuracy.variant == CLIENT_ALONE),
        default=None,
    )


def defences_without_point(results: Sequence[Sequence[ResultRecord]], data: str) -> list[str]:
    """Returns the names of the defences with an accuracy but no content figure: they send one vector for a text."""
    known_names = {COMMONEST_CLASS, CLIENT_ALONE, *(point.defence for point in points_of_results(results, data))}
    names = dict.fromkeys(record.variant for record in _accuracy_records(results, data))
    return [name for name in names if name not in known_names]


def frontier_mask(all_points: Sequence[DefencePoint], alone_utility: float | None) -> list[bool]:
    """Returns for each defence whether it is on the frontier.

    Args:
        all_points: the defences.
        alone_utility: the utility of a client that sends nothing. None: it is not known.
    """
    return [
        not point.is_control
        and point.content_read < ALL_READ_PERCENT
        and (alone_utility is None or point.utility > alone_utility)
        and not point.is_dominated(all_points)
        for point in all_points
    ]


def finding_text(all_points: Sequence[DefencePoint], alone_utility: float | None) -> str:
    """Returns a sentence on what the points show. See `frontier_mask` for the arguments."""
    candidates = [point for point in all_points if not point.is_control and point.content_read < ALL_READ_PERCENT]
    if alone_utility is None:
        return f"Of {len(candidates)} defences, none is compared with a client alone."
    better_points = [point for point in candidates if point.utility > alone_utility]
    if not better_points:
        return (
            f"None of {len(candidates)} defences has more than the {alone_utility:.1f} % of a linear model that sends "
            "nothing."
        )
    least_read = min(better_points, key=lambda point: point.content_read)
    verb = "has" if len(better_points) == 1 else "have"
    return (
        f"{len(better_points)} of {len(candidates)} defences {verb} more than a linear model that sends nothing "
        f"({alone_utility:.1f} %); of what such a defence sends, at least {least_read.content_read:.0f} % of the "
        f"content is read ({least_read.defence})."
    )


def frontier_svg(
    all_points: Sequence[DefencePoint], alone_utility: float | None, caption: str, notes: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Returns the frontier as SVG, with the finding as the first line of its caption.

    Args:
        all_points: the points, from which the finding follows.
        alone_utility: the utility of the client alone. None: it is not known.
        caption: the line after the finding, on what was measured.
        notes: further lines below it.
        labels: the label of each defence to draw. None: every defence, by its name.
    """
    shown_points = [point for point in all_points if labels is None or point.defence in labels]
    is_on_frontier = dict(
        zip((point.defence for point in all_points), frontier_mask(all_points, alone_utility), strict=True)
    )
    sentences = (finding_text(all_points, alone_utility), caption, *notes)
    caption_lines = [line for sentence in sentences for line in textwrap.wrap(sentence, 95)]
    with plot_style():
        figure, (axes,) = panels(1, 640, 420 + 16 * len(caption_lines))
        axes.set(xlim=(-3, 103), xlabel="content tokens that the strongest attack reads, %", ylabel="accuracy, %")
        for point in shown_points:
            axes.errorbar(
                point.content_read, point.utility, point.utility_half_width, point.content_half_width, fmt="o",
                alpha=0.9, elinewidth=0.8,
                color=ON_FRONTIER_COLOUR if is_on_frontier[point.defence] else OFF_FRONTIER_COLOUR, markersize=7,
            )  # fmt: skip
        lines = [] if alone_utility is None else [(alone_utility, "a linear model, nothing sent")]
        plain_utilities = [point.utility for point in all_points if point.defence == PLAIN_VARIANT]
        lines += [(utility, "the same model at home, nothing sent") for utility in plain_utilities]
        for height, label in lines:
            axes.axhline(height, color=GREY, linestyle="--", linewidth=1)
            axes.text(0, height, f"{label}, {height:.1f}", va="bottom", color=GREY, fontsize=11)
        figure.supxlabel("\n".join(caption_lines), x=0.01, ha="left", fontsize=11, color=GREY)
        drawn_labels = [
            shown_point.defence if labels is None else labels[shown_point.defence] for shown_point in shown_points
        ]
        write_names(
            axes, [(shown_point.content_read, shown_point.utility) for shown_point in shown_points], drawn_labels
        )
        return svg(figure, finding_text(all_points, alone_utility))


def svg_of_results(
    results: Sequence[Mapping[str, Any]], data: str, caption: str, labels: Mapping[str, str] | None = None
) -> str:
    """Returns the frontier as SVG for results as their files have them. See `frontier_svg` for the arguments."""
    records_by_result = [read_records(result) for result in results]
    undrawn = defences_without_point(records_by_result, data)
    notes = [f"Not drawn, since one vector crosses for a text: {', '.join(undrawn)}."] if undrawn else []
    return frontier_svg(
        points_of_results(records_by_result, data), best_alone_utility(records_by_result, data), caption, notes, labels
    )
