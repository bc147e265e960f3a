"""Table 11 on a tiny model: every part is timed once, the extrapolation is said and is arithmetic."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from milkglass.errors import JobFailed, UsageError
from milkglass.experiments.kinds import overhead
from milkglass.experiments.kinds.overhead import OverheadRecipe, PartialResults, step_seconds, timed
from milkglass.server.spec import Event
from tests import tiny
from tests.experiments.running import figures as figures_of
from tests.experiments.running import run

SHIPPED = Path(__file__).parents[2] / "recipes"
FIGURES = {
    "obfuscation, client", "tokenisation, client", "training rows", "a step of fine-tuning, server",
    "hours of fine-tuning (extrapolated), server", "tokenisation of a prompt, client", "answer, server",
    "detokenisation of an answer, client",
}  # fmt: skip


def write_recipe(folder: Path) -> Path:
    model = tiny.save("llama-tied", folder / "base")
    rows = [{"instruction": text, "input": "", "output": text[:20]} for text in tiny.TEXTS * 4]
    rows.append({"instruction": tiny.TEXTS[0] * 100, "input": "", "output": "beyond the length of a row"})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = folder / "small.toml"
    path.write_text(
        f"""
kind = "overhead"
paper = "none"
model = "{model}"
seed = 3
[data]
train = "train.jsonl"
[training]
max_steps = 4
batch_size = 6
lora_rank = 4
full_first = 1
full_last = 0
[evaluation]
repeats = 2
epochs = 10
prompts = 3
new_tokens = 5
[variants.obfuslm]
k = 4
epsilon = 1.0
beta = 0.9
[published]
"answer, server" = 1.29
"""
    )
    return path


@pytest.mark.slow
def test_a_recipe_runs_and_measures_no_part_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = write_recipe(tmp_path), tmp_path / "run"
    assert run(path, tmp_path, out, 1) == 0
    result = json.loads((out / "small.json").read_text())
    figures = {name: one["measured"] for name, one in figures_of(result).items()}
    assert set(figures) == FIGURES
    assert all(value > 0 for value in figures.values())
    assert figures["training rows"] == 16
    hours = figures["a step of fine-tuning, server"] * 30 / 3600  # 16 rows are 3 steps of 6, 10 times
    assert figures["hours of fine-tuning (extrapolated), server"] == pytest.approx(hours, abs=1e-4)
    events = (out / "obfuslm" / "events.jsonl").read_text()
    assert len(step_seconds(events)) == 3

    def never(*_: Any) -> Any:
        raise AssertionError("timed again")

    monkeypatch.setattr(overhead, "timed", never)
    monkeypatch.setattr(overhead, "run_job", never)
    (out / "small.json").unlink()
    assert run(path, tmp_path, out, 1) == 0
    assert figures_of(json.loads((out / "small.json").read_text())) == figures_of(result)
    path.write_text(path.read_text().replace("repeats = 2", "repeats = 3"))
    with pytest.raises(UsageError, match="other settings"):
        run(path, tmp_path, out, 1)


def test_time_is_of_the_wall_clock() -> None:
    assert 0.05 <= timed(time.sleep, 0.05)[0] < 2


def test_a_part_that_failed_is_measured_again(tmp_path: Path) -> None:
    parts = PartialResults(tmp_path / "parts.json")

    def fails() -> dict[str, float]:
        raise JobFailed("no", "")

    with pytest.raises(JobFailed):
        parts.get_or_compute("a", fails)
    assert parts.get_or_compute("a", lambda: {"x": 1.0}) == {"x": 1.0}
    assert PartialResults(tmp_path / "parts.json").get_or_compute("a", fails) == {"x": 1.0}


def lines(*events: tuple[float, dict[str, Any]]) -> str:
    return "".join(Event(time=at, message="m", data=data).model_dump_json() + "\n" for at, data in events)


def test_steps_are_timed_from_report_to_report() -> None:
    steps = [(10.0, {"step": 1, "loss": 2.0}), (12.5, {"step": 2, "loss": 1.0}), (14.0, {"step": 3, "loss": 1.0})]
    others = [(0.0, {"step": 0, "total_steps": 3}), (20.0, {"step": 3, "eval_loss": 1.0})]
    assert step_seconds(lines(others[0], *steps, others[1])) == [2.5, 1.5]
    with pytest.raises(JobFailed, match=r"\b2 steps\b.*\b3\b"):
        step_seconds(lines(*steps[:2]))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("max_steps = 4", "max_steps = 2", "no steps"),
        ("max_steps = 4", "", "no steps"),
        ("max_steps = 4", "max_steps = 4\nlogging_steps = 2", "no steps"),
        ("prompts = 3", "", "no prompts"),
        ("[variants.obfuslm]", "[variants.plain]\n[variants.obfuslm]", r"\b2 variants\b.*\b1\b"),
        ("batch_size = 6", "batch_size = 0", "training: batch_size"),
    ],
)
def test_recipes_that_cannot_be(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = write_recipe(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UsageError, match=words):
        OverheadRecipe.read(path)


def test_the_shipped_result_is_of_the_recipe_as_it_stands() -> None:
    recipe = OverheadRecipe.read(SHIPPED / "obfuslm_overhead.toml", quick=True)
    result = json.loads((SHIPPED / "results" / "obfuslm_overhead.quick.json").read_text("utf-8"))
    assert result["training"] == recipe.training.model_dump()
    assert set(figures_of(result)) == FIGURES
    for name in ("data", "evaluation", "variants"):
        assert result[name] == dict(getattr(recipe, name))
    for name, value in recipe.published.items():
        assert figures_of(result)[name]["published"] == value
    assert recipe.training.max_steps == 3
