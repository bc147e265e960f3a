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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from milkglass import device, files, system
from milkglass.errors import MilkglassError, UsageError
from milkglass.experiments.kinds.comparison import Cells, Comparison
from milkglass.experiments.kinds.fine_tuning import FineTuning
from milkglass.experiments.needs import GB, RecipeNeeds
from milkglass.experiments.recipe import QUICK, Recipe, from_entries, settings
from milkglass.experiments.reproduce import KINDS, reproduce
from milkglass.experiments.runs import RunFolder, commits_of, now

ROOT = Path(__file__).parents[2]
MINUTES = 8.0  # of a piece
GRACE = 90.0  # seconds in which a stopped piece keeps its steps
USUAL = 2  # trainings side by side, as `milkglass reproduce` has them
TURNS = 3  # in a row without an end, after which a piece whose state cannot be kept is given up
UNSAID = RecipeNeeds(memory=2.0, device=4.0)  # of a recipe that does not say it
STATE = "state.json"


@dataclass(frozen=True)
class Piece:
    """One thing to run.

    Attributes:
        recipe: the file's name without its suffix, or its path, and ".quick" for a quick run.
        cell: the number of a cell. None: the whole recipe.
        needs: of the recipe, at each moment.
        cores: that it takes. Trainings side by side take half a core each: they are graded one by one afterwards.
    """

    recipe: str
    cell: int | None
    needs: RecipeNeeds = field(compare=False)
    cores: int = 1

    @property
    def name(self) -> str:
        return called(self.recipe) if self.cell is None else f"{called(self.recipe)}-{self.cell:03d}"


@dataclass
class Turns:
    """What became of a piece. `state` is "waiting", "done" or "failed"."""

    state: str = "waiting"
    turns: int = 0
    minutes: float = 0.0
    words: str = ""


def called(recipe: str) -> str:
    """Returns the name of a recipe's results."""
    base = Path(recipe.removesuffix(QUICK)).name.removesuffix(".toml")
    return base + (QUICK if recipe.endswith(QUICK) else "")


def opened(name: str) -> tuple[Path, bool, Recipe]:
    """Returns a recipe's file, whether it is run quick, and the recipe. Raises UsageError."""
    quick, base = name.endswith(QUICK), name.removesuffix(QUICK)
    path = Path(base) if base.endswith(".toml") else ROOT / "recipes" / f"{base}.toml"
    kind = KINDS.get(str(settings(path, quick).get("kind")))
    if kind is None:
        raise UsageError(f"{path.name} is of no kind that is known", f"known: {', '.join(KINDS)}")
    return path, quick, kind.read(path, quick)


