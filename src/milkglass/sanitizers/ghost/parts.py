"""The parts of a data set that are done, in a folder of their own, until all are: so an interrupted run goes on.

Each part is a file that is there whole or not at all. The folder is its owner's only: while parts are left to be made
it holds the seed with which they are, if it was drawn. Parts of one run need one seed: a text that occurs in two of
them has one shadow then, and the file is the same whether the run was interrupted or not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.models.checkpoint import read_json
from milkglass.sanitizers.files import fresh_seed
from milkglass.sanitizers.ghost.ghost import Ghost

FORMAT = "milkglass-ghost-parts/2"
STATE = "job.json"


@dataclass(frozen=True)
class FinishedParts:
    """The parts of one run.

    Attributes:
        folder: where they are.
        job: names the run: everything that its result depends on, except a seed that was drawn.
    """

    folder: Path
    job: str

    def begin(self, seed: int | None) -> int | None:
        """The seed of this run. The given one is not kept; without one that with which the run was started, else a
        fresh secret one, which is kept until all parts are done. None: they are.

        Raises UsageError where the folder has parts of another run: what it did is not discarded.
        """
        info = _state(self.folder)
        if info.get("job") == self.job:
            kept = None if info.get("seed") is None else int(info["seed"])
            return kept if seed is None else seed
        if any(self.folder.glob("[0-9]*.json")):
            raise UsageError(
                f"{self.folder} holds an unfinished run with other options, or of another file or model",
                "give that run's options to go on with it, --seed too if it had one, or remove the folder",
            )
        files.private_dir(self.folder)
        drawn = fresh_seed() if seed is None else seed
        self._note(str(drawn) if seed is None else None, False)
        return drawn

    def finish(self) -> None:
        """All parts are there: the seed goes before the result has its name, so that no death leaves it beside that."""
        self._note(None, True)

    def make(self, number: int, ghost: Ghost, seed: int | None, made: Callable[[Ghost], dict[str, Any]]) -> None:
        """Make a part with the run's seed, unless it is there. Raises CorruptCheckpoint where the seed has gone."""
        if self._path(number).is_file():
            return
        if seed is None:
            fault = f"part {number} of {self.folder.name} was made and is gone"
            raise CorruptCheckpoint(fault, f"remove {self.folder}: all is made again")
        write(self._path(number), made(replace(ghost, seed=seed)))

    def get(self, number: int) -> dict[str, Any]:
        """Raises CorruptCheckpoint where it is not JSON."""
        try:
            return read_json(self._path(number))
        except CorruptCheckpoint:
            raise self.damaged(number) from None

    def damaged(self, number: int) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"part {number} of {self.folder.name} is damaged", "remove it: it is made again")

    def remove(self) -> None:
        """What says that all parts are there goes last."""
        for part in self.folder.glob("[0-9]*.json"):
            part.unlink()
        shutil.rmtree(self.folder)

    def _note(self, seed: str | None, finished: bool) -> None:
        write(self.folder / STATE, {"format": FORMAT, "job": self.job, "seed": seed, "finished": finished})

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.json"


def finished(folder: Path) -> FinishedParts | None:
    """The parts in a folder where all are done, else None."""
    info = _state(folder)
    return FinishedParts(folder, str(info.get("job"))) if info.get("finished") is True else None


def _state(folder: Path) -> dict[str, Any]:
    info = read_json(folder / STATE) if (folder / STATE).is_file() else {}
    return info if info.get("format") == FORMAT else {}


def write(path: Path, value: dict[str, Any]) -> None:
    """JSON, complete or not there."""
    files.write(path, json.dumps(value))  # in ASCII: a text may have half of a surrogate pair
