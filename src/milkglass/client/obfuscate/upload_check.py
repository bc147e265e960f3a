"""Checks what may leave this machine of a model's folder: every file and every name, before anything is sent.

It does not check whether the tables are scrambled. `milkglass verify` does, with the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from milkglass.client import upload_names
from milkglass.client.model_config import PRIVATE_ENTRIES, WORD_PATTERN, has_private_words
from milkglass.client.upload_names import MARKER, TOKENIZER_FILE_PATTERN
from milkglass.errors import ModelNotFound, UsageError
from milkglass.models.config_entries import LABEL_ENTRIES
from milkglass.models.file_names import (
    CONFIG,
    DELTA_CONFIG,
    DELTA_FORMAT,
    DELTA_WEIGHTS,
    GENERATION_CONFIG,
    INDEX,
    WEIGHTS,
)
from milkglass.models.safetensors_header import has_notes, read_header

CONFIG_FILES = (CONFIG, GENERATION_CONFIG)
SIZE_ENTRIES = ("total_size", "total_parameters")  # the sizes that transformers writes in an index
TENSOR_NAME, SHARD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}"), re.compile(r"[A-Za-z0-9_.-]{1,128}\.safetensors")
NUMBERED_LABEL = re.compile(r"LABEL_[0-9]{1,5}")
ORIGINS_HINT = "upload a folder that `milkglass obfuscate` or `--fetch` wrote, never the original"
USUAL_SHARD_NAME = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
DIGEST_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")


@final
@dataclass(frozen=True)
class OutgoingModel:
    """Describes all that is sent of a folder or delta.

    Attributes:
        folder: the scrambled folder or delta.
        weights: the files of weights, by the names under which they are sent.
    """

    folder: Path
    weights: Mapping[str, Path]

    @classmethod
    def of(cls, folder: Path) -> OutgoingModel:
        """Checks a folder. Raises UsageError if it may not leave, ModelError if no server would take it."""
        files = require_scrambled(folder)
        require_sound(folder)
        if (folder / INDEX).is_file() and not all(USUAL_SHARD_NAME.fullmatch(file.name) for file in files):
            names = (f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1))
            return cls(folder, dict(zip(names, files, strict=True)))
        return cls(folder, {file.name: file for file in files})

    def documents(self) -> dict[str, dict[str, Any] | None]:
        """Returns config, generation_config, index and delta as they are sent. None: there is no such file."""
        index = read_json_object(self.folder / INDEX) if not (self.folder / DELTA_CONFIG).is_file() else None
        if index is not None:
            outgoing_name = {file.name: name for name, file in self.weights.items()}
            index["weight_map"] = {tensor: outgoing_name[file] for tensor, file in index["weight_map"].items()}
        return {
            "config": read_json_object(self.folder / CONFIG),
            "generation_config": read_json_object(self.folder / GENERATION_CONFIG),
            "index": index,
            "delta": read_json_object(self.folder / DELTA_CONFIG),
        }


def require_scrambled(folder: Path) -> list[Path]:
    """Returns the weight files of a folder that may leave this machine, sorted by name.

    It finds tokenizers, names that scrambling removes, files that do not belong to the model, and notes and names in
    the headers of weights.

    Raises:
        UsageError: the folder may not leave.
        ModelNotFound: it has no config, or lacks weights.
        CorruptCheckpoint: the weights are not sound safetensors.
    """
    if not (folder / CONFIG).is_file():
        raise ModelNotFound(f"{folder} has no config.json", "give the folder that `milkglass obfuscate` wrote")
    strays = sorted(path.name for path in folder.iterdir() if TOKENIZER_FILE_PATTERN.fullmatch(path.name))
    if strays:
        raise UsageError(
            f"{folder.name} holds a tokenizer ({strays[0]}): the server could read every id with it", ORIGINS_HINT
        )
    for file in (*CONFIG_FILES, INDEX, DELTA_CONFIG):
        content = read_json_object(folder / file)
        if content is not None and (
            name := next(REVEALING_ENTRIES.get(file, _revealing_config_entries)(content), None)
        ):
            shown_name = name if WORD_PATTERN.fullmatch(name) else "notes"
            raise UsageError(f"{file} of {folder.name} holds {shown_name}, which no scrambled model has", ORIGINS_HINT)
    if not (folder / MARKER).is_file():
        raise UsageError(f"{folder.name} has no {MARKER}, so nothing says that it was scrambled", ORIGINS_HINT)
    tensors_by_file = _tensors_by_file(folder)
    if not tensors_by_file:
        raise ModelNotFound(f"{INDEX} of {folder.name} names no weights", ORIGINS_HINT)
    if absent := sorted(name for name in tensors_by_file if not (folder / name).is_file()):
        raise ModelNotFound(f"{folder} lacks {absent[0]}", "give the folder that `milkglass obfuscate` wrote")
    if unlisted := sorted(path.name for path in folder.glob("*.safetensors") if path.name not in tensors_by_file):
        raise UsageError(
            f"{folder.name} holds {unlisted[0]}, which is not a file of this model",
            "nothing was sent; move it away, or make the folder again with `milkglass obfuscate`",
        )
    for name, tensors in tensors_by_file.items():
        _require_plain_weights(folder / name, tensors)
    return [folder / name for name in sorted(tensors_by_file)]


def require_sound(folder: Path) -> None:
    """Checks a model as a server does, before it is sent. Raises ModelError if it is not sound."""
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.models.soundness import facts_of, require_sound_tables

    config = read_json_object(folder / CONFIG) or {}
    if (folder / DELTA_CONFIG).is_file():
        tables = read_header(folder / DELTA_WEIGHTS)
        require_sound_tables(config, read_json_object(folder / GENERATION_CONFIG), tables)
        return
    facts_of(Checkpoint.open(folder))


def unsent_names(folder: Path) -> list[str]:
    """Returns the sorted names of a folder's files that are not sent: neither weights nor configs of the model."""
    sent = {*CONFIG_FILES, INDEX, DELTA_CONFIG, MARKER, *_tensors_by_file(folder)}
    return sorted(path.name for path in folder.iterdir() if path.name not in sent)


