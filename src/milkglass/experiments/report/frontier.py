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
from milkglass.plots import COLOURS, GREY, numbered, panels, styled, svg

UTILITY = ("accuracy", "matthews", "f1", "pearson")
PLAIN, CONTROL = "plain", "no defence"
ALL_READ = 99.95  # percent of the content: nothing is hidden
OFF_FRONTIER, ON_FRONTIER = COLOURS[:2]


@dataclass(frozen=True)
class DefencePoint:
    """One defence on one data set.

    Attributes:
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
    for one in records:
        known = (utilities.get((one.data, one.variant, measure)) for measure in UTILITY)
        utility = next((it for it in known if it is not None), None)
        if (one.measure, one.attack) == ("tokens top-1", STRONGEST) and utility is not None:
            read = content.get((one.data, one.variant))
            point = DefencePoint(
                one.data, one.variant, utility.measure, utility.value, one.value, None if read is None else read.value,
                utility.half_width or 0.0, 0.0 if read is None else read.half_width or 0.0,
            )  # fmt: skip
            result.setdefault(one.data, []).append(point)
    return result


def one_result_svg(points: Sequence[DefencePoint]) -> str:
    """Returns one result's defences on one data set as SVG. Each point has the number of its row in the table."""
    with styled():
        figure, (axes,) = panels(1, 500, 320)
        places = [(one.tokens, one.utility) for one in points]
        axes.scatter(*zip(*places, strict=True), color=OFF_FRONTIER)
        axes.set(xlim=(-2, 102), xlabel="tokens that the strongest attack reads, %", ylabel=points[0].measure)
        axes.margins(y=0.12)
        numbered(axes, places, [OFF_FRONTIER] * len(places))
        return svg(figure, f"{points[0].data}: {points[0].measure} against what the strongest attack reads")


# --- several results --------------------------------------------------------------------------------------------------
def points(results: Sequence[Sequence[ResultRecord]], data: str) -> list[DefencePoint]:
    """Returns the defences of several results that send something for each token.

    Raises:
        UsageError: "plain" differs, so that the results cannot be compared.
    """
    every = [one for records in results for one in defences(records).get(data, ())]
    plain = {round(one.utility, 1) for one in every if one.defence == PLAIN}
    if len(plain) > 1:
        raise UsageError(f"plain has {sorted(plain)} in these results", "give results of one model and one training")
    worst: dict[str, DefencePoint] = {}
    for one in every:
        if one.content is not None:
            worst[one.defence] = max(worst.get(one.defence, one), one, key=lambda point: point.read)
    return list(worst.values())


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


def on_frontier(every: Sequence[DefencePoint], level: float | None) -> list[bool]:
    """Returns whether each defence is on the frontier. `level` is the utility of the client alone."""
    return [
        not one.control and one.read < ALL_READ and (level is None or one.utility > level) and not one.beaten(every)
        for one in every
    ]


def frontier_svg(every: Sequence[DefencePoint], level: float | None, about: str, notes: Sequence[str] = ()) -> str:
    """Returns the frontier as SVG.

    Args:
        level: the utility of the client alone.
        about: one line on what was measured.
        notes: further lines below it.
    """
    every = sorted(every, key=lambda one: one.read)
    colours = [ON_FRONTIER if on else OFF_FRONTIER for on in on_frontier(every, level)]
    notes = [about, *notes, *([] if level is not None else ["No result here has a row of the client alone."])]
    below = [line for note in notes for line in textwrap.wrap(note, 120)]
    with styled():
        figure, (axes, names) = panels(2, 440, max(420, 18 * len(every) + 60) + 16 * len(below))
        names.axis("off")
        axes.set(xlim=(-2, 102), xlabel="content tokens that the strongest attack reads, %", ylabel="accuracy, %")
        for one, colour in zip(every, colours, strict=True):
            axes.errorbar(
                one.read, one.utility, one.utility_spread, one.content_spread, fmt="o", color=colour, alpha=0.9,
                elinewidth=0.8,
            )  # fmt: skip
        lines = [] if level is None else [(level, "the client alone")]
        lines += [(one.utility, "the client alone with the same model") for one in every if one.defence == PLAIN]
        for at, words in lines:
            axes.axhline(at, color=GREY, linestyle="--", linewidth=1)
            axes.text(0, at, f"{words}, {at:.1f}", va="bottom", color=GREY, fontsize=11)
        figure.supxlabel("\n".join(below), x=0.01, ha="left", fontsize=11, color=GREY)
        numbered(axes, [(one.read, one.utility) for one in every], colours)
        for number, (one, colour) in enumerate(zip(every, colours, strict=True)):
            words = f"{number + 1}  {one.defence}: {one.utility:.1f}, {one.read:.1f} read"
            names.annotate(
                words, (0, 1), xytext=(0, -18 * number), xycoords="axes fraction", textcoords="offset points",
                va="top", color=colour, fontsize=11,
            )  # fmt: skip
        return svg(figure, about)


def svg_of_results(results: Sequence[Mapping[str, Any]], data: str, about: str) -> str:
    """Returns the frontier of results as their files have them."""
    figures = [read(result) for result in results]
    left = unplaced(figures, data)
    notes = [f"Not drawn, since one vector crosses for a text: {', '.join(left)}."] if left else []
    return frontier_svg(points(figures, data), best_alone(figures, data), about, notes)
