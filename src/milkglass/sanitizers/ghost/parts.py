"""The parts of a data set that are done, in a folder of their own, until all are: so an interrupted run goes on.

Each part is a file that is there whole or not at all. The folder is its owner's only: while parts are left to be made
it holds the seed with which they are, if it was drawn. Parts of one run need one seed: a text that occurs in two of
them has one shadow then, and the file is the same whether the run was interrupted or not. Out of scope: what is in a
part.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.models.checkpoint import read_json

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

    def begin(self, drawn: int | None) -> int | None:
        """The seed with which this run was started, else this one, which is kept until all parts are done. None: the
        caller has one, which is not kept; or all parts are done.

        Raises UsageError where the folder has parts of another run: what it did is not discarded.
        """
        info = _state(self.folder)
        if info.get("job") == self.job:
            return None if info.get("seed") is None else int(info["seed"])
        if any(self.folder.glob("[0-9]*.json")):
            raise UsageError(
                f"{self.folder} holds an unfinished run with other options, or of another file or model",
                "give that run's options to go on with it, --seed too if it had one, or remove the folder",
            )
        files.private_dir(self.folder)
        self._note(None if drawn is None else str(drawn), False)
        return drawn

    def finish(self) -> None:
        """All parts are there: the seed goes before the result has its name, so that no death leaves it beside that."""
        self._note(None, True)

    def has(self, number: int) -> bool:
        return self._path(number).is_file()

    def put(self, number: int, value: dict[str, Any]) -> None:
        write(self._path(number), value)

    def get(self, number: int) -> dict[str, Any]:
        """Raises CorruptCheckpoint where it is not JSON."""
        try:
            return read_json(self._path(number))
        except CorruptCheckpoint:
            fault = f"part {number} of {self.folder.name} is damaged"
            raise CorruptCheckpoint(fault, "remove it: it is made again") from None

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
