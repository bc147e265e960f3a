"""Downloads a model's folder from a server, which could offer any file of any size.

Before the first byte is written, each name must be a checkpoint's, and the sizes must fit the model and the room on the
disk.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from milkglass.client.layout import MARKED, MARKER, TOKENIZER
from milkglass.client.obfuscate.upload_check import is_plain
from milkglass.client.remote.connection import Connection
from milkglass.client.remote.responses import is_count, is_text, rows
from milkglass.client.remote.strict_json import HINT
from milkglass.client.remote.transfer import receive, require_sum
from milkglass.errors import ModelError, RemoteError, UsageError
from milkglass.files import finish
from milkglass.progress import Stage

SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_CONFIG = 64 << 20  # bytes of a JSON file of a checkpoint
MAX_FILES = 2000  # of one model
SPARE = 256 << 20  # bytes that are left free on the disk
DISTRUST = "don't trust this model"


@final
@dataclass(frozen=True)
class OfferedFile:
    """A file that the server offers.

    Attributes:
        name: a plain name of a file of a checkpoint.
        bytes: the size, as the server says.
        sha256: in hex. None: the server does not say it.
    """

    name: str
    bytes: int
    sha256: str | None


def promised(entry: Mapping[str, Any]) -> OfferedFile:
    """Returns the file that a server offers. Raises RemoteError for a file that no checkpoint has."""
    name, size, digest = entry.get("name"), entry.get("bytes"), entry.get("sha256")
    if (
        not is_text(name)
        or not is_plain(name)
        or not name.endswith((".safetensors", ".json"))
        or TOKENIZER.fullmatch(name)
    ):
        raise RemoteError("the server lists a file that no checkpoint has", DISTRUST)
    if not is_count(size) or not (digest is None or (is_text(digest) and SHA256.fullmatch(digest))):
        raise RemoteError(f"the server describes {name} badly", HINT)
    if name.endswith(".json") and size > MAX_CONFIG:
        raise RemoteError(f"{name} would have {size} bytes, at most {MAX_CONFIG} are fetched", DISTRUST)
    return OfferedFile(name, size, digest)


def promised_model(answer: Mapping[str, Any]) -> list[OfferedFile]:
    """Returns the files of one model by name. Raises RemoteError if the list is invalid or has no config.json."""
    files = sorted((promised(entry) for entry in rows(answer)), key=lambda file: file.name)
    names = {file.name for file in files}
    if len(names) < len(files) or len(files) > MAX_FILES:
        raise RemoteError(f"the server lists a file twice, or more than {MAX_FILES} files", DISTRUST)
    if "config.json" not in names:
        raise RemoteError("the server's list of the model's files lacks config.json", "try again later")
    return files


def require_plausible(files: list[OfferedFile], largest: int | None) -> None:
    """Raises RemoteError for files that are larger than the model can be.

    Args:
        largest: the most bytes of the model. None: it is not known.
    """
    total = sum(file.bytes for file in files)
    if largest is not None and total > largest:
        raise RemoteError(
            f"the server offers {total / 1e6:,.0f} MB, and this model has at most {largest / 1e6:,.0f} MB",
            "nothing was fetched; " + DISTRUST,
        )


def require_room(files: list[OfferedFile], staging: Path) -> None:
    """Raises UsageError if the disk has too little room for the rest."""
    there = sum(path.stat().st_size for path in staging.iterdir()) if staging.is_dir() else 0
    needed = sum(file.bytes for file in files) - there
    free = shutil.disk_usage(staging.parent).free
    if needed + SPARE > free:
        raise UsageError(
            f"the model takes {needed / 1e6:,.0f} MB more, and the disk has {free / 1e6:,.0f} MB free",
            f"free some, {SPARE >> 20} MiB are to be left; or give a place on another disk",
        )


def fetch(
    connection: Connection, route: str, model: str, out: Path, progress: Stage, largest: int | None = None
) -> Path:
    """Downloads the files that `route` lists to `out`; see Remote.fetch_model."""
    from milkglass.models.checkpoint import Checkpoint

    if out.exists():
        raise UsageError(f"{out} exists already", "give a new folder, or remove that one first")
    files = promised_model(connection.json("GET", route))
    require_plausible(files, largest)
    what = [[file.name, file.bytes, file.sha256] for file in files]
    bound = hashlib.sha256(json.dumps([connection.url, model, what]).encode())
    staging = out.with_name(f".{out.name}.{bound.hexdigest()[:16]}.fetching")  # nothing of another model gets in
    out.parent.mkdir(parents=True, exist_ok=True)
    require_room(files, staging)
    staging.mkdir(exist_ok=True)
    for stray in {path.name for path in staging.iterdir()} - {file.name for file in files}:
        (staging / stray).unlink()
    for file in files:
        _fetch_one(connection, f"{route}/{file.name}", staging / file.name, file, progress)
    try:
        Checkpoint.open(staging)
    except ModelError:
        shutil.rmtree(staging)  # whole, and no model: there is nothing to go on from
        raise
    (staging / MARKER).write_text(json.dumps(MARKED) + "\n", "utf-8")
    finish(staging, out)
    others = f".{glob.escape(out.name)}.{'[0-9a-f]' * 16}.fetching"  # begun for this place, of no use now
    for abandoned in out.parent.glob(others):
        shutil.rmtree(abandoned, ignore_errors=True)
    return out


def _fetch_one(connection: Connection, route: str, target: Path, file: OfferedFile, progress: Stage) -> None:
    advance = progress(f"fetch {file.name}", file.bytes)
    with contextlib.suppress(FileNotFoundError):
        advance(min(file.bytes, target.stat().st_size))
    receive(connection, route, target, file.bytes, advance)
    if file.sha256:
        require_sum(target, file.sha256, progress(f"check {file.name}", file.bytes))
