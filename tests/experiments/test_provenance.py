"""Shipped results: made by a commit of this repository, with nothing changed beside it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
    """Why the code of a result cannot be found again; None: it can."""
    found = list(commits(made))
    if not all(found):
        return "a run outside a checkout"
    if changed := [one for one in found if one.endswith("+")]:
        return f"the package differed from {changed[0]}"
    if not HISTORY:
        pytest.skip("no history here: an archive, or a shallow clone")
    lost = [one for one in found if git("merge-base", "--is-ancestor", one, "HEAD").returncode]
    return f"{lost[0]} is not in the history" if lost else None


@pytest.mark.parametrize("path", [path for path in RESULTS if path.stem not in EARLIER], ids=lambda path: path.stem)
def test_a_result_is_of_a_commit_of_this_repository_and_nothing_else(path: Path) -> None:
    assert fault(json.loads(path.read_text("utf-8"))["made"]) is None


@pytest.mark.parametrize("name", sorted(EARLIER))
def test_a_result_that_was_made_again_leaves_the_list(name: str) -> None:
    assert fault(json.loads((ROOT / "recipes" / "results" / f"{name}.json").read_text("utf-8"))["made"])
