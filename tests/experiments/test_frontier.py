"""The frontier over several results: which defences are on it, by hand."""

from __future__ import annotations

import pytest

from milkglass.errors import UsageError
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.report import frontier
from milkglass.experiments.report.frontier import DefencePoint


def figures(**defences: tuple[float, float]) -> list[ResultRecord]:
    result = []
    for name, (utility, content) in defences.items():
        at = {"data": "sst2", "variant": name}
        result += [
            ResultRecord(measure="accuracy", value=utility, half_width=2.5, **at),  # type: ignore[arg-type]
            ResultRecord(measure="tokens top-1", value=50.0, attack="strongest", **at),  # type: ignore[arg-type]
            ResultRecord(measure="content top-1", value=content, attack="strongest", half_width=1.5, **at),  # type: ignore[arg-type]
        ]
    return result


def accuracy(variant: str, value: float, note: str = "") -> ResultRecord:
    return ResultRecord(measure="accuracy", value=value, data="sst2", variant=variant, note=note)


FIRST = figures(plain=(85.0, 100.0), good=(80.0, 10.0), worse=(79.0, 20.0))
SECOND = figures(plain=(85.0, 100.0), good=(70.0, 1.0), careful=(75.0, 5.0))  # "good" is read less here


def test_a_defence_is_on_the_frontier_where_no_other_is_better_in_both() -> None:
    every = frontier.points_of_results([FIRST, SECOND], "sst2")
    assert [one.defence for one in every] == ["plain", "good", "worse", "careful"]
    assert every[1] == DefencePoint("sst2", "good", "accuracy", 80.0, 50.0, 10.0, 2.5, 1.5)  # as it is read more
    assert {one.defence for one in every if not one.is_dominated(every)} == {"plain", "good", "careful"}
    assert frontier.frontier_mask(every, None) == [False, True, False, True], "of plain all content is read"
    assert frontier.frontier_mask(every, 80.0) == [False] * 4, "a client alone is as good"


def test_results_of_other_trainings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"plain .*\[85\.0, 89\.0\]"):
        frontier.points_of_results([FIRST, figures(plain=(89.0, 100.0))], "sst2")


def test_the_best_that_a_client_does_alone_is_a_line() -> None:
    own = [accuracy("client alone", 78.0, "logistic"), accuracy("client alone", 80.0, "bayes")]
    assert frontier.best_alone_utility([FIRST + own], "sst2") == 80.0
    assert frontier.best_alone_utility([FIRST], "sst2") is None
    svg = frontier.frontier_svg(frontier.points_of_results([FIRST], "sst2"), 80.0, "about <this>")
    assert "nothing sent, 80.0" in svg and "same model at home, nothing sent, 85.0" in svg
    assert "about &lt;this&gt;" in svg and "<this>" not in svg


def test_a_defence_that_sends_one_vector_a_text_is_named_below() -> None:
    pooled = [accuracy("cape", 86.0), accuracy("commonest class", 50.0), accuracy("client alone", 70.0, "x")]
    assert frontier.defences_without_point([FIRST + pooled], "sst2") == ["cape"]
    result = {"figures": [one.to_json() for one in FIRST + pooled]}
    assert "one vector" in (svg := frontier.svg_of_results([result], "sst2", "")) and ": cape." in svg


def test_the_finding_follows_from_the_points() -> None:
    every = frontier.points_of_results([FIRST, SECOND], "sst2")
    assert "none is compared" in frontier.finding_text(every, None)
    assert frontier.finding_text(every, 82.0).startswith("None of 3 defences")
    assert "1 of 3 defences has more" in frontier.finding_text(every, 79.5), "plain is none of them: all of it is read"
    two = frontier.finding_text(every, 76.0)
    assert "2 of 3 defences have more" in two and "10 %" in two and "(good)" in two


def test_few_defences_are_drawn_by_names_and_the_finding_is_of_all() -> None:
    every, labels = frontier.points_of_results([FIRST, SECOND], "sst2"), {"plain": "as it is", "careful": "with care"}
    svg = frontier.frontier_svg(every, 70.0, "", labels=labels)
    assert ">with care<" in svg and ">as it is<" in svg and ">worse<" not in svg
    assert frontier.finding_text(every, 70.0).split(";")[0] in svg
    colours = [svg.count(f"fill: {one}") > 0 for one in (frontier.ON_FRONTIER_COLOUR, frontier.OFF_FRONTIER_COLOUR)]
    assert colours == [True, True], "careful is on the frontier, plain is not"
