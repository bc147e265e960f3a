"""What may leave this machine: a look at a folder and at names before anything is sent.

What this module does not know: whether the tables are in fact scrambled. `milkglass verify` can tell, with the key.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from milkglass.errors import ModelNotFound, UsageError

INDEX, DELTA_CONFIG, MARKER = "model.safetensors.index.json", "delta.json", "milkglass.json"
TOKENIZER = re.compile(
    r"(tokenizer.*|.*vocab.*|merges.*|special_tokens_map.*|added_tokens.*|chat_template.*|.*\.model|.*\.tiktoken)", re.I
)
NAMES = ("id2label", "label2id", "tokenizer_class", "_name_or_path")  # a scrambled config has none of them
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
            f"{folder.name} holds a tokenizer ({strays[0]}): the server could read every id with it",
            "upload the folder that `milkglass obfuscate` wrote, never the original",
        )
    names = [name for name in NAMES if name in (json_file(folder / "config.json") or {})]
    if names:
        raise UsageError(
            f"the config of {folder.name} holds {names[0]}, so the model is not scrambled",
            "upload the folder that `milkglass obfuscate` wrote, never the original",
        )
    if not (folder / MARKER).is_file():
        raise UsageError(
            f"{folder.name} has no {MARKER}, so nothing says that it was scrambled",
            "upload the folder that `milkglass obfuscate` wrote, never the original",
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelNotFound(f"{folder} holds no safetensors file", "give the folder that `milkglass obfuscate` wrote")
    return weights


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
