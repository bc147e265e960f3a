"""The utility of each defence against what the strongest attack reads of what it sends: of one result, and of several.

Of one result every defence is drawn, against the share of its tokens. The frontier takes several comparisons on one
data set, all with the same model, rows and training, so that "plain" has the same utility in each. Attacks and attacked
texts may differ; if a defence is in two of them, the result that reads more counts. A dashed line is the best that the
client does alone in seconds: below it a defence is useless. A second dashed line is "plain", a client that trains the
same model locally and sends nothing: defences are useful to those who cannot.

A defence is on the frontier if it is above the first line, not all content is read, and no other has both more utility
and less content read. Controls ("no defence, ...") are drawn, but neither are on the frontier nor keep others from it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milkglass.errors import UsageError
from milkglass.experiments.record import ALONE, COMMONEST, STRONGEST, ResultRecord, read
from milkglass.plots import COLOURS, GREY, panels, styled, svg, write_names, write_numbers

UTILITY = ("accuracy", "matthews", "f1", "pearson")
PLAIN, CONTROL = "plain", "no defence"
ALL_READ_PERCENT = 99.95  # percent of the content: nothing is hidden
OFF_FRONTIER, ON_FRONTIER = COLOURS[:2]


@dataclass(frozen=True)
class DefencePoint:
    """One defence on one data set.

    Attributes:
        data: the data set.
        defence: its name.
        measure: the name of the utility.
        utility: of the measure, in points.
        tokens, content: what the strongest attack reads of all tokens and of content tokens, in percent. A content of
            None: the attack reads words without their order, so that there is no such figure.
        utility_spread, content_spread: half of their 95 % intervals; 0: the result has none.
    """

    data: str
    defence: str
    measure: str
    utility: float
    tokens: float
    content: float | None = None
    utility_spread: float = 0.0
    content_spread: float = 0.0

    @property
    def control(self) -> bool:
        return self.defence.startswith(CONTROL)

    @property
    def read(self) -> float:
        """Returns the share of the content, or of all tokens if there is no such figure."""
        return self.tokens if self.content is None else self.content

    def beaten(self, others: Sequence[DefencePoint]) -> bool:
        """Returns whether another defence costs no more and leaks no more, by the figures alone."""
        return any(
            one.utility >= self.utility
            and one.read <= self.read
            and (one.utility, one.read) != (self.utility, self.read)
            for one in others
            if not one.control
        )


def defences(records: Iterable[ResultRecord]) -> dict[str, list[DefencePoint]]:
    """Returns the defences of a comparison by data set, in the order of its figures; none of any other result."""
    records = [*records]
    utilities = {(one.data, one.variant, one.measure): one for one in records if not one.attack and not one.note}
    content = {
        (one.data, one.variant): one for one in records if (one.measure, one.attack) == ("content top-1", STRONGEST)
    }
    result: dict[str, list[DefencePoint]] = {}
    for record in records:
        known = (utilities.get((record.data, record.variant, measure)) for measure in UTILITY)
        utility = next((it for it in known if it is not None), None)
        if (record.measure, record.attack) == ("tokens top-1", STRONGEST) and utility is not None:
            read = content.get((record.data, record.variant))
            point = DefencePoint(
                record.data, record.variant, utility.measure, utility.value, record.value,
                None if read is None else read.value,
                utility.half_width or 0.0, 0.0 if read is None else read.half_width or 0.0,
            )  # fmt: skip
            result.setdefault(record.data, []).append(point)
    return result


def one_result_svg(points: Sequence[DefencePoint]) -> str:
    """Returns one result's defences on one data set as SVG. Each point has the number of its row in the table."""
    with styled():
        figure, (axes,) = panels(1, 500, 320)
        places = [(one.tokens, one.utility) for one in points]
        axes.scatter(*zip(*places, strict=True), color=OFF_FRONTIER)
        axes.set(xlim=(-2, 102), xlabel="tokens that the strongest attack reads, %", ylabel=points[0].measure)
        axes.margins(y=0.12)
        write_numbers(axes, places, [OFF_FRONTIER] * len(places))
        return svg(figure, f"{points[0].data}: {points[0].measure} against what the strongest attack reads")


# --- several results --------------------------------------------------------------------------------------------------
def points(results: Sequence[Sequence[ResultRecord]], data: str) -> list[DefencePoint]:
    """Returns the defences of several results that send something for each token.

    Raises:
        UsageError: "plain" differs, so that the results cannot be compared.
    """
    all_points = [one for records in results for one in defences(records).get(data, ())]
    plain = {round(one.utility, 1) for one in all_points if one.defence == PLAIN}
    if len(plain) > 1:
        raise UsageError(f"plain has {sorted(plain)} in these results", "give results of one model and one training")
    best_of_defence: dict[str, DefencePoint] = {}
    for one in all_points:
        if one.content is not None:
            best_of_defence[one.defence] = max(best_of_defence.get(one.defence, one), one, key=lambda point: point.read)
    return list(best_of_defence.values())


