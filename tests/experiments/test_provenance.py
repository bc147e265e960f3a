"""Shipped results: made by a commit of this repository, with nothing changed beside it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "recipes" / "results").glob("*.json"))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


def commits(made: dict[str, Any]) -> Iterator[str]:
    """All that a result names: of the run, of the code that began it, and of cells that it took of others."""
    yield made["commit"]
    if "begun" in made:
        yield made["begun"]["commit"]
    yield from made.get("cells", ())


def test_every_recipe_result_is_looked_at() -> None:
    assert len(RESULTS) >= 10


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_is_of_a_clean_tree(path: Path) -> None:
    found = list(commits(json.loads(path.read_text("utf-8"))["made"]))
    assert all(found), "a run outside a checkout"
    assert not [one for one in found if one.endswith("+")], "the package differed from its commit"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_is_of_a_commit_of_this_repository(path: Path) -> None:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no history here: an archive, or a shallow clone")
    for one in commits(json.loads(path.read_text("utf-8"))["made"]):
        assert git("merge-base", "--is-ancestor", one, "HEAD").returncode == 0, f"{one} is not in the history"
