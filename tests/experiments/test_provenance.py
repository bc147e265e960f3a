"""Shipped results: made by a commit of this repository, with nothing changed beside it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from milkglass.experiments import runs
from milkglass.experiments.recipe import CUT_REASON
from milkglass.experiments.record import POOLED_SUFFIX, read_records
from milkglass.experiments.runs import commits_of, unpack_answers
from tests.experiments.running import figures as figures_of

ROOT = Path(__file__).parents[2]
UNSTEMMED = "f4671d9"  # the commit from which ROUGE compares words, as GHOST's section 5.3 has it
ANSWERING = {"bilstm", "classification", "comparison", "generation", "sanitized-generation", "shared-training"}  # kinds
RESULTS = sorted((ROOT / "recipes" / "results").glob("*.json"))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


HISTORY = git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"


def test_every_recipe_result_is_looked_at() -> None:
    assert len(RESULTS) >= 10


def fault(made: dict[str, Any]) -> str | None:
    """Why the code of a result is not one commit's; None: it is."""
    found = list(commits_of(made))
    if not all(found):
        return "a run outside a checkout"
    changed = [one for one in found if one.endswith("+")]
    return f"the package differed from {changed[0]}" if changed else None


def lost(made: dict[str, Any]) -> list[str]:
    """The commits that a result names and the history lacks."""
    return [one for one in commits_of(made) if git("merge-base", "--is-ancestor", one, "HEAD").returncode]


def test_code_that_differs_from_its_commit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of benches and recipes as well: results are of them. A result is not."""
    places = (
        "src/milkglass/experiments/runs.py",
        "bench/a.py",
        "recipes/a.toml",
        "recipes/results/a.json",
        "README.md",
    )
    for one in map(tmp_path.joinpath, places):
        one.parent.mkdir(parents=True, exist_ok=True)
        one.write_text("1")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "a")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(runs, "__file__", str(tmp_path / places[0]))
    for place in places:
        (tmp_path / place).write_text("2")
        assert runs.code_version()["commit"].endswith("+") == (place in places[:3])
        (tmp_path / place).write_text("1")
    (tmp_path / "bench" / "new.py").write_text("1")
    assert runs.code_version()["commit"].endswith("+")


def shipped(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "recipes" / "results" / f"{name}.json").read_text("utf-8"))


def made_of(name: str) -> dict[str, Any]:
    return dict(shipped(name)["made"])


@pytest.mark.parametrize("name", [path.stem for path in RESULTS])
def test_a_result_is_of_a_commit_and_nothing_else(name: str) -> None:
    assert fault(made_of(name)) is None


@pytest.mark.skipif(not HISTORY, reason="an archive or a shallow clone has no history to look in")
@pytest.mark.parametrize("name", [path.stem for path in RESULTS])
def test_a_results_commit_is_in_the_history(name: str) -> None:
    assert not lost(made_of(name))


def kind_of(name: str) -> str:
    recipe = ROOT / "recipes" / f"{name.partition('.')[0]}.toml"
    return str(tomllib.loads(recipe.read_text("utf-8"))["kind"]) if recipe.is_file() else "bench"


HEADLINE = re.compile(r"(tokens|content|vocabulary) top-\d|accuracy|f1|matthews|pearson|bag f1|rouge-l", re.IGNORECASE)


def bare(result: dict[str, Any]) -> list[str]:
    """The accuracies and the shares read that have neither an interval nor a range over rounds, keys or seeds, nor say
    that their attack was cut."""
    return [
        one.name
        for one in read_records(result)
        if HEADLINE.fullmatch(one.measure) and one.half_width is None and one.undefined != CUT_REASON
        if not (
            {"low", "high"} <= one.further_numbers.keys()
            or {"least", "most"} <= one.further_numbers.keys()
            or math.isnan(one.value)
        )
    ]


NAMES = [path.stem for path in RESULTS]


@pytest.mark.skipif(not HISTORY, reason="an archive or a shallow clone has no history to look in")
def test_no_results_rouge_compares_stems() -> None:
    with_rouge = [name for name in NAMES if any("rouge" in figure for figure in figures_of(shipped(name)))]
    old = [
        any(git("merge-base", "--is-ancestor", UNSTEMMED, one).returncode for one in commits_of(made_of(name)))
        for name in with_rouge
    ]
    assert not [name for name, stemmed in zip(with_rouge, old, strict=True) if stemmed]


def test_each_result_keeps_what_its_models_answered() -> None:
    """Two cells of one accuracy cannot be told from a fault without what they answered."""
    assert not [name for name in NAMES if kind_of(name) in ANSWERING and not shipped(name).get("predictions")]


def test_each_cell_of_a_comparison_keeps_its_answers() -> None:
    for name in NAMES:
        result = shipped(name)
        if kind_of(name) == "comparison":
            cells = {f"{data}, {one}, {seed}" for data in result["data"] for one in result["variants"]
                     for seed in result["seeds"]}  # fmt: skip
            assert (
                {one.removesuffix(POOLED_SUFFIX) for one in result["predictions"]} == cells <= {*result["predictions"]}
            )
            for data in result["data"]:
                sizes = {
                    len(unpack_answers(text))
                    for cell, text in result["predictions"].items()
                    if cell.startswith(f"{data}, ")
                }
                assert len(sizes) == 1 and sizes.pop() > 100


def test_each_accuracy_and_each_share_read_has_an_interval_or_a_range() -> None:
    assert not {name: found for name in NAMES if (found := bare(shipped(name)))}


def test_accuracies_are_shares_of_the_rows_that_were_answered() -> None:
    """An accuracy is a whole number of right answers: a figure that was typed, or is of other rows, is not."""
    looked_at = 0
    for name in NAMES:
        result = shipped(name)
        for cell, text in result.get("predictions", {}).items() if kind_of(name) == "comparison" else ():
            data, _, rest = cell.partition(", ")
            if len(result["seeds"]) > 1 or f"accuracy, {data}, {rest.rpartition(', ')[0]}" not in figures_of(result):
                continue
            measured = figures_of(result)[f"accuracy, {data}, {rest.rpartition(', ')[0]}"]["measured"]
            right = measured / 100 * len(unpack_answers(text))
            assert abs(right - round(right)) <= 0.006 * len(unpack_answers(text)) / 100, (name, cell)
            looked_at += 1
    assert looked_at >= 40