def _tensors_by_file(folder: Path) -> dict[str, set[str] | None]:
    """Returns the weight files that the folder's JSON names, and each one's tensors, or None if it names none."""
    if (folder / DELTA_CONFIG).is_file():
        return {DELTA_WEIGHTS: None}
    index = read_json_object(folder / INDEX)
    if index is None:
        return {WEIGHTS: None}
    tensors_by_file: dict[str, set[str] | None] = {}
    for tensor, file in index["weight_map"].items():
        tensors = tensors_by_file.setdefault(file, set())
        assert tensors is not None
        tensors.add(tensor)
    return tensors_by_file


def _require_plain_weights(file: Path, tensors: set[str] | None) -> None:
    """Raises UsageError for a file whose header has anything but tensors of the model. No tensor is read."""
    header = read_header(file)
    hint = "nothing was sent; make the folder again with `milkglass obfuscate`"
    if has_notes(file):
        raise UsageError(f"{file.name} holds metadata, which could say anything", hint)
    if unknown := upload_names.unknown_tensor_names(header):
        raise UsageError(
            f"{file.name} holds {len(unknown)} tensors of names that no supported model has, the first is "
            f"{unknown[0]!r}",
            hint,
        )
    if tensors is not None and set(header) != tensors:
        tensor = min(set(header) ^ tensors)
        raise UsageError(f"{file.name} and {INDEX} disagree about the tensor {tensor!r}", hint)


def _revealing_delta_entries(delta: Mapping[str, Any]) -> Iterator[str]:
    """Yields the entries of a delta's description that scrambling does not write."""
    yield from (name for name in delta if name not in ("format", "base"))
    if delta.get("format") != DELTA_FORMAT:
        yield "format"
    if not DIGEST_PATTERN.fullmatch(str(delta.get("base"))):
        yield "base"


def _revealing_config_entries(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the entries of a config, nested ones too, that scrambling would have removed or numbered."""
    for name, entry in config.items():
        if name in PRIVATE_ENTRIES or name in LABEL_ENTRIES:
            if entry and not (name in LABEL_ENTRIES and _is_numbered(name, entry)):
                yield name
        elif has_private_words(name, entry):
            yield name
        elif isinstance(entry, Mapping):
            yield from _revealing_config_entries(entry)


def _revealing_index_entries(index: Mapping[str, Any]) -> Iterator[str]:
    """Yields the unexpected entries of an index, which has only the tensors' files and their size in all."""
    yield from (name for name in index if name not in ("metadata", "weight_map"))
    sizes, tensor_files = index.get("metadata") or {}, index.get("weight_map")
    if not isinstance(sizes, Mapping) or not isinstance(tensor_files, Mapping):
        yield "metadata"
        return
    yield from (name for name, size in sizes.items() if name not in SIZE_ENTRIES or not isinstance(size, int | float))
    yield from (
        str(name)
        for name, file in tensor_files.items()
        if not (TENSOR_NAME.fullmatch(name) and SHARD_NAME.fullmatch(str(file)))
    )


REVEALING_ENTRIES = {
    DELTA_CONFIG: _revealing_delta_entries,
    INDEX: _revealing_index_entries,
}  # of each other file: _revealing_config_entries


def _is_numbered(name: str, labels: Any) -> bool:
    """Returns whether `labels`, the entry `id2label` or `label2id`, has numbered names such as LABEL_0 alone."""
    if not isinstance(labels, Mapping):
        return False
    numbers, texts = (labels, labels.values()) if name == "id2label" else (labels.values(), labels)
    return all(str(number).isdecimal() for number in numbers) and all(
        NUMBERED_LABEL.fullmatch(str(text)) for text in texts
    )


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file, or None without a file. Raises UsageError for a file with anything else."""
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UsageError(f"{path.name} is not JSON", "make the folder again with `milkglass obfuscate`") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path.name} is not a JSON object", "make the folder again with `milkglass obfuscate`")
    return document
