"""Runs recipes on one GPU as pieces of at most eight minutes, side by side where they fit: `make figures-gpu`.

    python recipes/gpu/run.py recipes/gpu/plan.toml --data DATA_FOLDER --out FOLDER [--minutes 480] [--only NAME ...]
    python recipes/gpu/run.py collect FOLDER

A cell of a comparison (data x defence x seed) is a piece, and so is every recipe: of a comparison it comes after its
cells. A piece that is not done after eight minutes is stopped, which keeps its steps, and goes on in its next turn. The
same command goes on where it was stopped, also by a kill. Cells, shadows and models are shared through FOLDER/cache.

It starts from a commit with nothing changed, and every result names it. Results come to FOLDER/results; `collect` puts
them into recipes/results of this checkout, if it has the commits that made them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from milkglass import device, files, system
from milkglass.errors import MilkglassError, UsageError
from milkglass.experiments.kinds.comparison import CellTrainer, ComparisonRecipe
from milkglass.experiments.kinds.fine_tuning import FineTuningRecipe
from milkglass.experiments.needs import GB, RecipeNeeds
from milkglass.experiments.recipe import QUICK_SUFFIX, Recipe, from_entries, read_settings
from milkglass.experiments.reproduce import RECIPE_CLASSES, reproduce
from milkglass.experiments.runs import RunContext, code_version, commits_of

ROOT = Path(__file__).parents[2]
PIECE_MINUTES = 8.0  # of a piece
STOP_SECONDS = 90.0  # seconds in which a stopped piece keeps its steps
TRAININGS_ON_DEVICE = 2  # trainings side by side for which a recipe says its need of the GPU
MAX_TURNS = 3  # in a row without an end, after which a piece whose state cannot be kept is given up
DEFAULT_MEMORY, DEFAULT_DEVICE = 2.0, 4.0  # GB that a recipe needs which does not say it
STATE_FILE = "state.json"


@dataclass(frozen=True)
class Piece:
    """One thing to run.

    Attributes:
        recipe: the file's name without its suffix, or its path, and ".quick" for a quick run.
        cell: the number of a cell. None: the whole recipe.
        needs: of the recipe, at each moment.
        cores: that it takes. Trainings side by side take half a core each: they are graded one by one afterwards.
        at_once: how many of the recipe's own trainings run side by side.
    """

    recipe: str
    cell: int | None
    needs: RecipeNeeds = field(compare=False)
    cores: int = 1
    at_once: int = 1

    @property
    def name(self) -> str:
        return result_name(self.recipe) if self.cell is None else f"{result_name(self.recipe)}-{self.cell:03d}"


@dataclass
class PieceState:
    """The state of a piece. `state` is "waiting", "done" or "failed"."""

    state: str = "waiting"
    turns: int = 0
    minutes: float = 0.0
    message: str = ""


def _stored_state(stored: Mapping[str, Any]) -> PieceState:
    """Returns the state that a file has, which older code may have written with other fields."""
    names = {one.name for one in fields(PieceState)}
    return PieceState(**{name: value for name, value in stored.items() if name in names})


def result_name(recipe: str) -> str:
    """Returns the name of a recipe's results."""
    base = Path(recipe.removesuffix(QUICK_SUFFIX)).name.removesuffix(".toml")
    return base + (QUICK_SUFFIX if recipe.endswith(QUICK_SUFFIX) else "")


def open_recipe(name: str) -> tuple[Path, bool, Recipe]:
    """Returns a recipe's file, whether it is run quick, and the recipe. Raises UsageError."""
    quick, base = name.endswith(QUICK_SUFFIX), name.removesuffix(QUICK_SUFFIX)
    path = Path(base) if base.endswith(".toml") else ROOT / "recipes" / f"{base}.toml"
    kind = RECIPE_CLASSES.get(str(read_settings(path, quick).get("kind")))
    if kind is None:
        raise UsageError(f"{path.name} is of no kind that is known", f"known: {', '.join(RECIPE_CLASSES)}")
    return path, quick, kind.read(path, quick)


