"""What runs of several recipes may share: files that take long to make, each under the digest of what decides it but
the code. By which commit a file was begun lies beside it; a run's folder remembers the commits whose files it took.

What this module does not know: what is in the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from milkglass.audit.work import private_folder, write_private
from milkglass.experiments.recipe import now

TAKEN = "taken.json"


@dataclass(frozen=True)
class Kept:
    """folder: of all runs that share, readable by its owner alone; a run that shares with none gives its own. out: the
    run's."""

    folder: Path
    out: Path

    def place(self, room: str, name: str) -> Path:
        """Where a file is to lie, or lies."""
        private_folder(self.folder)
        private_folder(self.folder / room)
        path = self.folder / room / name
        record = path.with_name(f"{name}.made")
        if not record.is_file():
            begun = "not recorded" if path.is_file() else now()["commit"]
            write_private(record, json.dumps(begun) + "\n")
        self._remember(str(json.loads(record.read_text("utf-8"))))
        return path

    def _remember(self, commit: str) -> None:
        write_private(self.out / TAKEN, json.dumps(sorted({*taken(self.out), commit})) + "\n")


def taken(out: Path) -> list[str]:
    """The commits by which what a run took was begun."""
    path = out / TAKEN
    return list(json.loads(path.read_text("utf-8"))) if path.is_file() else []
