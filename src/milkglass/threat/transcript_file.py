"""Writes and reads transcripts: safetensors files and `transcript.jsonl`, which a server or a client extends.

    transcript.jsonl     a line {"milkglass_transcript": 1, "size": n, "key_id": ...}, then a line an observation
    tokens-00003.safetensors   ids (total,) and lengths (texts,), int32
    outputs-00004.safetensors  ids and lengths of answers, and prompt_ids and prompt_lengths of their prompts
    weights-00001/       a checkpoint's config and tensors (links, where the file system allows), no tokenizer

A transcript that a server made may hold anything, so all that is read is checked, and a fault raises CorruptCheckpoint.
It holds scrambled ids and no key, but all that an attacker sees: the folder has mode 0700.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from milkglass import files
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.safetensors_header import read_header
from milkglass.models.view import Model
from milkglass.sequences import Sequences
from milkglass.threat.observations import Observation, Outputs, Tokens, Transcript, Weights

INDEX_FILE = "transcript.jsonl"
VERSION = 1
MAX_VOCAB_SIZE = 2**31 - 1  # ids are 32 bits
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class TranscriptRecorder:
    """Adds observations to a transcript's folder, from any thread of one process.

    If the process is killed, the last observation may be cut off, but no earlier one.

    Args:
        folder: the transcript's folder.
        observation_count: how many observations the transcript has.
    """

    def __init__(self, folder: Path, observation_count: int) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._observation_count = observation_count

    @classmethod
    def open(cls, folder: Path, size: int, key_id: str | None = None) -> TranscriptRecorder:
        """Begins a transcript, or continues one.

        Args:
            folder: the transcript's folder.
            size: n', the number of scrambled ids.
            key_id: the public identifier of the key.

        Raises:
            UsageError: the folder holds something else, or a transcript of another vocabulary or key.
            CorruptCheckpoint: the transcript is damaged.
        """
        if (folder / INDEX_FILE).is_file():
            old_size, old_key_id, entries = _read_index(folder)
            if old_size != size:
                fault = f"{folder} is a transcript of {old_size} ids, this model has {size}"
                raise UsageError(fault, "give a new folder")
            if old_key_id != key_id:
                raise UsageError(f"{folder} is a transcript of another key", "give a new folder")
            _write_index(folder, [_header(size, key_id), *entries])  # without an unfinished last line
            return cls(folder, len(entries))
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not a transcript and is not empty", "give a new folder")
        files.make_private_dir(folder)
        _write_index(folder, [_header(size, key_id)])
        return cls(folder, 0)

    def add_tokens(self, ids: Sequences, purpose: str) -> None:
        """Adds ids that the client sent. `purpose` is "train" or "infer"."""
        self._write_ids("tokens", ids, {"purpose": purpose})

    def add_outputs(self, ids: Sequences, prompts: Sequences) -> None:
        """Adds ids that the server generated, and the prompt of each answer."""
        tensors = {"prompt_ids": prompts.ids.astype(np.int32), "prompt_lengths": prompts.lengths.astype(np.int32)}
        self._write_ids("outputs", ids, {}, tensors)

    def add_weights(self, model_folder: Path, tuned: bool) -> None:
        """Adds a checkpoint's config and tensor files, by hard links if the file system allows these.

        Args:
            model_folder: the checkpoint's folder.
            tuned: whether the model was fine-tuned; otherwise it is as it was uploaded.
        """
        with self._lock:
            target = self._folder / f"weights-{self._observation_count:05}"
            shutil.rmtree(target, ignore_errors=True)  # a killed process may have left it
            files.make_private_dir(target)
            tensor_files = Checkpoint.open(model_folder).files
            for file in [
                model_folder / "config.json", *tensor_files, model_folder / "model.safetensors.index.json"
            ]:  # fmt: skip
                if file.is_file():
                    _link_or_copy(file, target / file.name)
            self._append_entry({"kind": "weights", "folder": target.name, "tuned": tuned})

    def _write_ids(
        self, kind: str, ids: Sequences, fields: dict[str, Any], tensors: dict[str, NDArray[np.int32]] | None = None
    ) -> None:
        """Writes ids, and more tensors if there are any, into a new file, and adds it to the index with `fields`."""
        tensors = {"ids": ids.ids.astype(np.int32), "lengths": ids.lengths.astype(np.int32), **(tensors or {})}
        with self._lock:
            name = f"{kind}-{self._observation_count:05}.safetensors"
            with files.atomic_path(self._folder / name) as path:
                save_file(tensors, path)
            self._append_entry({"kind": kind, "file": name, **fields})

    def _append_entry(self, entry: dict[str, Any]) -> None:
        """Adds a line to the index."""
        with (self._folder / INDEX_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._observation_count += 1


def load(folder: Path) -> Transcript:
    """Reads the transcript in a folder. Raises UsageError if there is none, CorruptCheckpoint if it is damaged."""
    if not (folder / INDEX_FILE).is_file():
        raise UsageError(f"{folder} has no {INDEX_FILE}", "give a folder that `milkglass serve --record` wrote")
    size, key_id, entries = _read_index(folder)
    return Transcript(tuple(_read_observation(folder, entry, size) for entry in entries), size, key_id)


def digest(folder: Path) -> str:
    """Returns the SHA-256, in hex, of all files of a transcript that an attack reads."""
    sha256 = hashlib.sha256((folder / INDEX_FILE).read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("weights-*/*")]):
        with path.open("rb") as file:
            sha256.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return sha256.hexdigest()


def _read_observation(folder: Path, entry: dict[str, Any], size: int) -> Observation:
    """Reads the observation of an entry of the index. Raises CorruptCheckpoint if either is damaged."""
    kind = entry.get("kind")
    if kind == "weights":
        tuned = entry.get("tuned")
        if not isinstance(tuned, bool):
            raise CorruptCheckpoint(f"{INDEX_FILE} does not say whether weights are tuned", "record it again")
        return Weights(Model.open(_path_inside(folder, entry.get("folder"))), tuned)
    if kind not in ("tokens", "outputs"):
        raise CorruptCheckpoint(
            f"{INDEX_FILE} lists an observation of another kind than tokens, outputs and weights", "record it again"
        )
    file = _path_inside(folder, entry.get("file"))
    if kind == "outputs":
        return Outputs(_read_sequences(file, size), _read_sequences(file, size, "prompt_"))
    purpose = entry.get("purpose", "")
    if not isinstance(purpose, str):
        raise CorruptCheckpoint(f"{INDEX_FILE} gives tokens a purpose that is not a string", "record it again")
    return Tokens(_read_sequences(file, size), purpose)


def _read_sequences(file: Path, size: int, prefix: str = "") -> Sequences:
    """Reads the sequences of a file.

    Args:
        file: the safetensors file.
        size: n'; ids must lie from 0 to n' - 1.
        prefix: the beginning of the names of the two tensors.

    Raises:
        CorruptCheckpoint: the file is missing, or holds anything else.
    """
    names = (f"{prefix}ids", f"{prefix}lengths")
    if file.is_symlink() or not file.is_file():
        raise CorruptCheckpoint(f"{file.name} is missing or is not a file", "record it again")
    tensors_in_file = read_header(file)
    for name in names:
        if name not in tensors_in_file or tensors_in_file[name].dtype != "I32" or len(tensors_in_file[name].shape) != 1:
            raise CorruptCheckpoint(f"{file.name} has no {name}, a row of 32-bit integers", "record it again")
    try:
        tensors: dict[str, NDArray[Any]] = load_file(file)
        ids, lengths = (tensors[name].astype(np.int64) for name in names)
        sequences = Sequences(ids, lengths)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CorruptCheckpoint(f"{file.name} is not a file of ids and lengths", "record it again") from error
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        raise CorruptCheckpoint(f"{file.name} holds an id outside 0 to {size - 1}", "record it again")
    return sequences


def _path_inside(folder: Path, name: Any) -> Path:
    """Returns the path of a name in the transcript's folder. Raises CorruptCheckpoint for anything but a plain name."""
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        raise CorruptCheckpoint(f"{INDEX_FILE} names a path", "only names inside the transcript's folder are followed")
    return folder / name