def split_into_pieces(names: Sequence[str], free: FreeResources) -> list[Piece]:
    """Returns all pieces, cells before their recipe. `free` is what the machine has."""
    result = []
    for name in names:
        _, _, recipe = open_recipe(name)
        needs = from_entries(RecipeNeeds, recipe.needs)
        if isinstance(recipe, ComparisonRecipe):
            result += [Piece(name, cell, needs) for cell in range(len(recipe.cell_keys))]
        result.append(_whole(name, recipe, needs, free))
    return result


def _whole(name: str, recipe: Recipe, needs: RecipeNeeds, free: FreeResources) -> Piece:
    """Returns the piece of a whole recipe, with as many of its own trainings side by side as the machine holds.

    Those of a comparison are pieces.
    """
    if not isinstance(recipe, FineTuningRecipe):
        return Piece(name, None, needs)
    most = min(len(recipe.variants), free.cores)
    sizes = (Piece(name, None, _needs_of(needs, size), max(1, size // 2), size) for size in range(most, 0, -1))
    return next((piece for piece in sizes if free.holds(piece)), Piece(name, None, needs))


def _needs_of(needs: RecipeNeeds, at_once: int) -> RecipeNeeds:
    """Returns what so many trainings need side by side."""
    memory, on_device = _gigabytes(needs)
    return replace(needs, memory=memory * at_once, device=on_device * max(1.0, at_once / TRAININGS_ON_DEVICE))


def _gigabytes(needs: RecipeNeeds) -> tuple[float, float]:
    """Returns the GB of memory and of the device that a recipe needs, or the usual ones."""
    return needs.memory or DEFAULT_MEMORY, needs.device or DEFAULT_DEVICE


def runnable(pieces: Sequence[Piece], states: dict[str, PieceState]) -> list[Piece]:
    """Returns the waiting pieces whose cells are done or given up, those with the fewest turns first."""
    waiting = {piece.recipe for piece in pieces if piece.cell is not None and states[piece.name].state == "waiting"}
    free = [
        piece
        for piece in pieces
        if states[piece.name].state == "waiting" and (piece.cell is not None or piece.recipe not in waiting)
    ]
    return sorted(free, key=lambda piece: states[piece.name].turns)


@dataclass
class FreeResources:
    """What is left of the machine, in GB; a device of None is the processor."""

    memory: float
    device: float | None
    cores: int

    @classmethod
    def here(cls) -> FreeResources:
        memory, free = system.memory_bytes(only_available=True), device.memory_bytes(only_free=True)
        return cls(
            float("inf") if memory is None else memory / GB, None if free is None else free / GB, system.core_count()
        )

    def holds(self, piece: Piece) -> bool:
        memory, on_device = _gigabytes(piece.needs)
        has_device = self.device is None or self.device >= on_device
        return self.cores >= piece.cores and has_device and self.memory >= memory

    def take(self, piece: Piece, sign: int = 1) -> None:
        memory, on_device = _gigabytes(piece.needs)
        self.cores -= sign * piece.cores
        self.memory -= sign * memory
        if self.device is not None:
            self.device -= sign * on_device

    def shortage(self, piece: Piece) -> str:
        """Returns why a piece cannot run, with both numbers of each kind."""
        memory, on_device = _gigabytes(piece.needs)
        gpu = "" if self.device is None else f", {on_device:g} of {self.device:.1f} GB of the GPU's"
        return (
            f"it needs more than this machine has: {memory:g} of {self.memory:.1f} GB of memory{gpu}, {piece.cores} of "
            f"{self.cores} cores; take a larger machine, or leave it out with --only"
        )


class Runner:
    """Runs pieces. `states` is stored after each, so that another start goes on."""

    def __init__(self, pieces: Sequence[Piece], data: Path, out: Path, minutes: float) -> None:
        self.pieces, self.data, self.out, self.minutes = pieces, data, out, minutes
        self.states = {piece.name: PieceState() for piece in pieces}
        if (out / STATE_FILE).is_file():
            known = json.loads((out / STATE_FILE).read_text("utf-8"))
            self.states |= {name: _stored_state(known[name]) for name in self.states.keys() & known.keys()}
        for state in self.states.values():
            if state.state == "failed":  # what failed is tried again
                state.state, state.turns = "waiting", 0
        self.running: dict[Piece, tuple[subprocess.Popen[bytes], float]] = {}
        self.free = FreeResources.here()

    def run(self, until: float) -> bool:
        """Runs until all is done or the time is over, and returns whether all is done."""
        try:
            while time.monotonic() < until or self.running:
                if time.monotonic() < until:
                    self._begin(until)
                if not self.running:
                    break
                time.sleep(0.2)
                for piece in [*self.running]:
                    self._look(piece, until)
        finally:
            for child, _ in self.running.values():
                child.terminate()
            for piece in [*self.running]:
                self._stop(piece)
        return all(state.state == "done" for state in self.states.values())

    def command(self, piece: Piece) -> list[str]:
        cell = "-" if piece.cell is None else str(piece.cell)
        return [
            sys.executable, __file__, "piece", piece.recipe, cell, str(self.data), str(self.out), str(piece.at_once)
        ]  # fmt: skip

    def _begin(self, until: float) -> None:
        for piece in runnable(self.pieces, self.states):
            if piece in self.running:
                continue
            if not self.free.holds(piece):
                if self.running:
                    continue
                self._end(piece, "failed", self.free.shortage(piece))
                continue
            log = self.out / "logs" / f"{piece.name}.log"
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as log_file:
                child = subprocess.Popen(
                    self.command(piece), stdin=subprocess.PIPE, stdout=log_file, stderr=log_file,
                    start_new_session=True,
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                )  # fmt: skip
            self.free.take(piece)
            self.running[piece] = child, time.monotonic()

    def _look(self, piece: Piece, until: float) -> None:
        child, begun = self.running[piece]
        code = child.poll()
        if code is None:
            if time.monotonic() > min(begun + 60 * self.minutes, until):
                self._stop(piece)
            return
        message = "" if code == 0 else _last_line(self.out / "logs" / f"{piece.name}.log")
        self._close(piece, "done" if code == 0 else "failed", message)

    def _stop(self, piece: Piece) -> None:
        """Stops a piece, which keeps what it can, and puts it back."""
        child, _ = self.running[piece]
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        try:
            code = child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
        if code == 0:
            self._close(piece, "done", "")
        elif self.states[piece.name].turns + 1 >= MAX_TURNS and not _keeps_its_steps(piece):
            self._close(piece, "failed", f"it does not end within {self.minutes:g} minutes, and keeps no steps")
        else:
            self._close(piece, "waiting", "")

    def _close(self, piece: Piece, state: str, message: str) -> None:
        child, begun = self.running.pop(piece)
        if child.stdin is not None:
            child.stdin.close()
        self.free.take(piece, -1)
        self.states[piece.name].minutes += (time.monotonic() - begun) / 60
        self._end(piece, state, message)

    def _end(self, piece: Piece, state: str, message: str) -> None:
        ended = self.states[piece.name]
        ended.state, ended.message, ended.turns = state, message, ended.turns + 1
        table = {name: {**asdict(state), "minutes": round(state.minutes, 2)} for name, state in self.states.items()}
        files.write(self.out / STATE_FILE, json.dumps(table, indent=1) + "\n")
        done = sum(piece_state.state == "done" for piece_state in self.states.values())
        print(
            f"{done} of {len(self.states)}  {piece.name}: {state}, {ended.minutes:.1f} min  {message}".rstrip(),
            flush=True,
        )


def _keeps_its_steps(piece: Piece) -> bool:
    """Returns whether the work of a stopped turn is kept. It is, but for halves, which are trained at one go."""
    _, _, recipe = open_recipe(piece.recipe)
    if piece.cell is None or not isinstance(recipe, ComparisonRecipe):
        return True
    return "encoder" not in recipe.defences[recipe.cell_keys[piece.cell][1]]


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _end_with_parent() -> None:
    """Stops this process when its parent ends, also by a kill: nobody else would."""

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def piece(recipe: str, cell: str, data: Path, out: Path, at_once: int) -> None:
    """Runs one piece in this process, with so many of a recipe's own trainings side by side."""
    _end_with_parent()
    path, quick, read = open_recipe(recipe)
    say = lambda line: print(line, flush=True)  # noqa: E731
    cache = files.make_private_dir(out / "cache")
    if cell != "-":
        assert isinstance(read, ComparisonRecipe)
        key = read.cell_keys[int(cell)]
        with system.exit_on_sigterm():
            CellTrainer.of(read, data, [key]).train(key, RunContext(data, out, system.core_count(), say, cache))
        return
    with system.exit_on_sigterm():
        run, shared = out / "runs" / result_name(recipe), cache if read.is_cacheable else None
        result = reproduce(path, data, run, quick, at_once, say, shared)
    (out / "results").mkdir(exist_ok=True)
    shutil.copyfile(result, out / "results" / result.name)


def clean_commit() -> str:
    """Returns the commit of this checkout. Raises UsageError if there is none, or something was changed."""
    commit = code_version()["commit"]
    if not commit or commit.endswith("+"):
        why = "is changed" if commit else "is no checkout of git"
        raise UsageError(f"{ROOT} {why}: its results could not name their code", "commit it, or run a clean checkout")
    return commit


def collect(out: Path, target: Path) -> Iterator[str]:
    """Copies results whose commits are in this checkout, and yields a line for each. Raises UsageError for others."""
    found = sorted((out / "results").glob("*.json"))
    if not found:
        raise UsageError(f"{out} holds no results", "run a plan with --out of this folder first")
    for path in found:
        made = json.loads(path.read_text("utf-8"))["made"]
        for commit in commits_of(made):
            known = subprocess.run(
                ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False
            )
            if commit.endswith("+") or known.returncode:
                raise UsageError(
                    f"{path.name} was made by {commit}", "only results of commits of this checkout are kept"
                )
    target.mkdir(exist_ok=True)
    for path in found:
        shutil.copyfile(path, target / path.name)
        yield f"{path.name}: {target / path.name}"


def recipes_of_plan(path: Path, only: Sequence[str]) -> list[str]:
    """Returns the recipes of a plan, in its order. Raises UsageError."""
    try:
        names = tomllib.loads(path.read_text("utf-8"))["recipes"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{path} is no plan ({type(error).__name__})", 'it holds recipes = ["NAME", "NAME.quick"]'
        ) from None
    if unknown := sorted({*only} - {*names}):
        raise UsageError(f"{path.name} has no {unknown[0]}", f"it has: {', '.join(names)}")
    return [name for name in names if not only or name in only]


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["piece"]:
        piece(arguments[1], arguments[2], Path(arguments[3]), Path(arguments[4]), int(arguments[5]))
        return 0
    if arguments[:1] == ["collect"]:
        for line in collect(Path(arguments[1]), ROOT / "recipes" / "results"):
            print(line)
        return 0
    parser = argparse.ArgumentParser(description="Run recipes on one GPU as pieces, side by side where they fit.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which it stops, to be gone on with")
    parser.add_argument("--piece-minutes", type=float, default=PIECE_MINUTES)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    asked = parser.parse_args(arguments)
    commit = clean_commit()
    if not asked.data.is_dir():
        raise UsageError(f"there is no folder {asked.data}", "give the folder with the recipes' data")
    out = files.make_private_dir(asked.out.absolute())
    pieces = split_into_pieces(recipes_of_plan(asked.plan, asked.only), FreeResources.here())
    runner = Runner(pieces, asked.data.absolute(), out, asked.piece_minutes)
    print(f"{len(pieces)} pieces of commit {commit} on {device.current()}", flush=True)
    with system.exit_on_sigterm():
        return 0 if runner.run(time.monotonic() + 60 * asked.minutes) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MilkglassError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
