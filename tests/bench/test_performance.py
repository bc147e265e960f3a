"""bench/performance.py: its result, and the page that is filled from it. No test depends on how fast a machine is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "bench" / "performance.py"


@pytest.fixture(scope="module")
def frame() -> Iterator[dict[str, ModuleType]]:
    """Modules of bench/, which is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAM.parent))
        from frame import figure, page, rounds  # type: ignore[import-not-found]

        yield {"figure": figure, "page": page, "rounds": rounds}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "performance.json"
    words = [sys.executable, str(PROGRAM), "--quick", "--only", "codec", "--json", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = warm.run(words, env=environment)
    assert done.returncode == 0, done.stderr
    assert "speed of encoding" in done.stdout
    return dict(json.loads(out.read_text("utf-8")))


@pytest.mark.slow
def test_a_result_says_what_was_measured_and_where(result: dict[str, Any]) -> None:
    assert result["recipe"] == "performance" and result["quick"]
    assert {"machine", "cores", "versions", "load", "made", "parts"} <= result.keys()
    assert result["parts"].keys() == {"codec"}
    for one in result["figures"]:
        assert one["least"] <= one["value"] <= one["most"]
        assert {"part", "what", "rule", "asked", "holds", "unit", "dtype", "threads", "note"} <= one.keys()
        assert len(one["ours"]) == len(one["other"]) == 2


@pytest.mark.slow
def test_a_partial_or_quick_run_leaves_the_shipped_result(result: dict[str, Any]) -> None:
    shipped = ROOT / "recipes" / "results" / "performance.json"
    assert not shipped.is_file() or not json.loads(shipped.read_text("utf-8"))["quick"]


@pytest.mark.slow
def test_the_page_is_filled_from_a_result(frame: dict[str, ModuleType], result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "performance.md").write_text((ROOT / "docs" / "performance.md").read_text("utf-8"), "utf-8")
    kinds = [(work, axis) for work in ("obfuscation", "top-k") for axis in "ndk"]
    points = ((5.0, 0.5, 0.25), (10.0, 2.0, 1.0))
    curves = [frame["figure"].Curve(work, axis, points, "fixed").document() for work, axis in kinds]
    whole = {"quick": False, "parts": dict.fromkeys(frame["page"].NAMES, 1.0), "curves": curves}
    (tmp_path / "result.json").write_text(json.dumps(result | whole), "utf-8")
    frame["page"].write(tmp_path / "result.json", tmp_path)
    page = (tmp_path / "performance.md").read_text("utf-8")
    assert all(f"| {one['measure']}" in page for one in result["figures"])
    assert result["made"]["commit"] in page and "No result yet" not in page
    drawn = [one.name for one in sorted(tmp_path.glob("*.svg"))]
    assert drawn == ["performance-obfuscation.svg", "performance-top-k.svg"]
    assert all(f"({name})" in page for name in drawn)
    for one in drawn:
        shown = "".join(ElementTree.parse(tmp_path / one).getroot().itertext())
        assert all(f"{axis} (fixed)" in shown for axis in "ndk")
    again = frame["page"].filled(page, result | whole)
    assert again == page


@pytest.mark.parametrize(
    ("held", "named"),
    [
        (None, r"result\.json .*exist"),
        ("{", "no result"),
        ('{"figures": {}}', "no result"),
        ('{"quick": true, "parts": {}}', "small sizes"),
        ('{"quick": false, "parts": {"codec": 1}}', "obfuscate, large"),
    ],
)
def test_what_is_no_whole_result_leaves_the_page(
    held: str | None, named: str, frame: dict[str, ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "performance.md").write_text("as it was", "utf-8")
    if held is not None:
        (tmp_path / "result.json").write_text(held, "utf-8")
    with pytest.raises(ValueError, match=named):
        frame["page"].write(tmp_path / "result.json", tmp_path)
    assert (tmp_path / "performance.md").read_text("utf-8") == "as it was"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--page", "--quick"], "--only and --quick"),
        (["--page", "--json", "none.json"], "none.json does"),
        (["--quick", "--json", "none/x.json"], "folder none "),
        (["--quick", "--json", "."], ". is a folder"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_measured(words: list[str], named: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    call = [sys.executable, str(PROGRAM), *words]
    done = warm.run(call, env=environment, cwd=tmp_path)
    assert done.returncode == 2 and named in done.stderr and not done.stdout


def test_the_page_is_that_of_the_shipped_result(frame: dict[str, ModuleType]) -> None:
    shipped = ROOT / "recipes" / "results" / "performance.json"
    found = json.loads(shipped.read_text("utf-8"))
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    assert frame["page"].filled(text, found) == text, "run python bench/performance.py --page"


def test_ratios_are_of_rounds(frame: dict[str, ModuleType]) -> None:
    make = frame["figure"].Figure
    cost = make("a", (2.0, 3.0, 8.0), (1.0, 3.0, 2.0), "b", "at most", 2.0)
    assert cost.ratios == (2.0, 1.0, 4.0) and cost.measured == 2.0 and cost.holds
    speed = make("a", (2.0, 4.0, 1.0), (40.0,), "b", "at least", 21.0)
    assert speed.measured == 20.0 and speed.holds is False
    limit = make("a", (2.0, 3.0), asked=2.0)
    assert limit.measured == 2.5 and limit.holds is False
    assert make("a", (1.02,), (1.0,), "b", "about", 1.0).holds
    assert make("a", (0.9,), (1.0,), "b", "about", 1.0).holds is False
    assert make("a", (1.0,), (1.0,), "b").holds is None


def test_sides_take_turns(frame: dict[str, ModuleType]) -> None:
    order: list[str] = []
    frame["rounds"].interleaved(lambda: order.append("ours"), lambda: order.append("other"), 2)
    assert order == ["ours", "other"] + ["ours", "other"] + ["other", "ours"]
