"""What may leave this machine: a look at a folder and at names before anything is sent.

What this module does not know: whether the tables are in fact scrambled. `milkglass verify` can tell, with the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from milkglass.client.folder import MARKER, TOKENIZER
from milkglass.client.specials import LABELS, NAMES, WORD, tells
from milkglass.errors import ModelNotFound, UsageError

INDEX, DELTA_CONFIG = "model.safetensors.index.json", "delta.json"
CONFIGS = ("config.json", "generation_config.json")
COUNTED = ("total_size", "total_parameters")  # in an index: bytes, and what transformers writes beside them
TENSOR, SHARD = re.compile(r"[A-Za-z0-9_.-]{1,256}"), re.compile(r"[A-Za-z0-9_.-]{1,128}\.safetensors")
NUMBERED = re.compile(r"LABEL_[0-9]{1,5}")
ORIGINS = "upload a folder that `milkglass obfuscate` or `--fetch` wrote, never the original"
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def require_scrambled(folder: Path) -> list[Path]:
    """The weight files of a folder that may leave this machine. Raises UsageError for one that may not.

    It sees a tokenizer and the names that scrambling removes; whether the tables are in fact scrambled, only
    `milkglass verify` can tell, with the key.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json", "give the folder that `milkglass obfuscate` wrote")
    strays = sorted(p.name for p in folder.iterdir() if TOKENIZER.fullmatch(p.name))
    if strays:
        raise UsageError(
            f"{folder.name} holds a tokenizer ({strays[0]}): the server could read every id with it", ORIGINS
        )
    for file in (*CONFIGS, INDEX):
        content = json_file(folder / file)
        if content is not None and (name := next(_telling(file, content), None)):
            shown = name if WORD.fullmatch(name) else "notes"
            raise UsageError(f"{file} of {folder.name} holds {shown}, which no scrambled model has", ORIGINS)
    if not (folder / MARKER).is_file():
        raise UsageError(f"{folder.name} has no {MARKER}, so nothing says that it was scrambled", ORIGINS)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelNotFound(f"{folder} holds no safetensors file", "give the folder that `milkglass obfuscate` wrote")
    return weights


def _telling(file: str, content: Mapping[str, Any]) -> Iterator[str]:
    """The entries of a folder's JSON file that scrambling would have taken out or numbered, nested ones too."""
    yield from _index_telling(content) if file == INDEX else _config_telling(content)


def _config_telling(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if name in NAMES or name in LABELS:
            if value and not (name in LABELS and _numbered(name, value)):
                yield name
        elif tells(name, value):
            yield name
        elif isinstance(value, Mapping):
            yield from _config_telling(value)


def _index_telling(index: Mapping[str, Any]) -> Iterator[str]:
    """An index says where tensors lie, and how large they are together."""
    yield from (name for name in index if name not in ("metadata", "weight_map"))
    sizes, places = index.get("metadata") or {}, index.get("weight_map")
    if not isinstance(sizes, Mapping) or not isinstance(places, Mapping):
        yield "metadata"
        return
    yield from (n for n, size in sizes.items() if n not in COUNTED or not isinstance(size, int | float))
    yield from (str(n) for n, file in places.items() if not (TENSOR.fullmatch(n) and SHARD.fullmatch(str(file))))


def _numbered(name: str, value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    numbers, texts = (value, value.values()) if name == "id2label" else (value.values(), value)
    return all(str(one).isdecimal() for one in numbers) and all(NUMBERED.fullmatch(str(text)) for text in texts)


def json_file(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UsageError(f"{path.name} is not JSON", "make the folder again with `milkglass obfuscate`") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path.name} is not a JSON object", "make the folder again with `milkglass obfuscate`")
    return value


def plain_name(name: str) -> str:
    """An id that can stand in a URL's path."""
    if not PLAIN_NAME.fullmatch(name) or ".." in name:
        raise UsageError("an id has other characters than A-Z a-z 0-9 . _ -", "give it as the server printed it")
    return name
