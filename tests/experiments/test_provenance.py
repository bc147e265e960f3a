"""Shipped results: made by a commit of this repository, with nothing changed beside it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milkglass.experiments import runs

ROOT = Path(__file__).parents[2]
# Results of code that is not in the history, or that was changed beside its commit: THREATS.md calls them results of
# earlier code. Each is to be made again: the list may only become shorter.
EARLIER = {"mitigations.quick", "obfuslm_figure3.quick", "obfuslm_sst2", "obfuslm_table2.quick"}
RESULTS = sorted((ROOT / "recipes" / "results").glob("*.json"))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


HISTORY = git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"


def commits(made: dict[str, Any]) -> Iterator[str]:
    """All that a result names: of the run, of the code that began it, and of cells that it took of others."""
    yield made["commit"]
    if "begun" in made:
        yield made["begun"]["commit"]
    yield from made.get("cells", ())


def test_every_recipe_result_is_looked_at() -> None:
    assert len(RESULTS) >= 10


def fault(made: dict[str, Any]) -> str | None:
    """Why the code of a result is not one commit's; None: it is."""
    found = list(commits(made))
    if not all(found):
        return "a run outside a checkout"
    changed = [one for one in found if one.endswith("+")]
    return f"the package differed from {changed[0]}" if changed else None


def lost(made: dict[str, Any]) -> list[str]:
    """The commits that a result names and the history lacks."""
    return [one for one in commits(made) if git("merge-base", "--is-ancestor", one, "HEAD").returncode]


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
        assert runs.now()["commit"].endswith("+") == (place in places[:3])
        (tmp_path / place).write_text("1")
    (tmp_path / "bench" / "new.py").write_text("1")
    assert runs.now()["commit"].endswith("+")


def made_of(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "recipes" / "results" / f"{name}.json").read_text("utf-8"))["made"]


@pytest.mark.parametrize("name", [path.stem for path in RESULTS if path.stem not in EARLIER])
def test_a_result_is_of_a_commit_and_nothing_else(name: str) -> None:
    assert fault(made_of(name)) is None


@pytest.mark.skipif(not HISTORY, reason="an archive or a shallow clone has no history to look in")
@pytest.mark.parametrize("name", [path.stem for path in RESULTS if path.stem not in EARLIER])
def test_a_results_commit_is_in_the_history(name: str) -> None:
    assert not lost(made_of(name))


@pytest.mark.skipif(not HISTORY, reason="an archive or a shallow clone has no history to look in")
@pytest.mark.parametrize("name", sorted(EARLIER))
def test_a_result_that_was_made_again_leaves_the_list(name: str) -> None:
    assert fault(made_of(name)) or lost(made_of(name))
