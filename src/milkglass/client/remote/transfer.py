"""Sends and receives files in pieces that resume after a kill of either side, and downloads a model's folder.

The id of an unfinished upload is stored in the cache folder, in a file named by a digest of address, content and
purpose. A client that was killed finds the upload by it. Before the first byte of a download is written, each name must
be a checkpoint's, and the sizes must fit the model and the space on the disk: a server could offer any file of any
size.
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

from milkglass import files
from milkglass.client.plain_names import is_plain
from milkglass.client.remote.connection import Connection
from milkglass.client.remote.responses import FILE_SHAPE, is_count, is_text, records_of, response_count, response_id
from milkglass.client.remote.strict_json import SERVER_HINT
from milkglass.client.upload_names import MARKER, MARKER_CONTENT, TOKENIZER_FILE_PATTERN
from milkglass.errors import ModelError, RemoteError, Unreachable, UsageError
from milkglass.files import rename_into_place
from milkglass.models.file_names import CONFIG
from milkglass.models.resolve import cache_folder
from milkglass.progress import Progress, Stage, no_progress

CHUNK_BYTES = 8 << 20  # bytes of a request, unless the server asks for less
MIN_CHUNK_BYTES = 512  # less would take millions of requests
CLOSED_STATUSES = (404, 409, 410)  # answers about an upload that takes no more: it is gone, being completed, or done
MIN_RECEIVED_BYTES = 64 << 10  # a download must receive this many bytes in each RECEIVE_SECONDS
RECEIVE_SECONDS = 120.0
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
MAX_JSON_BYTES = 64 << 20  # bytes of a JSON file of a checkpoint
MAX_FILES = 2000  # files of one model
SPARE_BYTES = 256 << 20  # bytes that are left free on the disk
DISTRUST_HINT = "don't trust this model"


def upload_file(
    connection: Connection, path: Path, digest: str, purpose: str, name: str, progress: Progress = no_progress
) -> str:
    """Uploads a file or its missing rest, unless the server has it already, and returns the server's id of it.

    Args:
        connection: the server.
        path: the file.
        digest: the file's SHA-256 in hex.
        purpose: what the server keeps it for, such as "model".
        name: the file's name at the server.
        progress: receives how many more bytes the server has: at first what it has already, then after each chunk.

    Raises:
        Unreachable: the server does not answer. Another call goes on where this one stopped.
        RemoteError: the server refuses the file, or asks for too small chunks.
    """
    size = path.stat().st_size
    id_file = _id_file(connection.url, digest, purpose)
    if (file_id := _existing_file(connection, digest, purpose)) is not None:
        progress(size)
        id_file.unlink(missing_ok=True)
        return file_id
    upload = _unfinished_upload(connection, id_file)
    if upload is None:
        announcement = {"filename": name, "bytes": size, "sha256": digest, "purpose": purpose}
        upload = connection.json(
            "POST", "/v1/uploads", announcement, may_repeat=True
        )  # a lost answer leaves an empty upload
        files.make_private_dir(id_file.parent)
        files.write_json(id_file, {"id": response_id(upload)}, indent=None)
    route, offset = f"/v1/uploads/{response_id(upload)}", response_count(upload, "received")
    chunk_bytes = min(CHUNK_BYTES, response_count(upload, "chunk_bytes")) if upload.get("chunk_bytes") else CHUNK_BYTES
    if chunk_bytes < MIN_CHUNK_BYTES:
        raise RemoteError(
            f"the server asks for chunks of {chunk_bytes} bytes, {MIN_CHUNK_BYTES} is the least", SERVER_HINT
        )
    progress(offset)
    _send_chunks(connection, path, size, route, offset, chunk_bytes, progress)
    try:
        file_id = _complete(connection, route, digest, purpose)
    except Unreachable:
        raise  # all of it is there: the next try only has to complete it
    except RemoteError:
        id_file.unlink(missing_ok=True)  # what arrived was not what was announced: the next try starts again
        raise
    id_file.unlink(missing_ok=True)
    return file_id


def _complete(connection: Connection, route: str, digest: str, purpose: str) -> str:
    """Completes the upload, and returns the id of the file.

    If an answer is lost, the next try finds the server busy with the upload, or done with it.
    """
    for attempt in range(connection.retry.max_attempts):
        try:
            return response_id(connection.json("POST", f"{route}/complete", may_repeat=True))
        except RemoteError as error:
            if error.status not in CLOSED_STATUSES:
                raise
            if (file_id := _existing_file(connection, digest, purpose)) is not None:
                return file_id
            if error.status != 409 or attempt == connection.retry.max_attempts - 1:
                raise
        connection.retry.wait(attempt)
    raise AssertionError("the last attempt returns or raises")


def _existing_file(connection: Connection, digest: str, purpose: str) -> str | None:
    """Returns the server's id of a file with this content, or None."""
    for file in FILE_SHAPE.records_of(connection.json("GET", "/v1/files")):
        if file.get("sha256") == digest and file.get("purpose") == purpose:
            return response_id(file)
    return None


