"""What two comparisons have to share: everything but costs, folders and commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import comparison_checks
from milkglass.errors import MilkglassError


def written(folder: Path, **changes: Any) -> Path:
    way = {"name": "masked", "quality": {"value": 0.7, "low": 0.6}, "seconds": 1.5, "setup": 2.0, "bytes": 90}
    folder.mkdir()
    document = {"verdict": ["Keep it here."], "seconds": 3.0, "kept": str(folder), "ways": [way | changes]}
    (folder / "compare.json").write_text(json.dumps(document))
    return folder


def test_costs_and_folders_may_differ_and_nothing_else(tmp_path: Path) -> None:
    alone = written(tmp_path / "alone")
    assert comparison_checks.differences(alone, written(tmp_path / "busy", seconds=9.0, setup=0.1)) == (5, [])
    other = written(tmp_path / "other", bytes=91, quality={"value": 0.7})
    assert comparison_checks.differences(alone, other) == (5, [".ways[0].bytes", ".ways[0].quality.low"])


def test_a_comparison_that_fails_or_ends_before_its_kill_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "none.csv"
    with pytest.raises(MilkglassError, match="failed"):
        comparison_checks.compare(missing, tmp_path / "out", "demo:minilm", "linear")
    with pytest.raises(MilkglassError, match="ended before"):
        comparison_checks.compare(missing, tmp_path / "out", "demo:minilm", "linear", kill_after=100)
    assert comparison_checks.compare(missing, tmp_path / "out", "demo:minilm", "linear", kill_after=0.01).clock < 60
