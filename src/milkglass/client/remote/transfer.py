"""Sends and receives files in pieces that resume after a kill of either side.

The upload's id is stored in the cache folder under a digest of address and content, and nothing else of it, so that a
client that was killed finds the upload again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.client.remote.connection import Connection
from milkglass.client.remote.responses import FILE, response_id, response_number
from milkglass.client.remote.strict_json import HINT
from milkglass.errors import RemoteError, Unreachable
from milkglass.models.resolve import cache_folder
from milkglass.progress import Progress, no_progress

CHUNK = 8 << 20  # bytes, unless the server asks for less
LEAST_CHUNK = 512  # bytes; less would take millions of requests
GONE = (404, 409, 410)
STEADY, STEADILY = 64 << 10, 120.0  # the bytes of a download that must arrive within so many seconds


def file_sha256(path: Path, progress: Progress = no_progress) -> str:
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            whole.update(chunk)
            progress(len(chunk))
    return whole.hexdigest()


def send(
    connection: Connection, path: Path, digest: str, purpose: str, name: str, progress: Progress = no_progress
) -> str:
    """Uploads a file or its missing rest, unless the server has it already. Returns its id.

    Args:
        digest: the file's SHA-256.
    """
    size = path.stat().st_size
    note = _note(connection.url, digest, purpose)
    if (known := _file_there(connection, digest, purpose)) is not None:
        progress(size)
        note.unlink(missing_ok=True)
        return known
    upload = _unfinished(connection, note)
    if upload is None:
        requested = {"filename": name, "bytes": size, "sha256": digest, "purpose": purpose}
        upload = connection.json("POST", "/v1/uploads", requested, again=True)  # a lost answer leaves an empty upload
        files.private_dir(note.parent)
        files.write_json(note, {"id": response_id(upload)}, indent=None)
    route, received = f"/v1/uploads/{response_id(upload)}", response_number(upload, "received")
    step = min(CHUNK, response_number(upload, "chunk_bytes")) if upload.get("chunk_bytes") else CHUNK
    if step < LEAST_CHUNK:
        raise RemoteError(f"the server asks for chunks of {step} bytes, {LEAST_CHUNK} is the least", HINT)
    progress(received)
    _send_chunks(connection, path, size, route, received, step, progress)
    try:
        done = _complete(connection, route, digest, purpose)
    except Unreachable:
        raise  # all of it is there: the next try only has to complete it
    except RemoteError:
        note.unlink(missing_ok=True)  # what arrived was not what was announced: the next try starts anew
        raise
    note.unlink(missing_ok=True)
    return done


def _complete(connection: Connection, route: str, digest: str, purpose: str) -> str:
    """Closes the upload. If the first answer was lost, the second try finds the server busy with it, or done."""
    for attempt in range(connection.retry.attempts):
        try:
            return response_id(connection.json("POST", f"{route}/complete", again=True))
        except RemoteError as error:
            if error.status not in GONE:
                raise
            if (known := _file_there(connection, digest, purpose)) is not None:
                return known
            if error.status != 409 or attempt == connection.retry.attempts - 1:
                raise
        connection.retry.wait(attempt)
    raise AssertionError("the last attempt returns or raises")


def _file_there(connection: Connection, digest: str, purpose: str) -> str | None:
    """Returns the server's id of a file with this content, or None."""
    for file in FILE.rows(connection.json("GET", "/v1/files")):
        if file.get("sha256") == digest and file.get("purpose") == purpose:
            return response_id(file)
    return None


def _send_chunks(
    connection: Connection, path: Path, size: int, route: str, received: int, step: int, progress: Progress
) -> None:
    """Sends the rest of the file. If a chunk arrives and its answer is lost, the server says where to go on."""
    with path.open("rb") as file:
        stuck = 0
        while received < size:
            file.seek(received)
            chunk = file.read(step)
            if not chunk:
                raise RemoteError(f"{path.name} became shorter while it was sent", "is it being written?")
            headers = {
                "Upload-Offset": str(received),
                "Chunk-SHA256": hashlib.sha256(chunk).hexdigest(),
                "Content-Type": "application/octet-stream",
            }
            try:
                now = response_number(
                    connection.json("PUT", route, content=chunk, headers=headers, again=True), "received"
                )
            except RemoteError as error:
                if error.status != 409:
                    raise
                now = response_number(connection.json("GET", route), "received")
            stuck = stuck + 1 if now < received + len(chunk) else 0
            if stuck > 3 or not 0 <= now <= size:
                raise RemoteError(
                    f"the upload stays at {now} of {size} bytes", "the server may be out of space; try again later"
                )
            progress(now - received)
            received = now


def receive(connection: Connection, route: str, target: Path, size: int, progress: Progress = no_progress) -> None:
    """Downloads to `target`, going on from what is there, and never writes more than `size` bytes.

    Raises:
        RemoteError: the server sends more.
        Unreachable: it sends less than STEADY bytes in STEADILY seconds.
    """
    for attempt in range(connection.retry.attempts):
        have = target.stat().st_size if target.exists() else 0
        if have > size:
            target.unlink()
            have = 0
        if have < size:
            try:
                _receive_rest(connection, route, target, have, size, progress)
            except Unreachable:
                if attempt == connection.retry.attempts - 1:
                    raise
                connection.retry.wait(attempt)
                continue
        if target.exists() and target.stat().st_size == size:
            break
    else:
        raise RemoteError(f"{target.name} does not arrive whole", "try again")
    if not target.exists():
        target.touch()


def require_sum(target: Path, sha256: str, progress: Progress = no_progress) -> None:
    """Raises RemoteError for a file with another checksum, and deletes it."""
    if file_sha256(target, progress) != sha256:
        target.unlink()
        raise RemoteError(f"{target.name} arrived damaged: its checksum is wrong", "try again")


def _receive_rest(connection: Connection, route: str, target: Path, have: int, size: int, progress: Progress) -> None:
    headers = {"Range": f"bytes={have}-"} if have else {}
    with connection.stream("GET", route, headers=headers) as stream:
        if have and stream.answer.status_code != 206:  # it sends everything anew
            target.unlink()
            progress(-have)
            have = 0
        stream.watch.extend(STEADILY)
        due = have + STEADY
        with target.open("ab") as file:
            for chunk in stream.answer.iter_raw():  # as they come: nothing waits in memory when it breaks off
                have += len(chunk)
                if have > size:
                    raise RemoteError(f"the server sends more than the {size} bytes of {target.name}")
                file.write(chunk)
                progress(len(chunk))
                if have >= due:
                    stream.watch.extend(STEADILY)
                    due = have + STEADY


# --- the note of an unfinished upload ---------------------------------------------------------------------------------
def _note(url: str, digest: str, purpose: str) -> Path:
    name = hashlib.sha256(f"{url}\n{digest}\n{purpose}".encode()).hexdigest()
    return cache_folder() / "uploads" / f"{name}.json"


def _unfinished(connection: Connection, note: Path) -> dict[str, Any] | None:
    """Returns the upload in the note, if the server still has it."""
    try:
        known = json.loads(note.read_text("utf-8"))["id"]
    except (OSError, ValueError, KeyError, TypeError):  # no note, or one cut off by a crash: begin again
        return None
    if not isinstance(known, str) or not known.replace("-", "").replace("_", "").isalnum():
        return None
    try:
        state = connection.json("GET", f"/v1/uploads/{known}")
    except RemoteError as error:
        if error.status in GONE:
            return None
        raise
    return {**state, "id": known}
