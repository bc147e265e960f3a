"""A transcript on disk: safetensors files and `transcript.jsonl`, to which a server or a client adds as it goes.

    transcript.jsonl     a line {"milkglass_transcript": 1, "size": n, "key_id": ...}, then a line an observation
    tokens-00003.safetensors   ids (total,) and lengths (b,), int32; of answers, prompt_ids and prompt_lengths as well
    weights-00001/       a checkpoint's config and tensors (links, where the file system allows), no tokenizer

What this module does not know: the key. What it writes holds scrambled ids only, but an attacker's whole view: it is
for the owner's eyes, in a folder of mode 0700.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from milkglass.checkpoint import Checkpoint
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.modelview import Model
from milkglass.sequences import Sequences
from milkglass.threat import Observation, Outputs, Tokens, Transcript, Weights

INDEX = "transcript.jsonl"
VERSION = 1


class Recorder:
    """Adds observations to a transcript's folder, from any thread of one process. What a kill cuts off is the last
    observation, never an earlier one."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count, self._lock = folder, count, threading.Lock()

    @classmethod
    def open(cls, folder: Path, size: int, key_id: str | None = None) -> Recorder:
        """Begin, or go on. Raises UsageError where the folder holds something else, another vocabulary or key."""
        if (folder / INDEX).is_file():
            known, key, entries = _index(folder)
            if known != size:
                raise UsageError(f"{folder} is a transcript of {known} ids, this model has {size}", "give a new folder")
            if key != key_id:
                raise UsageError(f"{folder} is a transcript of another key", "give a new folder")
            _write(folder / INDEX, [_header(size, key_id), *entries])  # without a line that a kill cut off
            return cls(folder, len(entries))
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} is no transcript and is not empty", "give a new folder")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / INDEX, [_header(size, key_id)])
        return cls(folder, 0)

    def tokens(self, ids: Sequences, purpose: str) -> None:
        self._ids("tokens", ids, {"purpose": purpose})

    def outputs(self, ids: Sequences, prompts: Sequences) -> None:
        """Answers, each with what it followed."""
        more = {"prompt_ids": prompts.ids.astype(np.int32), "prompt_lengths": prompts.lengths.astype(np.int32)}
        self._ids("outputs", ids, {}, more)

    def weights(self, model: Path, tuned: bool) -> None:
        """A checkpoint's config and tensor files. They are linked, not copied, where that is possible."""
        with self._lock:
            target = self._folder / f"weights-{self._count:05}"
            shutil.rmtree(target, ignore_errors=True)  # of an observation that a kill cut off
            target.mkdir()
            for file in [model / "config.json", *Checkpoint.open(model).files, model / "model.safetensors.index.json"]:
                if file.is_file():
                    _link(file, target / file.name)
            self._add({"kind": "weights", "folder": target.name, "tuned": tuned})

    def _ids(
        self, kind: str, ids: Sequences, more: dict[str, Any], tensors: dict[str, NDArray[np.int32]] | None = None
    ) -> None:
        tensors = {"ids": ids.ids.astype(np.int32), "lengths": ids.lengths.astype(np.int32), **(tensors or {})}
        with self._lock:
            name = f"{kind}-{self._count:05}.safetensors"
            save_file(tensors, self._folder / name)
            self._add({"kind": kind, "file": name, **more})

    def _add(self, entry: dict[str, Any]) -> None:
        with (self._folder / INDEX).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._count += 1


def load(folder: Path) -> Transcript:
    """Raises UsageError or CorruptCheckpoint."""
    if not (folder / INDEX).is_file():
        raise UsageError(f"{folder} has no {INDEX}", "give a folder that `milkglass serve --record` wrote")
    size, key_id, entries = _index(folder)
    return Transcript(tuple(_observation(folder, one) for one in entries), size, key_id)


def digest(folder: Path) -> str:
    """Of all that an attack reads from it: two recordings of equal shape differ."""
    whole = hashlib.sha256((folder / INDEX).read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("weights-*/*")]):
        with path.open("rb") as file:
            whole.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _observation(folder: Path, entry: dict[str, Any]) -> Observation:
    kind = entry.get("kind")
    if kind == "weights":
        return Weights(Model.open(folder / _plain(entry["folder"])), bool(entry["tuned"]))
    if kind not in ("tokens", "outputs"):
        raise CorruptCheckpoint(
            f"{INDEX} lists an observation of kind {kind!r}", "tokens, outputs and weights are known"
        )
    file = folder / _plain(entry["file"])
    if kind == "tokens":
        return Tokens(_sequences(file), str(entry.get("purpose", "")))
    return Outputs(_sequences(file), _sequences(file, "prompt_"))


def _sequences(file: Path, of: str = "") -> Sequences:
    try:
        tensors: dict[str, NDArray[Any]] = load_file(file)
        return Sequences(tensors[f"{of}ids"].astype(np.int64), tensors[f"{of}lengths"].astype(np.int64))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CorruptCheckpoint(f"{file.name} is not a file of ids and lengths", "record it again") from error


def _plain(name: Any) -> str:
    if not isinstance(name, str) or Path(name).name != name:
        raise CorruptCheckpoint(f"{INDEX} names a path", "only names inside the transcript's folder are followed")
    return name


def _header(size: int, key_id: str | None) -> dict[str, Any]:
    return {"milkglass_transcript": VERSION, "size": size, "key_id": key_id}


def _index(folder: Path) -> tuple[int, str | None, list[dict[str, Any]]]:
    """The vocabulary's size, the key's identifier and the observations; a last line without its end is not one yet."""
    whole = (folder / INDEX).read_text("utf-8").split("\n")[:-1]
    try:
        header, *entries = (json.loads(line) for line in whole)
        if header["milkglass_transcript"] == VERSION and all(isinstance(one, dict) for one in entries):
            return int(header["size"]), header["key_id"], entries
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{INDEX} is not a list of observations", "record it again") from error
    raise CorruptCheckpoint(f"{INDEX} is not of version {VERSION}", "use the milkglass that wrote it")


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    part.rename(path)


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)
