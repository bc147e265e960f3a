"""A transcript on disk: safetensors files and `transcript.json`, to which a server or a client adds as it goes.

    transcript.json      {"milkglass_transcript": 1, "size": n, "observations": [...]}, in the order they were made
    tokens-0003.safetensors    ids (total,) and lengths (b,), int32
    weights-0001/        a checkpoint's config and tensors (links, where the file system allows), no tokenizer

What this module does not know: the key. What it writes holds scrambled ids only, but an attacker's whole view: it is
for the owner's eyes, in a folder of mode 0700.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from milkglass.checkpoint import Checkpoint, read_json
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.modelview import Model
from milkglass.sequences import Sequences
from milkglass.threat import Observation, Outputs, Tokens, Transcript, Weights

INDEX = "transcript.json"
VERSION = 1


@dataclass(frozen=True)
class Recorder:
    """Adds observations to a transcript's folder; what was written stays whole when it is killed."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, size: int) -> Recorder:
        """Begin, or go on. Raises UsageError where the folder holds something else or another vocabulary."""
        if (folder / INDEX).is_file():
            known = _index(folder)["size"]
            if known != size:
                raise UsageError(f"{folder} is a transcript of {known} ids, this model has {size}", "give a new folder")
            return cls(folder)
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} is no transcript and is not empty", "give a new folder")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_index(folder, {"milkglass_transcript": VERSION, "size": size, "observations": []})
        return cls(folder)

    def tokens(self, ids: Sequences, purpose: str) -> None:
        self._ids("tokens", ids, {"purpose": purpose})

    def outputs(self, ids: Sequences) -> None:
        self._ids("outputs", ids, {})

    def weights(self, model: Path, tuned: bool) -> None:
        """A checkpoint's config and tensor files. They are linked, not copied, where that is possible."""
        name = self._name("weights")
        (self.folder / name).mkdir()
        for file in [model / "config.json", *Checkpoint.open(model).files, model / "model.safetensors.index.json"]:
            if file.is_file():
                _link(file, self.folder / name / file.name)
        self._add({"kind": "weights", "folder": name, "tuned": tuned})

    def _ids(self, kind: str, ids: Sequences, more: dict[str, Any]) -> None:
        name = f"{self._name(kind)}.safetensors"
        tensors = {"ids": ids.ids.astype(np.int32), "lengths": ids.lengths.astype(np.int32)}
        part = self.folder / f"{name}.part"
        save_file(tensors, part)
        part.rename(self.folder / name)
        self._add({"kind": kind, "file": name, **more})

    def _name(self, kind: str) -> str:
        return f"{kind}-{len(_index(self.folder)['observations']):04}"

    def _add(self, entry: dict[str, Any]) -> None:
        index = _index(self.folder)
        index["observations"].append(entry)
        _write_index(self.folder, index)


def load(folder: Path) -> Transcript:
    """Raises UsageError or CorruptCheckpoint."""
    if not (folder / INDEX).is_file():
        raise UsageError(f"{folder} has no {INDEX}", "give a folder that `milkglass serve --record` wrote")
    index = _index(folder)
    return Transcript(tuple(_observation(folder, one) for one in index["observations"]), int(index["size"]))


def _observation(folder: Path, entry: dict[str, Any]) -> Observation:
    kind = entry.get("kind")
    if kind == "weights":
        return Weights(Model.open(folder / _plain(entry["folder"])), bool(entry["tuned"]))
    if kind not in ("tokens", "outputs"):
        raise CorruptCheckpoint(
            f"{INDEX} lists an observation of kind {kind!r}", "tokens, outputs and weights are known"
        )
    ids = _sequences(folder / _plain(entry["file"]))
    return Tokens(ids) if kind == "tokens" else Outputs(ids)


def _sequences(file: Path) -> Sequences:
    try:
        tensors: dict[str, NDArray[Any]] = load_file(file)
        return Sequences(tensors["ids"].astype(np.int64), tensors["lengths"].astype(np.int64))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CorruptCheckpoint(f"{file.name} is not a file of ids and lengths", "record it again") from error


def _plain(name: Any) -> str:
    if not isinstance(name, str) or Path(name).name != name:
        raise CorruptCheckpoint(f"{INDEX} names a path", "only names inside the transcript's folder are followed")
    return name


def _index(folder: Path) -> dict[str, Any]:
    index = read_json(folder / INDEX)
    if index.get("milkglass_transcript") != VERSION:
        raise CorruptCheckpoint(f"{INDEX} is not of version {VERSION}", "use the milkglass that wrote it")
    return index


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    part = folder / f"{INDEX}.part"
    part.write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    part.rename(folder / INDEX)


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)