def _send_chunks(
    connection: Connection, path: Path, size: int, route: str, offset: int, chunk_bytes: int, progress: Progress
) -> None:
    """Sends the rest of the file. If a chunk arrives and its answer is lost, the server says where to go on.

    Raises RemoteError if the file became shorter, or the server takes no more.
    """
    with path.open("rb") as file:
        short_chunk_count = 0  # chunks in a row that the server did not take whole
        while offset < size:
            file.seek(offset)
            chunk = file.read(chunk_bytes)
            if not chunk:
                raise RemoteError(f"{path.name} became shorter while it was sent", "is it being written?")
            headers = {
                "Upload-Offset": str(offset),
                "Chunk-SHA256": hashlib.sha256(chunk).hexdigest(),
                "Content-Type": "application/octet-stream",
            }
            try:
                new_offset = response_count(
                    connection.json("PUT", route, content=chunk, headers=headers, may_repeat=True), "received"
                )
            except RemoteError as error:
                if error.status != 409:
                    raise
                new_offset = response_count(connection.json("GET", route), "received")
            short_chunk_count = short_chunk_count + 1 if new_offset < offset + len(chunk) else 0
            if short_chunk_count > 3 or not 0 <= new_offset <= size:
                raise RemoteError(
                    f"the upload stays at {new_offset} of {size} bytes",
                    "the server may be out of space; try again later",
                )
            progress(new_offset - offset)
            offset = new_offset


def download_file(
    connection: Connection, route: str, target: Path, size: int, progress: Progress = no_progress
) -> None:
    """Downloads a file to `target`, going on from what is there.

    Args:
        route: the file's path on the server.
        size: the bytes of the whole file.
        progress: receives how many more bytes arrived; less than 0 if some must be sent again.

    Raises:
        RemoteError: the server sends more, which is not written.
        Unreachable: the server sends less than MIN_RECEIVED_BYTES bytes in RECEIVE_SECONDS seconds.
    """
    if size == 0:
        target.write_bytes(b"")
        return
    for attempt in range(connection.retry.max_attempts):
        received = target.stat().st_size if target.exists() else 0
        if received > size:
            target.unlink()
            received = 0
        if received < size:
            try:
                _download_rest(connection, route, target, received, size, progress)
            except Unreachable:
                if attempt == connection.retry.max_attempts - 1:
                    raise
                connection.retry.wait(attempt)
                continue
        if target.exists() and target.stat().st_size == size:
            break
    else:
        raise RemoteError(f"{target.name} does not arrive whole", "try again")


def require_sha256(target: Path, sha256: str, progress: Progress) -> None:
    """Deletes the file and raises RemoteError if its SHA-256 is another."""
    if files.sha256(target, progress) != sha256:
        target.unlink()
        raise RemoteError(f"{target.name} arrived damaged: its checksum is wrong", "try again")


