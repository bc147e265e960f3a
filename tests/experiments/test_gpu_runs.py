"""Recipes as pieces: packed, unpacked in a fresh folder, run, killed, gone on with, and collected."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from milkglass.errors import UsageError
from milkglass.experiments.needs import RecipeNeeds
from tests import tiny

ROOT = Path(__file__).parents[2]
TINY = """
kind = "comparison"
paper = "p"
model = "MODEL"
[data.small]
train = "train.tsv"
held_out = "dev.tsv"
[training]
max_steps = 2
batch_size = 4
group_by_length = false
[defences.plain]
[defences.noise]
encoder = "dp-forward"
layer = 1
[needs]
memory = 0.2
device = 0.2
[quick]
data.small.rows = 16
[quick.needs]
memory = 0.2
device = 0.2
"""


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", ROOT / "recipes" / "gpu" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


run, pack, unpack = (module(name) for name in ("run", "pack", "unpack"))


# --- pieces -----------------------------------------------------------------------------------------------------------
NEEDS = RecipeNeeds(memory=0.01)


class Scripted(run.Runner):  # type: ignore[misc, name-defined]
    """Runs a program of Python in place of each piece."""

    def __init__(self, programs: dict[str, str], out: Path, minutes: float = 1.0, cells: int = 0) -> None:
        self.programs = programs
        pieces = [run.Piece(name, 0 if at < cells else None, NEEDS) for at, name in enumerate(programs)]
        super().__init__(pieces, out, out, minutes)

    def command(self, piece: Any) -> list[str]:
        return [sys.executable, "-c", self.programs[piece.recipe]]

    def outcomes(self) -> dict[str, str]:
        return {name: one.state for name, one in self.states.items()}


STEP = """
import pathlib, signal, sys, time
path = pathlib.Path({path!r})
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
path.write_text(path.read_text() + "x" if path.exists() else "x")
if len(path.read_text()) < 3: time.sleep(60)
"""


def test_a_piece_is_stopped_after_its_minutes_and_goes_on(tmp_path: Path) -> None:
    runner = Scripted({"slow": STEP.format(path=str(tmp_path / "slow")), "quick": "pass"}, tmp_path, 1.5 / 60)
    assert runner.run(time.monotonic() + 60)
    assert (tmp_path / "slow").read_text() == "xxx"
    assert runner.states["slow"].turns == 3
    assert runner.states["quick"].turns == 1


def test_what_fails_is_said_and_tried_again_by_the_next_start(tmp_path: Path) -> None:
    once = (
        f"import pathlib; p = pathlib.Path({str(tmp_path / 'once')!r}); done = p.exists(); p.touch(); assert done, 'no'"
    )
    runner = Scripted({"a": once, "b": "pass"}, tmp_path)
    assert not runner.run(time.monotonic() + 60)
    assert runner.outcomes() == {"a": "failed", "b": "done"}
    assert "no" in runner.states["a"].message
    again = Scripted({"a": once, "b": "raise SystemExit(1)"}, tmp_path)  # what is done is not run again
    assert again.run(time.monotonic() + 60)


def test_what_keeps_no_steps_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_keeps_its_steps", lambda piece: False)
    runner = Scripted({"a": "import time; time.sleep(60)"}, tmp_path, 0.5 / 60)
    assert not runner.run(time.monotonic() + 60)
    assert runner.states["a"].turns == run.MAX_TURNS
    assert "does not end within" in runner.states["a"].message


def test_a_recipe_waits_for_its_cells(tmp_path: Path) -> None:
    pieces = [
        run.Piece("r", 0, NEEDS),
        run.Piece("r", 1, NEEDS),
        run.Piece("r", None, NEEDS),
        run.Piece("s", None, NEEDS),
    ]
    states = {piece.name: run.PieceState() for piece in pieces}
    assert [one.name for one in run.runnable(pieces, states)] == ["r-000", "r-001", "s"]
    states["r-000"].state, states["r-001"].state = "done", "failed"
    states["s"].turns = 1
    assert [one.name for one in run.runnable(pieces, states)] == ["r", "s"]


def test_pieces_run_side_by_side_as_far_as_the_machine_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room, small = (
        run.FreeResources(memory=10, device=6, cores=16),
        run.Piece("a", None, RecipeNeeds(memory=3, device=3)),
    )
    for _ in range(2):
        assert room.holds(small)
        room.take(small)
    assert not room.holds(small)
    room.take(small, -1)
    assert room.holds(small)
    assert not room.holds(run.Piece("b", None, RecipeNeeds(memory=3, device=3), cores=16))  # one core is taken
    monkeypatch.setattr(run.FreeResources, "here", classmethod(lambda cls: cls(0.001, None, 4)))
    runner = Scripted({"a": "pass"}, tmp_path)
    assert not runner.run(time.monotonic() + 20)
    assert "needs more than this machine has" in runner.states["a"].message


def test_as_many_trainings_of_a_recipe_run_side_by_side_as_the_machine_holds() -> None:
    """obfuslm_alpaca has six, and says that one needs 6 GB of memory, and two 8 of the GPU's."""
    for device, at_once in ((80.0, 6), (None, 6), (16.0, 4), (9.0, 2), (1.0, 1)):
        free = run.FreeResources(memory=100, device=device, cores=16)
        (piece,) = run.split_into_pieces(["obfuslm_alpaca"], free)
        assert piece.at_once == at_once
        assert free.holds(piece) == (device != 1.0)


def test_the_plan_names_recipes_that_exist() -> None:
    names = run.recipes_of_plan(ROOT / "recipes" / "gpu" / "plan.toml", [])
    assert len(names) == len({*names}) > 10
    for name in names:
        run.open_recipe(name)
    with pytest.raises(UsageError, match="no such"):
        run.recipes_of_plan(ROOT / "recipes" / "gpu" / "plan.toml", ["no such"])


