"""What a recipe needs is checked before it starts, and what it used is noted in its folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from milkglass import device, system
from milkglass.errors import UsageError
from milkglass.experiments import needs
from milkglass.experiments.needs import GB, USAGE_FILE, RecipeNeeds, note_usage
from milkglass.experiments.recipe import read_settings
from milkglass.experiments.reproduce import reproduce

TOML = """
kind = "attacks"
paper = "none"
model = "no such model"
private = "private.txt"
attacks = ["knn"]
seed = 1
rows = 5
public = { some = ["public.txt"] }
variants = { plain = {} }
[needs]
memory = 40
[quick]
rows = 3
[quick.needs]
memory = 2
"""


def machine(monkeypatch: pytest.MonkeyPatch, memory: float | None, gpu: float | None = None) -> None:
    monkeypatch.setattr(system, "memory_bytes", lambda only_available: None if memory is None else int(memory * GB))
    monkeypatch.setattr(device, "memory_bytes", lambda only_free: None if gpu is None else int(gpu * GB))


def test_too_little_memory_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 3.5)
    with pytest.raises(UsageError, match=r"r needs at least 40 GB of memory, and 3\.5 GB are free here"):
        RecipeNeeds(memory=40).check("r", print)


def test_a_gpu_with_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 100, 16)
    with pytest.raises(UsageError, match=r"at least 40 GB of the GPU's memory, and 16\.0 GB are free there") as caught:
        RecipeNeeds(memory=40, device=40).check("r", print)
    assert "MILKGLASS_DEVICE to cpu" in caught.value.hint


def test_what_it_takes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    needs, said = RecipeNeeds(memory=3, device=8, minutes=40, device_minutes=2.5), list[str]()
    machine(monkeypatch, 4)  # the processor holds nothing of a GPU's
    needs.check("r", said.append)
    machine(monkeypatch, None, 9)
    needs.check("r", said.append)
    RecipeNeeds().check("r", said.append)
    assert said == [
        "r takes at least 3 GB of memory, about 40 min 0 s on two cores",
        "r takes at least 3 GB of memory, 8 GB of the GPU's, about 2 min 30 s on an H100",
    ]


def test_fewer_trainings_run_side_by_side_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    for memory, requested, expected in ((7, 2, 2), (5.9, 2, 1), (2, 2, 1), (9, 8, 3), (9, 1, 1), (None, 2, 2)):
        machine(monkeypatch, memory)
        assert RecipeNeeds(memory=3).trainings_at_once(requested, said.append) == expected
    assert RecipeNeeds().trainings_at_once(4, said.append) == 4
    assert RecipeNeeds(at_once=1).trainings_at_once(4, said.append) == 1
    assert said[0] == "trains 1 at a time in place of 2: each needs 3 GB of memory, 5.9 GB are free" and len(said) == 3


def test_a_recipe_is_refused_before_anything_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.toml"
    path.write_text(TOML)
    machine(monkeypatch, 3)
    with pytest.raises(UsageError, match="r needs at least 40 GB"):
        reproduce(path, tmp_path, tmp_path / "run")
    with pytest.raises(UsageError, match="no such model|private.txt"):  # its quick form fits, and goes on
        reproduce(path, tmp_path, tmp_path / "run", quick=True)
    assert not (tmp_path / "run").exists()


def test_a_quick_run_needs_what_it_says_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(TOML)
    assert read_settings(path)["needs"] == {"memory": 40}
    quick = read_settings(path, quick=True)
    assert quick["needs"] == {"memory": 2}
    assert quick["quick"] == {"rows": 3}  # what was run, which a result has
    path.write_text(TOML.replace("[quick.needs]\nmemory = 2\n", ""))
    assert "needs" not in read_settings(path, quick=True)


@pytest.mark.parametrize("wrong", ["memory = 0", "memory = 'much'", "disk = 3"])
def test_wrong_needs_are_refused(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(TOML.replace("memory = 40", wrong))
    with pytest.raises(UsageError):
        reproduce(path, tmp_path, tmp_path / "run")


def test_what_was_used_is_noted_for_each_start(tmp_path: Path) -> None:
    with note_usage(tmp_path):
        pass
    assert not (tmp_path / USAGE_FILE).exists()  # nothing was begun
    (tmp_path / "run.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), note_usage(tmp_path):
            raise KeyboardInterrupt
    used = json.loads((tmp_path / USAGE_FILE).read_text())
    assert len(used) == 2
    assert all(one["memory"] > 0.01 and one["minutes"] >= 0 for one in used)


HOLD = "import sys; held = b'x' * (int(sys.argv[1]) << 20); print('ready', flush=True); sys.stdin.read()"


def holding(megabytes: int) -> subprocess.Popen[bytes]:
    """A child that holds so much memory until its input ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(megabytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def let_go(child: subprocess.Popen[bytes]) -> None:
    child.communicate(timeout=300)


def measured_with(megabytes: list[int], together: bool) -> int:
    """The peak over children that hold memory side by side, or one after the other."""
    sampler = needs.MemorySampler()
    children = list[subprocess.Popen[bytes]]()
    for size in megabytes:
        children.append(holding(size))
        if not together or len(children) == len(megabytes):
            sampler.sample()
            for child in children:
                let_go(child)
            children.clear()
    return sampler.peak_bytes


def test_memory_is_that_of_the_whole_tree_at_one_time() -> None:
    one = measured_with([200], together=True)
    in_turn, together = measured_with([200, 200], together=False), measured_with([200, 200], together=True)
    assert abs(in_turn - one) < 100 << 20 < 150 << 20 < together - one


def test_a_sampler_stops_with_its_run_and_sees_what_was_held_at_the_end() -> None:
    sampler = needs.MemorySampler()
    sampler.start()
    sampler.stop()
    assert not sampler.is_alive() and sampler.peak_bytes > 1 << 20


def test_a_missing_library_is_missed_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ModuleNotFoundError, match="psutil"), note_usage(tmp_path):
        pytest.fail("the run began")