def _download_rest(
    connection: Connection, route: str, target: Path, received: int, size: int, progress: Progress
) -> None:
    """Appends the rest of a file to `target`, which has the first `received` bytes of it.

    Raises RemoteError if the server sends more than `size` bytes.
    """
    headers = {"Range": f"bytes={received}-"} if received else {}
    with connection.stream("GET", route, headers=headers) as stream:
        if received and stream.response.status_code != 206:  # it sends everything again
            target.unlink()
            progress(-received)
            received = 0
        stream.deadline.extend(RECEIVE_SECONDS)
        next_extension = received + MIN_RECEIVED_BYTES
        with target.open("ab") as file:
            for chunk in stream.response.iter_raw():  # as they come: nothing waits in memory when it breaks off
                received += len(chunk)
                if received > size:
                    raise RemoteError(f"the server sends more than the {size} bytes of {target.name}")
                file.write(chunk)
                progress(len(chunk))
                if received >= next_extension:
                    stream.deadline.extend(RECEIVE_SECONDS)
                    next_extension = received + MIN_RECEIVED_BYTES


# --- the stored id of an unfinished upload ----------------------------------------------------------------------------
def _id_file(url: str, digest: str, purpose: str) -> Path:
    """Returns the file in the cache folder that has the id of this upload while it is unfinished."""
    name = hashlib.sha256(f"{url}\n{digest}\n{purpose}".encode()).hexdigest()
    return cache_folder() / "uploads" / f"{name}.json"


def _unfinished_upload(connection: Connection, id_file: Path) -> dict[str, Any] | None:
    """Returns the server's description of the upload whose id was stored. None: the server no longer has it."""
    try:
        upload_id = json.loads(id_file.read_text("utf-8"))["id"]
    except (OSError, ValueError, KeyError, TypeError):  # there is no file, or a crash cut it off: begin again
        return None
    if not isinstance(upload_id, str) or not upload_id.replace("-", "").replace("_", "").isalnum():
        return None
    try:
        state = connection.json("GET", f"/v1/uploads/{upload_id}")
    except RemoteError as error:
        if error.status in CLOSED_STATUSES:
            return None
        raise
    return {**state, "id": upload_id}


@final
@dataclass(frozen=True)
class OfferedFile:
    """Describes a file that the server offers.

    Attributes:
        name: a plain name, as a file of a checkpoint has.
        bytes: the file's size.
        sha256: the file's SHA-256 in hex. None: an older server does not say it.
    """

    name: str
    bytes: int
    sha256: str | None


def read_offered_file(entry: Mapping[str, Any]) -> OfferedFile:
    """Reads an entry of a server's list. Raises RemoteError for a file that no checkpoint has, or an invalid entry."""
    name, size, digest = entry.get("name"), entry.get("bytes"), entry.get("sha256")
    if (
        not is_text(name)
        or not is_plain(name)
        or not name.endswith((".safetensors", ".json"))
        or TOKENIZER_FILE_PATTERN.fullmatch(name)
    ):
        raise RemoteError("the server lists a file that no checkpoint has", DISTRUST_HINT)
    if not is_count(size) or not (digest is None or (is_text(digest) and SHA256_PATTERN.fullmatch(digest))):
        raise RemoteError(f"the server describes {name} badly", SERVER_HINT)
    if name.endswith(".json") and size > MAX_JSON_BYTES:
        raise RemoteError(f"{name} would have {size} bytes, at most {MAX_JSON_BYTES} are fetched", DISTRUST_HINT)
    return OfferedFile(name, size, digest)


def read_offered_files(answer: Mapping[str, Any]) -> list[OfferedFile]:
    """Returns the files of one model, by name. Raises RemoteError if the list is invalid or has no config.json."""
    offered = sorted((read_offered_file(entry) for entry in records_of(answer)), key=lambda file: file.name)
    names = {file.name for file in offered}
    if len(names) < len(offered) or len(offered) > MAX_FILES:
        raise RemoteError(f"the server lists a file twice, or more than {MAX_FILES} files", DISTRUST_HINT)
    if CONFIG not in names:
        raise RemoteError("the server's list of the model's files lacks config.json", "try again later")
    return offered