def pieces_of(names: Sequence[str]) -> list[Piece]:
    """Returns all pieces, cells before their recipe."""
    result = []
    for name in names:
        _, _, recipe = opened(name)
        needs = from_entries(RecipeNeeds, recipe.needs)
        if isinstance(recipe, Comparison):
            result += [Piece(name, cell, needs) for cell in range(len(recipe.places))]
        at_once = _at_once(recipe)
        result.append(Piece(name, None, _needs_of(needs, at_once), max(1, at_once // 2)))
    return result


def _at_once(recipe: Recipe) -> int:
    """Returns how many of a recipe's own trainings run side by side. Those of a comparison are pieces."""
    return min(len(recipe.variants), system.cores()) if isinstance(recipe, FineTuning) else 1


def _needs_of(needs: RecipeNeeds, at_once: int) -> RecipeNeeds:
    """Returns what so many trainings need. A recipe says it for `USUAL` of them side by side."""
    factor = max(1.0, at_once / USUAL)
    return replace(
        needs,
        memory=None if needs.memory is None else needs.memory * factor,
        device=None if needs.device is None else needs.device * factor,
    )


def ready(pieces: Sequence[Piece], turns: dict[str, Turns]) -> list[Piece]:
    """Returns the waiting pieces whose cells are done or given up, those with the fewest turns first."""
    waiting = {piece.recipe for piece in pieces if piece.cell is not None and turns[piece.name].state == "waiting"}
    free = [
        piece
        for piece in pieces
        if turns[piece.name].state == "waiting" and (piece.cell is not None or piece.recipe not in waiting)
    ]
    return sorted(free, key=lambda piece: turns[piece.name].turns)


@dataclass
class Room:
    """What is left of the machine, in GB; a device of None is the processor."""

    memory: float
    device: float | None
    cores: int

    @classmethod
    def here(cls) -> Room:
        memory, free = system.memory_bytes(available=True), device.memory_bytes(free=True)
        return cls(float("inf") if memory is None else memory / GB, None if free is None else free / GB, system.cores())

    def holds(self, piece: Piece) -> bool:
        needs = piece.needs
        on_device = self.device is None or self.device >= (needs.device or UNSAID.device or 0)
        return self.cores >= piece.cores and on_device and self.memory >= (needs.memory or UNSAID.memory or 0)

    def take(self, piece: Piece, sign: int = 1) -> None:
        needs = piece.needs
        self.cores -= sign * piece.cores
        self.memory -= sign * (needs.memory or UNSAID.memory or 0)
        if self.device is not None:
            self.device -= sign * (needs.device or UNSAID.device or 0)


class Runner:
    """Runs pieces. `turns` is stored after each, so that another start goes on."""

    def __init__(self, pieces: Sequence[Piece], data: Path, out: Path, minutes: float) -> None:
        self.pieces, self.data, self.out, self.minutes = pieces, data, out, minutes
        self.turns = {piece.name: Turns() for piece in pieces}
        if (out / STATE).is_file():
            known = json.loads((out / STATE).read_text("utf-8"))
            self.turns |= {name: Turns(**known[name]) for name in self.turns.keys() & known.keys()}
        for one in self.turns.values():
            if one.state == "failed":  # what failed is tried again
                one.state, one.turns = "waiting", 0
        self.running: dict[Piece, tuple[subprocess.Popen[bytes], float]] = {}
        self.room = Room.here()

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
        return all(one.state == "done" for one in self.turns.values())

    def command(self, piece: Piece) -> list[str]:
        cell = "-" if piece.cell is None else str(piece.cell)
        return [sys.executable, __file__, "piece", piece.recipe, cell, str(self.data), str(self.out)]

    def _begin(self, until: float) -> None:
        for piece in ready(self.pieces, self.turns):
            if piece in self.running:
                continue
            if not self.room.holds(piece):
                if self.running:
                    continue
                self._end(piece, "failed", f"it needs more than this machine has: {asdict(piece.needs)}")
                continue
            log = self.out / "logs" / f"{piece.name}.log"
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as words:
                child = subprocess.Popen(
                    self.command(piece), stdin=subprocess.PIPE, stdout=words, stderr=words,
                    start_new_session=True,
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                )  # fmt: skip
            self.room.take(piece)
            self.running[piece] = child, time.monotonic()

    def _look(self, piece: Piece, until: float) -> None:
        child, begun = self.running[piece]
        code = child.poll()
        if code is None:
            if time.monotonic() > min(begun + 60 * self.minutes, until):
                self._stop(piece)
            return
        words = "" if code == 0 else _last_line(self.out / "logs" / f"{piece.name}.log")
        self._close(piece, "done" if code == 0 else "failed", words)

    def _stop(self, piece: Piece) -> None:
        """Stops a piece, which keeps what it can, and puts it back."""
        child, _ = self.running[piece]
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        try:
            code = child.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
        if code == 0:
            self._close(piece, "done", "")
        elif self.turns[piece.name].turns + 1 >= TURNS and not _keeps(piece):
            self._close(piece, "failed", f"it does not end within {self.minutes:g} minutes, and keeps no steps")
        else:
            self._close(piece, "waiting", "")

    def _close(self, piece: Piece, state: str, words: str) -> None:
        child, begun = self.running.pop(piece)
        if child.stdin is not None:
            child.stdin.close()
        self.room.take(piece, -1)
        self.turns[piece.name].minutes += (time.monotonic() - begun) / 60
        self._end(piece, state, words)

    def _end(self, piece: Piece, state: str, words: str) -> None:
        one = self.turns[piece.name]
        one.state, one.words, one.turns = state, words, one.turns + 1
        table = {name: {**asdict(turn), "minutes": round(turn.minutes, 2)} for name, turn in self.turns.items()}
        files.write(self.out / STATE, json.dumps(table, indent=1) + "\n")
        done = sum(turn.state == "done" for turn in self.turns.values())
        print(
            f"{done} of {len(self.turns)}  {piece.name}: {state}, {one.minutes:.1f} min  {words}".rstrip(), flush=True
        )


def _keeps(piece: Piece) -> bool:
    """Returns whether the work of a stopped turn is kept. It is, but for halves, which are trained at one go."""
    _, _, recipe = opened(piece.recipe)
    if piece.cell is None or not isinstance(recipe, Comparison):
        return True
    return "encoder" not in recipe.defences[recipe.places[piece.cell][1]]


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _end_with_parent() -> None:
    """Stops this process when its parent ends, also by a kill: nobody else would."""

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def piece(recipe: str, cell: str, data: Path, out: Path) -> None:
    """Runs one piece in this process."""
    _end_with_parent()
    path, quick, read = opened(recipe)
    say = lambda words: print(words, flush=True)  # noqa: E731
    cache = files.private_dir(out / "cache")
    if cell != "-":
        assert isinstance(read, Comparison)
        place = read.places[int(cell)]
        with system.stoppable():
            Cells.of(read, data, [place]).trained(place, RunFolder(data, out, system.cores(), say, cache))
        return
    with system.stoppable():
        run, shared = out / "runs" / called(recipe), cache if read.cached else None
        result = reproduce(path, data, run, quick, _at_once(read), say, shared)
    (out / "results").mkdir(exist_ok=True)
    shutil.copyfile(result, out / "results" / result.name)


def clean_commit() -> str:
    """Returns the commit of this checkout. Raises UsageError if there is none, or something was changed."""
    commit = now()["commit"]
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


def planned(path: Path, only: Sequence[str]) -> list[str]:
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


def main(words: Sequence[str]) -> int:
    if words[:1] == ["piece"]:
        piece(words[1], words[2], Path(words[3]), Path(words[4]))
        return 0
    if words[:1] == ["collect"]:
        for line in collect(Path(words[1]), ROOT / "recipes" / "results"):
            print(line)
        return 0
    parser = argparse.ArgumentParser(description="Run recipes on one GPU as pieces, side by side where they fit.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which it stops, to be gone on with")
    parser.add_argument("--piece-minutes", type=float, default=MINUTES)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    asked = parser.parse_args(words)
    commit = clean_commit()
    if not asked.data.is_dir():
        raise UsageError(f"there is no folder {asked.data}", "give the folder with the recipes' data")
    out = files.private_dir(asked.out.absolute())
    pieces = pieces_of(planned(asked.plan, asked.only))
    runner = Runner(pieces, asked.data.absolute(), out, asked.piece_minutes)
    print(f"{len(pieces)} pieces of commit {commit} on {device.current()}", flush=True)
    with system.stoppable():
        return 0 if runner.run(time.monotonic() + 60 * asked.minutes) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MilkglassError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
