"""What an audit has done so far, on disk, so that a stopped one goes on. Mode 0700, removed when the audit ends.

It holds guesses at the user's text, so it is as private as the text.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from milkglass.audit.outcome import AttackResult
from milkglass.errors import UsageError
from milkglass.sequences import Ids
from milkglass.threat.knowledge import Candidates, Group


@dataclass(frozen=True)
class ResumeStore:
    """Cells, the attacker's reading of each, and candidates, under names."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, about: Mapping[str, Any]) -> ResumeStore:
        """about: everything that decides the results. Raises UsageError where another audit's work lies there."""
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        record = folder / "about.json"
        if record.is_file():
            if json.loads(record.read_text("utf-8"))["digest"] != digest:
                raise UsageError(
                    f"{folder} holds the work of an audit of another key, text or setting",
                    "give another --out, or remove that folder",
                )
            return cls(folder)
        private_folder(folder.parent)
        private_folder(folder)
        write_private(record, json.dumps({"digest": digest}) + "\n")
        return cls(folder)

    def cell(self, name: str) -> tuple[AttackResult, Ids | None] | None:
        """A cell that was done to its end, with its reading (total,), or None: the others are tried again."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return None
        cell = AttackResult.from_json(json.loads(path.read_text("utf-8")))
        if cell.state != "done" or cell.cut:
            return None
        reading = self.folder / f"{name}.safetensors"
        return cell, load_file(reading)["reading"] if reading.is_file() else None

    def keep(self, name: str, cell: AttackResult, reading: Ids | None) -> None:
        if reading is not None:
            save_file({"reading": np.ascontiguousarray(reading)}, self.folder / f"{name}.safetensors")
        part = self.folder / f"{name}.part"
        write_private(part, json.dumps(cell.to_json(), allow_nan=False))
        part.rename(self.folder / f"{name}.json")

    def candidates(self, name: str) -> Candidates | None:
        path = self.folder / f"{name}.candidates"
        return unpacked(load_file(path)) if path.is_file() else None

    def keep_candidates(self, name: str, found: Candidates) -> None:
        part = self.folder / f"{name}.part"
        save_file(packed(found), part)
        part.rename(self.folder / f"{name}.candidates")

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def private_folder(folder: Path) -> None:
    """Made for the owner alone; one that is there already keeps its mode, its files are private by themselves."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_private(path: Path, text: str) -> None:
    """A file of mode 0600, which is there whole or as it was before."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def packed(found: Candidates) -> dict[str, np.ndarray[Any, Any]]:
    """Flat arrays: sizes (g, 3) of rows, members and whether there are weights, and everything one after the other."""
    groups = found.groups

    def flat(parts: list[Any], dtype: Any) -> np.ndarray[Any, Any]:
        return np.concatenate([np.asarray(part, dtype).reshape(-1) for part in parts] or [np.empty(0, dtype)])

    return {
        "sizes": np.array([[len(g.rows), len(g.members), g.weights is not None] for g in groups], np.int64).reshape(
            -1, 3
        ),
        "rows": flat([g.rows for g in groups], np.int64),
        "members": flat([g.members for g in groups], np.int64),
        "weights": flat([g.weights for g in groups if g.weights is not None], np.float64),
        "likelihood": flat(list(found.likelihood), np.float64),
    }


def unpacked(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Candidates:
    at = dict.fromkeys(("rows", "members", "weights", "likelihood"), 0)

    def take(name: str, count: int) -> np.ndarray[Any, Any]:
        at[name] += count
        return arrays[name][at[name] - count : at[name]]

    groups, likelihood = [], []
    for rows, members, weighted in arrays["sizes"].tolist():
        shape = (rows, members)
        weights = take("weights", rows * members).reshape(shape) if weighted else None
        groups.append(Group(take("rows", rows), take("members", members), weights))
        likelihood.append(take("likelihood", rows * members).reshape(shape))
    return Candidates(tuple(groups), tuple(likelihood))
