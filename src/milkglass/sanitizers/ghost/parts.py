"""The finished parts of a data set, in a folder of their own until all are done, so that a run can resume.

Each part is a file that exists completely or not at all. Only the owner can read the folder. While parts are missing it
contains the run's seed, if that was drawn. All parts of a run need one seed: then a text that occurs twice has one
shadow, and the result is the same whether or not the run was interrupted.
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
        job: names the run: everything on which its result depends, except a seed that was drawn.
    """

    folder: Path
    job: str

    def begin(self, seed: int | None) -> int | None:
        """Returns the seed of this run. None: all parts are done.

        A given seed is not stored. Without one it is the seed with which the run was started, or a fresh secret one,
        which is stored until all parts are done.

        Raises:
            UsageError: the folder has parts of another run, which are not discarded.
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
        """Notes that all parts are done.

        Removes the seed before the result has its name, so that they never coexist.
        """
        self._note(None, True)

    def make(self, number: int, ghost: Ghost, seed: int | None, made: Callable[[Ghost], dict[str, Any]]) -> None:
        """Makes a part with the run's seed, unless it exists. Raises CorruptCheckpoint if the seed is gone."""
        if self._path(number).is_file():
            return
        if seed is None:
            fault = f"part {number} of {self.folder.name} was made and is gone"
            raise CorruptCheckpoint(fault, f"remove {self.folder}: all is made again")
        write(self._path(number), made(replace(ghost, seed=seed)))

    def get(self, number: int) -> dict[str, Any]:
        """Returns a part. Raises CorruptCheckpoint if it is not JSON."""
        try:
            return read_json(self._path(number))
        except CorruptCheckpoint:
            raise self.damaged(number) from None

    def damaged(self, number: int) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"part {number} of {self.folder.name} is damaged", "remove it: it is made again")

    def remove(self) -> None:
        """Removes all parts, and last the note that all are done."""
        for part in self.folder.glob("[0-9]*.json"):
            part.unlink()
        shutil.rmtree(self.folder)

    def _note(self, seed: str | None, finished: bool) -> None:
        write(self.folder / STATE, {"format": FORMAT, "job": self.job, "seed": seed, "finished": finished})

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.json"


def finished(folder: Path) -> FinishedParts | None:
    """Returns the parts in a folder if all are done, else None."""
    info = _state(folder)
    return FinishedParts(folder, str(info.get("job"))) if info.get("finished") is True else None


def _state(folder: Path) -> dict[str, Any]:
    info = read_json(folder / STATE) if (folder / STATE).is_file() else {}
    return info if info.get("format") == FORMAT else {}


def write(path: Path, value: dict[str, Any]) -> None:
    """Writes JSON, completely or not at all."""
    files.write(path, json.dumps(value))  # in ASCII: a text may have half of a surrogate pair