def _accuracies(results: Sequence[Sequence[ResultRecord]], data: str) -> list[ResultRecord]:
    every = (one for records in results for one in records)
    return [one for one in every if (one.measure, one.data, one.attack) == ("accuracy", data, "")]


def best_alone(results: Sequence[Sequence[ResultRecord]], data: str) -> float | None:
    """Returns the best utility of a client that sends nothing. None: no result has it."""
    return max((one.value for one in _accuracies(results, data) if one.variant == ALONE), default=None)


def unplaced(results: Sequence[Sequence[ResultRecord]], data: str) -> list[str]:
    """Returns the defences that have a utility but no point, since they send one vector for a text."""
    seen = {COMMONEST, ALONE, *(one.defence for one in points(results, data))}
    return [name for name in dict.fromkeys(one.variant for one in _accuracies(results, data)) if name not in seen]


def on_frontier(all_points: Sequence[DefencePoint], level: float | None) -> list[bool]:
    """Returns whether each defence is on the frontier. `level` is the utility of the client alone."""
    return [
        not one.control
        and one.read < ALL_READ_PERCENT
        and (level is None or one.utility > level)
        and not one.beaten(all_points)
        for one in all_points
    ]


def finding(every: Sequence[DefencePoint], level: float | None) -> str:
    """Returns in a sentence what the points show. `level` is the utility of the client alone."""
    candidates = [one for one in every if not one.control and one.read < ALL_READ_PERCENT]
    if level is None:
        return f"Of {len(candidates)} defences, none is compared with a client alone."
    better = sorted((one for one in candidates if one.utility > level), key=lambda one: one.read)
    if not better:
        return (
            f"None of {len(candidates)} defences has more than the {level:.1f} % of a linear model that sends nothing."
        )
    least = better[0]
    have = "has" if len(better) == 1 else "have"
    return (
        f"{len(better)} of {len(candidates)} defences {have} more than a linear model that sends nothing "
        f"({level:.1f} %); of what such a defence sends, at least {least.read:.0f} % of the content is read "
        f"({least.defence})."
    )


def frontier_svg(
    all_points: Sequence[DefencePoint], level: float | None, caption: str, notes: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Returns the frontier as SVG, with its finding as the caption.

    Args:
        all_points: the points, from which the finding follows.
        level: the utility of the client alone.
        caption: one line on what was measured.
        notes: further lines below it.
        names: the defences that are drawn, and how each is called there. None: all, by their own names.
    """
    shown = [one for one in all_points if names is None or one.defence in names]
    colours = dict(zip((one.defence for one in all_points), on_frontier(all_points, level), strict=True))
    below = [line for note in (finding(all_points, level), caption, *notes) for line in textwrap.wrap(note, 95)]
    with styled():
        figure, (axes,) = panels(1, 640, 420 + 16 * len(below))
        axes.set(xlim=(-3, 103), xlabel="content tokens that the strongest attack reads, %", ylabel="accuracy, %")
        for point in shown:
            axes.errorbar(
                point.read, point.utility, point.utility_spread, point.content_spread, fmt="o", alpha=0.9,
                elinewidth=0.8,
                color=ON_FRONTIER if colours[point.defence] else OFF_FRONTIER, markersize=7,
            )  # fmt: skip
        lines = [] if level is None else [(level, "a linear model, nothing sent")]
        lines += [(one.utility, "the same model at home, nothing sent") for one in all_points if one.defence == PLAIN]
        for at, words in lines:
            axes.axhline(at, color=GREY, linestyle="--", linewidth=1)
            axes.text(0, at, f"{words}, {at:.1f}", va="bottom", color=GREY, fontsize=11)
        figure.supxlabel("\n".join(below), x=0.01, ha="left", fontsize=11, color=GREY)
        called = [one.defence if names is None else names[one.defence] for one in shown]
        write_names(axes, [(one.read, one.utility) for one in shown], called)
        return svg(figure, finding(all_points, level))


def svg_of_results(
    results: Sequence[Mapping[str, Any]], data: str, caption: str, names: Mapping[str, str] | None = None
) -> str:
    """Returns the frontier of results as their files have them. `names` as for `frontier_svg`."""
    figures = [read(result) for result in results]
    left = unplaced(figures, data)
    notes = [f"Not drawn, since one vector crosses for a text: {', '.join(left)}."] if left else []
    return frontier_svg(points(figures, data), best_alone(figures, data), caption, notes, names)