def require_possible_size(offered: list[OfferedFile], max_bytes: int | None) -> None:
    """Raises RemoteError if the files have more than `max_bytes` bytes together. None: the limit is not known."""
    total = sum(file.bytes for file in offered)
    if max_bytes is not None and total > max_bytes:
        raise RemoteError(
            f"the server offers {total / 1e6:,.0f} MB, and this model has at most {max_bytes / 1e6:,.0f} MB",
            "nothing was fetched; " + DISTRUST_HINT,
        )


def require_disk_space(offered: list[OfferedFile], staging: Path) -> None:
    """Raises UsageError if the disk lacks space for the files, less what `staging` already has."""
    present = sum(path.stat().st_size for path in staging.iterdir()) if staging.is_dir() else 0
    required = sum(file.bytes for file in offered) - present
    free = shutil.disk_usage(staging.parent).free
    if required + SPARE_BYTES > free:
        raise UsageError(
            f"the model takes {required / 1e6:,.0f} MB more, and the disk has {free / 1e6:,.0f} MB free",
            f"free some, {SPARE_BYTES >> 20} MiB are to be left; or give a place on another disk",
        )


def fetch_model_files(
    connection: Connection, route: str, model: str, out: Path, stage: Stage, max_bytes: int | None = None
) -> Path:
    """Downloads a model's files into the new folder `out`. An interrupted download is continued.

    Args:
        connection: the server.
        route: the path on the server that lists the files.
        model: the model's id, which is part of the unfinished download's identity.
        out: the new folder.
        stage: reports the progress of each file.
        max_bytes: the most bytes that the model can have. None: not known.

    Returns:
        `out`.

    Raises:
        UsageError: `out` exists, or the disk is full. Nothing was written.
        RemoteError: the server offers impossible files, or sends damaged ones.
        ModelError: the files are no model.
    """
    from milkglass.models.checkpoint import Checkpoint

    if out.exists():
        raise UsageError(f"{out} exists already", "give a new folder, or remove that one first")
    offered = read_offered_files(connection.json("GET", route))
    require_possible_size(offered, max_bytes)
    description = [[file.name, file.bytes, file.sha256] for file in offered]
    identity = hashlib.sha256(json.dumps([connection.url, model, description]).encode())
    staging = out.with_name(f".{out.name}.{identity.hexdigest()[:16]}.fetching")  # nothing of another model gets in
    out.parent.mkdir(parents=True, exist_ok=True)
    require_disk_space(offered, staging)
    staging.mkdir(exist_ok=True)
    for stray in {path.name for path in staging.iterdir()} - {file.name for file in offered}:
        (staging / stray).unlink()
    for file in offered:
        _fetch_file(connection, f"{route}/{file.name}", staging / file.name, file, stage)
    try:
        Checkpoint.open(staging)
    except ModelError:
        shutil.rmtree(staging)  # whole, and no model: there is nothing to go on from
        raise
    (staging / MARKER).write_text(json.dumps(MARKER_CONTENT) + "\n", "utf-8")
    rename_into_place(staging, out)
    staging_pattern = f".{glob.escape(out.name)}.{'[0-9a-f]' * 16}.fetching"  # begun for this place, of no use now
    for abandoned in out.parent.glob(staging_pattern):
        shutil.rmtree(abandoned, ignore_errors=True)
    return out


def _fetch_file(connection: Connection, route: str, target: Path, file: OfferedFile, stage: Stage) -> None:
    """Downloads one file, or what of it is missing, and checks its SHA-256 if the server says one."""
    advance = stage(f"fetch {file.name}", file.bytes)
    with contextlib.suppress(FileNotFoundError):
        advance(min(file.bytes, target.stat().st_size))
    download_file(connection, route, target, file.bytes, advance)
    if file.sha256:
        require_sha256(target, file.sha256, stage(f"check {file.name}", file.bytes))