def _header(size: int, key_id: str | None) -> dict[str, Any]:
    """Returns the index's first line."""
    return {"milkglass_transcript": VERSION, "size": size, "key_id": key_id}


def _read_index(folder: Path) -> tuple[int, str | None, list[dict[str, Any]]]:
    """Reads the index: the vocabulary's size, the key's identifier and the observations' entries.

    An unfinished last line is left out.

    Raises:
        CorruptCheckpoint: the index is damaged, or of another version.
    """
    try:
        whole_lines = (folder / INDEX_FILE).read_text("utf-8").split("\n")[:-1]
        header, *entries = (json.loads(line) for line in whole_lines)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise CorruptCheckpoint(f"{INDEX_FILE} is not a list of observations", "record it again") from error
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in entries):
        raise CorruptCheckpoint(f"{INDEX_FILE} is not a list of observations", "record it again")
    if type(version := header.get("milkglass_transcript")) is not int or version != VERSION:
        raise CorruptCheckpoint(f"{INDEX_FILE} is not of version {VERSION}", "use the milkglass that wrote it")
    size, key_id = header.get("size"), header.get("key_id")
    if type(size) is not int or not 1 <= size <= MAX_VOCAB_SIZE:
        raise CorruptCheckpoint(
            f"{INDEX_FILE} does not name a vocabulary of 1 to {MAX_VOCAB_SIZE} ids", "record it again"
        )
    if "key_id" not in header or not (key_id is None or isinstance(key_id, str)):
        raise CorruptCheckpoint(f"{INDEX_FILE} names a key's identifier that is not a string", "record it again")
    return size, key_id, entries


def _write_index(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Writes the index, in place of an earlier one."""
    files.write(folder / INDEX_FILE, "".join(json.dumps(line) + "\n" for line in lines))


def _link_or_copy(file: Path, target: Path) -> None:
    """Makes a hard link to a file, or a copy where that is not possible."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