# --- the pack ---------------------------------------------------------------------------------------------------------
def test_a_lock_without_what_is_built_there() -> None:
    lock = "# a comment\ntorch==2 \\\n    --hash=sha256:1\n    # via x\ntorchmetrics==1 \\\n    --hash=sha256:2\n"
    assert pack.without(lock, ["torch"]) == "# a comment\ntorchmetrics==1 \\\n    --hash=sha256:2\n"


def test_parts_are_no_longer_than_asked(tmp_path: Path) -> None:
    parts = pack.Parts(tmp_path, 10)
    for size in (3, 25, 0, 2):
        parts.write(bytes(size))
    parts.close()
    assert [(tmp_path / one["name"]).stat().st_size for one in parts.done] == [10, 10, 10]
    stream = unpack.Parts(tmp_path, parts.done)
    assert stream.read() == bytes(30)
    (tmp_path / "part-001").write_bytes(b"changed")
    with pytest.raises(SystemExit, match="part-001 is not what was packed"):
        unpack.Parts(tmp_path, parts.done).read()
    (tmp_path / "part-001").unlink()
    with pytest.raises(SystemExit, match="part-001 is missing"):
        unpack.Parts(tmp_path, parts.done).read()


def test_wheels_of_another_python_are_not_installed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"for Python 2\.7, and this is 3\.\d+: pack with --python"):
        unpack.environment(tmp_path, "2.7")


def git(folder: Path, *words: str) -> str:
    name = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(folder), *name, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of what lies here, with a tiny recipe and a plan of it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("src", "recipes", "requirements"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
        )
    model = tiny.save("bert", tmp_path_factory.mktemp("model") / "bert")
    (folder / "recipes" / "tiny.toml").write_text(TINY.replace("MODEL", str(model)), "utf-8")
    (folder / "recipes" / "gpu" / "plan.toml").write_text('recipes = ["tiny.quick"]\n', "utf-8")
    (folder / ".gitignore").write_text("__pycache__/\n", "utf-8")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "all")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = sorted({word.strip(",") for text in tiny.TEXTS for word in text.split()})
    for name, count in (("train.tsv", 24), ("dev.tsv", 4)):
        rows = (f"{' '.join(rng.choice(words, 6))}\t{at % 2}\n" for at in range(count))
        (folder / name).write_text("sentence\tlabel\n" + "".join(rows), "utf-8")
    return folder


def environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}


def program(checkout: Path, name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / "recipes" / "gpu" / f"{name}.py"), *map(str, words)]
    return subprocess.run(command, env=environment(checkout), capture_output=True, text=True, check=False)


@pytest.mark.slow  # three trainings, one of them twice
def test_a_pack_is_unpacked_run_killed_and_gone_on_with(checkout: Path, data: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    packed = program(
        checkout, "pack", tmp_path / "pack", "--data", data, "--wheels", wheels, "--part-bytes", 1 << 20, "--model"
    )
    assert packed.returncode == 0, packed.stderr
    parts = sorted((tmp_path / "pack").glob("part-*"))
    assert len(parts) > 1
    assert all(one.stat().st_size <= 1 << 20 for one in parts)

    carried = tmp_path / "carried"
    shutil.move(tmp_path / "pack", carried)
    command = [sys.executable, str(carried / "unpack.py"), str(tmp_path / "there"), "--run"]
    out = tmp_path / "there" / "out"
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 240
    while '"done"' not in (text := (out / "state.json").read_text() if (out / "state.json").is_file() else ""):
        assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done = {name for name, one in json.loads(text).items() if one["state"] == "done"}
    assert 0 < len(done) < 3

    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    state = json.loads((out / "state.json").read_text())
    assert {one["state"] for one in state.values()} == {"done"}
    assert all(state[name]["turns"] == 1 for name in done)
    made = json.loads((out / "results" / "tiny.quick.json").read_text())["made"]
    assert made["commit"] == commit
    assert "begun" not in made
    assert "cells" not in made

    collected = program(checkout, "run", "collect", out)
    assert collected.returncode == 0, collected.stderr
    assert (checkout / "recipes" / "results" / "tiny.quick.json").read_bytes() == (
        out / "results" / "tiny.quick.json"
    ).read_bytes()


@pytest.mark.slow
def test_nothing_runs_or_is_packed_from_a_changed_checkout(checkout: Path, data: Path, tmp_path: Path) -> None:
    stray = checkout / "src" / "milkglass" / "stray.py"
    stray.write_text("")
    try:
        plan = checkout / "recipes" / "gpu" / "plan.toml"
        ran = program(checkout, "run", plan, "--data", data, "--out", tmp_path / "out")
        packed = program(checkout, "pack", tmp_path / "pack", "--data", data, "--wheels", data)
    finally:
        stray.unlink()
    for one in (ran, packed):
        assert one.returncode == 2
        assert "commit it" in one.stderr
    assert not (tmp_path / "pack").exists()


@pytest.mark.slow
def test_results_of_other_code_are_not_collected(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for commit in ("0123456789ab", f"{git(checkout, 'rev-parse', '--short=12', 'HEAD')}+"):
        result = {"made": {"commit": commit, "date": "2026-01-01"}}
        (tmp_path / "results" / "other.json").write_text(json.dumps(result))
        refused = program(checkout, "run", "collect", tmp_path)
        assert refused.returncode == 2
        assert f"made by {commit}" in refused.stderr
    assert not (checkout / "recipes" / "results" / "other.json").exists()
