"""The results of an audit so far, on disk, so that a stopped audit resumes. They are removed when the audit ends.

They contain guesses at the user's text and are as private as the text.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from milkglass import files
from milkglass.audit.outcome import AttackResult
from milkglass.errors import UsageError
from milkglass.sequences import Ids
from milkglass.threat.knowledge import Candidates, Group


@dataclass(frozen=True)
class ResumeStore:
    """Stores results, what each attack read, and candidates, by name, in a folder."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], *earlier_identities: Mapping[str, Any]) -> ResumeStore:
        """Opens the store in this folder, or makes it.

        Args:
            identity: everything that decides the results.
            earlier_identities: `identity` as earlier versions wrote it; their results still hold.

        Raises:
            UsageError: the folder belongs to another audit.
        """
        digest, *earlier_digests = (
            hashlib.sha256(json.dumps(audit_identity, sort_keys=True).encode()).hexdigest()
            for audit_identity in (identity, *earlier_identities)
        )
        record_path = folder / "about.json"
        if record_path.is_file():
            if json.loads(record_path.read_text("utf-8"))["digest"] not in (digest, *earlier_digests):
                raise UsageError(
                    f"{folder} holds the work of an audit that was not finished, of another key, text or setting",
                    f"give another folder, such as --out {folder.parent}-2, or remove {folder}",
                )
            return cls(folder)
        files.make_private_dir(folder)
        files.write(record_path, json.dumps({"digest": digest}) + "\n")
        return cls(folder)

    def stored_result(self, name: str) -> tuple[AttackResult, Ids | None] | None:
        """Returns a result whose attack ended, with its reading (total,). None: the attack must run again."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return None
        result = AttackResult.from_json(json.loads(path.read_text("utf-8")))
        if result.state != "done" or result.cut:
            return None
        reading = self.folder / f"{name}.safetensors"
        return result, load_file(reading)["reading"] if reading.is_file() else None

    def finished_names(self) -> list[str]:
        """Returns the names of the attacks that ended."""
        names = [file.stem for file in self.folder.glob("*.json") if file.name != "about.json"]
        return [name for name in names if self.stored_result(name) is not None]

    def write_result(self, name: str, result: AttackResult, reading: Ids | None) -> None:
        """Stores a result, and its reading (total,) if it has one."""
        if reading is not None:
            with files.atomic_path(self.folder / f"{name}.safetensors") as path:
                save_file({"reading": np.ascontiguousarray(reading)}, path)
        files.write(self.folder / f"{name}.json", json.dumps(result.to_json(), allow_nan=False))

    def candidates(self, name: str) -> Candidates | None:
        """Returns the stored candidates of a solver, or None."""
        path = self.folder / f"{name}.candidates"
        return unpack_candidates(load_file(path)) if path.is_file() else None

    def write_candidates(self, name: str, candidates: Candidates) -> None:
        with files.atomic_path(self.folder / f"{name}.candidates") as path:
            save_file(pack_candidates(candidates), path)

    def remove(self) -> None:
        """Removes the folder with all that is stored."""
        shutil.rmtree(self.folder)


def pack_candidates(candidates: Candidates) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the candidates as arrays: "sizes" (groups, 3), and the values of all groups, one after the other.

    A row of "sizes" has the numbers of a group's rows and members, and whether the group has weights.
    """
    groups = candidates.groups
    sizes = [[len(group.rows), len(group.members), group.weights is not None] for group in groups]

    def flatten(parts: list[Any], dtype: Any) -> np.ndarray[Any, Any]:
        return np.concatenate([np.asarray(part, dtype).reshape(-1) for part in parts] or [np.empty(0, dtype)])

    return {
        "sizes": np.array(sizes, np.int64).reshape(-1, 3),
        "rows": flatten([group.rows for group in groups], np.int64),
        "members": flatten([group.members for group in groups], np.int64),
        "weights": flatten([group.weights for group in groups if group.weights is not None], np.float64),
        "likelihood": flatten(list(candidates.log_likelihoods), np.float64),
    }


def unpack_candidates(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Candidates:
    """Returns the candidates of the arrays in which they were stored."""
    next_place = dict.fromkeys(("rows", "members", "weights", "likelihood"), 0)

    def next_values(name: str, count: int) -> np.ndarray[Any, Any]:
        next_place[name] += count
        return arrays[name][next_place[name] - count : next_place[name]]

    groups, log_likelihoods = [], []
    for rows, members, has_weights in arrays["sizes"].tolist():
        shape = (rows, members)
        weights = next_values("weights", rows * members).reshape(shape) if has_weights else None
        groups.append(Group(next_values("rows", rows), next_values("members", members), weights))
        log_likelihoods.append(next_values("likelihood", rows * members).reshape(shape))
    return Candidates(tuple(groups), tuple(log_likelihoods))
