"""Keeps files that take long to make, and that several recipes share.

A file's name is the digest of all its inputs except code. The commits that made a file are noted beside it, and a run's
folder notes the commits of the files that it used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.experiments.runs import USED_COMMITS_FILE, code_version, used_commits


@dataclass(frozen=True)
class ArtifactCache:
    """Shares files among several runs, and records the commits that made them.

    Attributes:
        folder: the folder of the shared files, readable by its owner alone. A run that shares nothing uses its own.
        out: the run folder.
    """

    folder: Path
    out: Path

    def path_of(self, subfolder: str, name: str) -> Path:
        """Returns the path of a file that exists or will be made.

        Makes the file's folder, and records in the run folder which commits made the file.
        """
        path = files.make_private_dir(self.folder / subfolder) / name
        self._record_used(commits_of_file(path))
        return path

    def record_writer(self, path: Path) -> None:
        """Records which code writes a file, before the file gets its name or is replaced by a longer one."""
        commits = {*commits_of_file(path), code_version()["commit"]}
        files.write(_record_path(path), json.dumps(sorted(commits)) + "\n")
        self._record_used(commits)

    def _record_used(self, commits: Iterable[str]) -> None:
        """Adds commits to the record of those whose files this run used."""
        files.write(self.out / USED_COMMITS_FILE, json.dumps(sorted({*used_commits(self.out), *commits})) + "\n")


def commits_of_file(path: Path) -> list[str]:
    """Returns the commits that made a file: [] if there is no file, ["not recorded"] if it has no record."""
    if not path.is_file():
        return []
    return list(json.loads(_record_path(path).read_text("utf-8"))) if _record_path(path).is_file() else ["not recorded"]


def _record_path(path: Path) -> Path:
    """Returns the path of the record of the commits that made a file, which lies beside it."""
    return path.with_name(f"{path.name}.made")


@dataclass(frozen=True)
class PartialResults:
    """Keeps the measurements so far on disk, so that a stopped run resumes after its last whole part.

    Attributes:
        path: the JSON file of the results.
    """

    path: Path

    @property
    def finished_parts(self) -> dict[str, dict[str, Any]]:
        """Returns the results of the parts that are measured, by the name of each part."""
        results: dict[str, dict[str, Any]] = json.loads(self.path.read_text("utf-8")) if self.path.is_file() else {}
        return results

    def get_or_compute(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns a part's results, computed and stored if they do not exist."""
        results = self.finished_parts
        if name not in results:
            results[name] = compute()
            files.write(self.path, json.dumps(results, indent=1) + "\n")
        return results[name]
