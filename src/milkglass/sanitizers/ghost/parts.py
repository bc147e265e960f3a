"""The parts of a data set that are done, in a folder of their own, until all are: so an interrupted run goes on.

Each part is a file that is there whole or not at all. The folder is its owner's only: it holds the seed, with which the
rest is done. What this module does not know: what is in a part.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milkglass.checkpoint import read_json
from milkglass.errors import UsageError

FORMAT = "milkglass-ghost-parts/1"
STATE = "job.json"


@dataclass(frozen=True)
class Parts:
    """folder: where parts are kept. job: names the run: all that its result depends on but a seed that was drawn."""

    folder: Path
    job: str

    def seed(self, drawn: int) -> int:
        """The seed of this run: that with which it was begun, else this one, which is kept.

        Raises UsageError where the folder has parts of another run: what it did is not thrown away.
        """
        state = self.folder / STATE
        told = read_json(state) if state.is_file() else {}
        if told.get("format") == FORMAT and told.get("job") == self.job:
            return int(told["seed"])
        if any(self.folder.glob("[0-9]*.json")):
            raise UsageError(
                f"{self.folder} holds an unfinished run with other options, or of another file or model",
                "give that run's options to go on with it, or remove the folder",
            )
        self.folder.mkdir(mode=0o700, exist_ok=True)
        _write(state, {"format": FORMAT, "job": self.job, "seed": str(drawn)})
        return drawn

    def has(self, number: int) -> bool:
        return self._path(number).is_file()

    def put(self, number: int, value: dict[str, Any]) -> None:
        _write(self._path(number), value)

    def get(self, number: int) -> dict[str, Any]:
        """Raises CorruptCheckpoint where it is no JSON."""
        return read_json(self._path(number))

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.json"


def _write(path: Path, value: dict[str, Any]) -> None:
    """Appears when it is complete, its owner's."""
    partial = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
