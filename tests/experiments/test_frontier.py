"""The frontier over several results: which defences are on it, by hand."""

from __future__ import annotations

import re

import pytest

from milkglass.errors import UsageError
from milkglass.experiments.report import frontier
from milkglass.experiments.report.frontier import FrontierPoint


def figures(**defences: tuple[float, float]) -> dict[str, float]:
    result = {}
    for name, (utility, content) in defences.items():
        result |= {
            f"accuracy, sst2, {name}": utility,
            f"accuracy +-, sst2, {name}": 2.5,
            f"tokens top-1, strongest, sst2, {name}": 50.0,
            f"content top-1, strongest, sst2, {name}": content,
            f"content top-1 +-, strongest, sst2, {name}": 1.5,
        }
    return result


FIRST = figures(plain=(85.0, 100.0), good=(80.0, 10.0), worse=(79.0, 20.0))
SECOND = figures(plain=(85.0, 100.0), good=(70.0, 1.0), careful=(75.0, 5.0))  # "good" is read less here


def test_a_defence_is_on_the_frontier_where_no_other_is_better_in_both() -> None:
    every = frontier.points([FIRST, SECOND], "sst2")
    assert [one.defence for one in every] == ["plain", "good", "worse", "careful"]
    assert every[1] == FrontierPoint("good", 80.0, 10.0, 2.5, 1.5)  # as it is read more
    assert {one.defence for one in every if not one.beaten(every)} == {"plain", "good", "careful"}


def test_results_of_other_trainings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"plain has \[85.0, 89.0\]"):
        frontier.points([FIRST, figures(plain=(89.0, 100.0))], "sst2")


def test_the_best_that_a_client_does_alone_is_a_line() -> None:
    own = {"accuracy, sst2, client alone, logistic": 78.0, "accuracy, sst2, client alone, bayes": 80.0}
    assert frontier.alone([FIRST | own], "sst2") == 80.0
    assert frontier.alone([FIRST], "sst2") is None
    svg = frontier.drawn(frontier.points([FIRST], "sst2"), 80.0, "about <this>")
    assert "the client alone, 80.0" in svg
    assert "about &lt;this&gt;" in svg
    bare = frontier.drawn(frontier.points([FIRST], "sst2"), None, "")
    assert svg.count("stroke-dasharray") == 2 and "the client alone with the same model, 85.0" in svg
    assert bare.count("stroke-dasharray") == 1 and "No result here has a row of the client alone." in bare
    assert svg.count(frontier.ON) < bare.count(frontier.ON)  # "good" is not on it where a client alone is as good


def test_a_defence_that_sends_one_vector_a_text_is_named_below() -> None:
    pooled = {
        "accuracy, sst2, cape": 86.0,
        "accuracy, sst2, commonest class": 50.0,
        "accuracy, sst2, client alone, x": 70.0,
    }
    assert frontier.unplaced([FIRST | pooled], "sst2") == ["cape"]
    result = {"figures": {name: {"measured": value} for name, value in (FIRST | pooled).items()}}
    assert "one vector crosses for a text: cape." in frontier.of([result], "sst2", "")


def test_points_lie_by_their_figures_and_those_on_the_frontier_have_a_colour_of_their_own() -> None:
    svg = frontier.drawn(frontier.points([FIRST, SECOND], "sst2"), None, "")
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4" fill="(#\w+)"><title>(\w+)', svg)
    places = {name: (float(x), float(y), colour) for x, y, colour, name in found}
    assert places["careful"][0] < places["good"][0] < places["worse"][0] < places["plain"][0]
    assert places["plain"][1] < places["good"][1] < places["careful"][1]  # upwards is more
    assert places["plain"][0] == pytest.approx(frontier.LEFT + frontier.ACROSS)
    assert {name for name, place in places.items() if place[2] == frontier.OFF} == {"worse", "plain"}


def test_a_control_is_drawn_and_decides_nothing() -> None:
    control = {"no defence, two halves": (84.0, 9.0)}
    every = frontier.points([FIRST | figures(plain=(85.0, 100.0), **control)], "sst2")
    svg = frontier.drawn(every, None, "")
    coloured = re.findall(rf'fill="{frontier.ON}"><title>([^<:]+)', svg)
    assert "no defence, two halves" in svg and "no defence, two halves" not in {one.split(" (")[0] for one in coloured}
    assert not next(one for one in every if one.defence == "good").beaten(every)
