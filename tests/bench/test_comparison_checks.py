"""What two comparisons have to share: everything but costs, folders and commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import comparison_checks
from milkglass.errors import MilkglassError


def document(**changes: Any) -> dict[str, Any]:
    way = {"name": "masked", "quality": {"value": 0.7, "low": 0.6}, "seconds": 1.5, "setup": 2.0, "notes": ["it fell"]}
    notes = ["a note", *changes.pop("top", [])]
    return {"verdict": ["Keep it here."], "seconds": 3.0, "notes": notes, "kept": "a", "ways": [way | changes]}


def test_costs_and_folders_may_differ_and_nothing_else() -> None:
    same = document(seconds=9.0, setup=0.1, top=["Taken over from earlier calls: masked"]) | {"kept": "b"}
    assert comparison_checks.differences(document(), same) == (6, [])
    other = document(notes=["it rose"], quality={"value": 0.7})
    assert comparison_checks.differences(document(), other) == (6, [".ways[0].notes[0]", ".ways[0].quality.low"])


def test_a_comparison_that_fails_is_an_error_and_one_that_is_killed_is_not(tmp_path: Path) -> None:
    missing, out = tmp_path / "none.csv", tmp_path / "out"
    for kill_after in (None, 100):
        with pytest.raises(MilkglassError, match=r"failed(.|\n)*no file"):
            comparison_checks.compare(missing, out, "demo:minilm", "linear", kill_after)
    cost, was_killed = comparison_checks.compare(missing, out, "demo:minilm", "linear", kill_after=0.01)
    assert was_killed and cost.clock < 60


def test_a_folder_with_results_and_rows_of_another_kind_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, pairs = tmp_path / "rows.jsonl", tmp_path / "pairs.jsonl"
    rows.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    pairs.write_text('{"text": "a", "text_pair": "c", "label": "x"}\n{"text": "b", "text_pair": "d", "label": "y"}\n')
    for words, fault in (([rows, "--folder", tmp_path], "is not empty"), ([pairs], "single texts")):
        with pytest.raises(SystemExit):
            comparison_checks.main([*map(str, words), "--out", str(tmp_path / "result.json")])
        assert fault in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


def test_a_fault_is_kept_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = comparison_checks.Checks(tmp_path / "out.json", {})
    checks.require(True, "nothing is wrong")
    checks.add_differences("busy", document(), document(notes=["it rose"]))
    assert checks.faults == ["busy: 1 facts differ"] and "FAULT: busy" in capsys.readouterr().out
