"""Receives files, in chunks, after which an upload can resume, or in one form, and checks them.

`received` grows only when a chunk's checksum is right and its bytes are on the disk, so that a kill or a power cut
costs at most the current chunk.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO, BinaryIO, final

from fastapi.concurrency import run_in_threadpool

from milkglass import files
from milkglass.errors import BadUpload, Conflict, CorruptCheckpoint, NotFound, TooLarge
from milkglass.models.safetensors_file import CHUNK_BYTES
from milkglass.models.safetensors_header import PLAIN_NOTES, read_tensors_and_notes
from milkglass.server.random_ids import new_id
from milkglass.server.settings import HomeFolder
from milkglass.server.storage import training_rows
from milkglass.server.storage.store import FileRecord, Purpose, Store, UploadRecord

PIECE_BYTES = 1 << 20  # bytes written at a time
MAX_CONCURRENT_CHECKS = 2  # a header of the largest size takes some hundred MB while it is parsed
PARQUET_SUFFIX = ".parquet"  # of training rows that earlier versions took


@final
class IncomingChunk:
    """Holds a chunk of an upload while it arrives, in a nameless file. Methods raise OSError if the disk is full."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0

    async def receive(self, source: AsyncIterator[bytes], limit: int) -> None:
        """Writes all of `source`. Raises BadUpload before any byte beyond `limit` is written."""
        buffer = bytearray()
        async for piece in source:
            if self.size + len(buffer) + len(piece) > limit:
                raise BadUpload(f"this chunk goes beyond the {limit} bytes that are left", "start a new upload")
            buffer += piece
            if len(buffer) >= PIECE_BYTES:
                await run_in_threadpool(self._add, bytes(buffer))
                buffer.clear()
        await run_in_threadpool(self._add, bytes(buffer))

    def _add(self, piece: bytes) -> None:
        _write_whole(self._file, piece)
        self._digest.update(piece)
        self.size += len(piece)

    @property
    def sha256(self) -> str:
        """Returns the SHA-256 of what has arrived, in hex."""
        return self._digest.hexdigest()

    def pieces(self) -> Iterator[bytes]:
        """Yields what has arrived, from its beginning."""
        self._file.seek(0)
        while piece := self._file.read(PIECE_BYTES):
            yield piece


@contextmanager
def incoming_chunk(folder: Path) -> Iterator[IncomingChunk]:
    """Yields an empty chunk, whose file in `folder` is gone when the block ends."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        yield IncomingChunk(file)


class WrongOffset(Conflict):
    """A chunk begins at the wrong byte. The error has the right one, so that a client resumes without asking again."""

    def __init__(self, received: int) -> None:
        message = f"this upload has {received} bytes so far"
        super().__init__(message, f"send `Upload-Offset: {received}`", received=received)


class NamedLocks:
    """Holds one lock for each name that is in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[str] = set()

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Holds a lock. Raises Conflict if another request has it."""
        with self._lock:
            if name in self._held:
                raise Conflict("another request is working on this", "wait for it, then ask again")
            self._held.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._held.discard(name)


class Uploads:
    """Receives, checks and deletes the uploads and files of one home.

    Uploads without a chunk for `max_idle` seconds are deleted when the next one starts, or at `sweep`. `max_unfinished`
    may be unfinished at a time.
    """

    def __init__(self, home: HomeFolder, store: Store, max_bytes: int, max_idle: float, max_unfinished: int) -> None:
        self._home, self._store = home, store
        self._max_bytes, self._max_idle, self._max_unfinished = max_bytes, max_idle, max_unfinished
        self._locks = NamedLocks()
        self._start_lock = threading.Lock()
        self._check_slots = threading.BoundedSemaphore(MAX_CONCURRENT_CHECKS)

    def start(self, filename: str, size: int, sha256: str, purpose: Purpose) -> UploadRecord:
        """Announces an upload. Raises BadUpload for its name, TooLarge, Conflict for too many uploads, or DiskFull."""
        require_suffix(filename, purpose)
        if size > self._max_bytes:
            raise TooLarge(f"{size} bytes are more than the {self._max_bytes} that a file may have", "split the model")
        self._drop_abandoned()
        upload = UploadRecord(id=new_id("upload"), filename=filename, bytes=size, sha256=sha256, purpose=purpose)
        with self._start_lock:  # of two at once, the second must see what the first announced
            self._require_room(size)
            self._store.uploads.add(upload)
        self._part(upload.id).touch()
        return upload

    def _require_room(self, size: int) -> None:
        """Raises Conflict or DiskFull for `size` bytes that do not fit beside all announced ones."""
        unfinished = self._store.uploads.all()
        if len(unfinished) >= self._max_unfinished:
            raise Conflict(
                f"{len(unfinished)} uploads are unfinished; {self._max_unfinished} are the most",
                "complete or delete some: GET /v1/uploads lists them",
            )
        self._home.require_space(size + sum(upload.bytes - upload.received for upload in unfinished))

    def check_chunk(self, upload_id: str, offset: int, size: int) -> int:
        """Checks a chunk of announced `size` before it is read, and returns how many bytes the upload lacks.

        Raises:
            NotFound: there is no such upload.
            WrongOffset: the chunk does not begin where the upload ends.
            BadUpload: the chunk is too long.
            DiskFull: the disk has no room for it.
        """
        upload = self._store.uploads.get(upload_id)
        if offset != upload.received:
            raise WrongOffset(upload.received)
        if offset + size > upload.bytes:
            raise BadUpload(f"this chunk goes beyond the {upload.bytes} bytes announced", "start a new upload")
        self._home.require_space(2 * size)  # it lies there twice for a moment
        return upload.bytes - offset

    def write(self, upload_id: str, offset: int, chunk: IncomingChunk, sha256: str) -> UploadRecord:
        """Adds a chunk.

        Raises WrongOffset, BadUpload (checksum, length), NotFound, DiskFull, or Conflict while another request works on
        the upload, and then changes nothing.
        """
        with self._locks.hold(upload_id):
            self.check_chunk(upload_id, offset, chunk.size)
            if chunk.sha256 != sha256:
                raise BadUpload("the chunk's checksum is wrong: it changed on its way", "send the same chunk again")
            _append(self._part(upload_id), offset, chunk.pieces())
            return self._store.uploads.update(
                upload_id, lambda upload: setattr(upload, "received", offset + chunk.size)
            )

    def cancel(self, upload_id: str) -> None:
        """Deletes an unfinished upload. Raises NotFound, or Conflict while another request works on it."""
        with self._locks.hold(upload_id):
            self._store.uploads.require(upload_id)
            self._forget(upload_id)

    def complete(self, upload_id: str) -> FileRecord:
        """Checks the whole upload and makes it a file. Called again, it returns the same file.

        Raises NotFound; Conflict if bytes are missing, or while another request works on it; BadUpload for a damaged
        file, which was deleted.
        """
        with self._locks.hold(upload_id):
            existing = self._store.files.find(_file_id(upload_id))
            if existing:
                self._forget(upload_id)
                return existing
            upload = self._store.uploads.get(upload_id)
            if upload.received != upload.bytes:
                raise Conflict(
                    f"{upload.received} of {upload.bytes} bytes have arrived",
                    f"go on with `Upload-Offset: {upload.received}`",
                )
            try:
                if files.sha256(self._part(upload_id)) != upload.sha256:
                    raise BadUpload("the file's checksum is wrong: it is not the file that was announced", "start anew")
                file = self._adopt(
                    self._part(upload_id), _file_id(upload_id), upload.filename, upload.purpose, upload.sha256
                )
            except BadUpload:
                self._forget(upload_id)
                raise
            self._forget(upload_id)
            return file

    def _drop_abandoned(self) -> None:
        """Deletes uploads that have not grown for a long time."""
        for upload_id in self._store.uploads.ids():
            try:
                if time.time() - self._part(upload_id).stat().st_mtime > self._max_idle:
                    self.cancel(upload_id)
            except (FileNotFoundError, NotFound, Conflict):
                continue  # completed, deleted, or written to, at this very moment

    def _forget(self, upload_id: str) -> None:
        if upload_id in self._store.uploads.ids():
            self._store.uploads.remove(upload_id)
        self._part(upload_id).unlink(missing_ok=True)

    def add_form_file(self, source: BinaryIO, size: int, filename: str, purpose: Purpose) -> FileRecord:
        """Copies a file of `size` bytes that came in a form, checks it and adds it. Raises BadUpload or DiskFull."""
        require_suffix(filename, purpose)
        self._home.require_space(size)
        part = self._home.work / new_id("form")
        try:
            digest = hashlib.sha256()
            with part.open("wb") as file:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
            return self._adopt(part, new_id("file"), filename, purpose, digest.hexdigest())
        finally:
            part.unlink(missing_ok=True)

    def _adopt(self, part: Path, file_id: str, filename: str, purpose: Purpose, sha256: str) -> FileRecord:
        """Checks a complete file, records it and moves it into its place. Raises BadUpload."""
        with self._check_slots:
            rows = training_rows.check_training_file(part) if purpose == "fine-tune" else None
            if purpose == "model":
                check_weights(part)
        size = part.stat().st_size
        file = FileRecord(id=file_id, filename=filename, bytes=size, sha256=sha256, purpose=purpose, rows=rows)
        self._store.files.add(file)  # first the record: killed in between, `sweep` drops it and the part is still there
        try:
            files.rename_into_place(part, self.path(file_id))
        except OSError:
            self._store.files.remove(file_id)
            raise
        return file

    def path(self, file_id: str) -> Path:
        """Returns the path of a file, which need not exist."""
        return self._home.files / file_id

    def remove_file(self, file_id: str) -> None:
        """Deletes a file. Models made of it keep their own link. Raises NotFound, or Conflict if a job needs it."""
        with self._store.references_lock:
            for job in self._store.jobs.all():
                if job.needs_files and file_id in (job.training_file, job.validation_file):
                    raise Conflict(f"the job {job.id} still needs this file", "cancel the job first, or delete it")
            self._store.files.remove(file_id)
        self.path(file_id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Makes disk and store agree again, at the start, after a kill between their changes."""
        for upload_id in self._store.uploads.ids():
            if not self._part(upload_id).is_file():
                self._store.uploads.remove(upload_id)
        for file_id in self._store.files.ids():
            if not self.path(file_id).is_file():
                self._store.files.remove(file_id)
        self._drop_abandoned()
        known_ids = self._store.uploads.ids() | self._store.files.ids()
        for path in [*self._home.uploads.iterdir(), *self._home.files.iterdir()]:
            if path.name not in known_ids:
                path.unlink()

    def _part(self, upload_id: str) -> Path:
        return self._home.uploads / upload_id


def require_suffix(filename: str, purpose: Purpose) -> None:
    """Raises BadUpload if the name of a file does not end in .safetensors."""
    if purpose == "fine-tune" and filename.endswith(PARQUET_SUFFIX):
        raise training_rows.parquet_error()
    if not filename.endswith(".safetensors"):
        raise BadUpload(
            f"a file for the purpose {purpose} must end in .safetensors",
            "weights and training rows are safetensors; nothing else is accepted",
        )


def check_weights(path: Path) -> None:
    """Raises BadUpload for a file that is not safetensors, has no tensors, or has metadata of its own."""
    try:
        tensors, notes = read_tensors_and_notes(path)
    except CorruptCheckpoint as error:  # its own message names the file on our disk
        message = error.message.replace(path.name, "the file")
        raise BadUpload(message, "save the weights with safetensors; pickled weights are refused") from error
    if not tensors:
        raise BadUpload("the file holds no tensors", "save the weights with safetensors")
    if notes != PLAIN_NOTES:
        raise BadUpload(
            "the file holds metadata of its own, which may say more than numbers do",
            'save the weights with save_pretrained, which says only {"format": "pt"}',
        )


def _file_id(upload_id: str) -> str:
    return "file-" + upload_id.removeprefix("upload-")


def _append(path: Path, offset: int, pieces: Iterable[bytes]) -> None:
    """Writes pieces at an offset, unbuffered, so that a full disk raises here and not on closing."""
    with path.open("r+b", buffering=0) as file:
        _cut_file(file, offset)  # what an interrupted write left behind `received`
        file.seek(offset)
        try:
            for piece in pieces:
                _write_whole(file, piece)
            os.fsync(file.fileno())
        except OSError:
            _cut_file(file, offset)
            raise


def _write_whole(file: IO[bytes], piece: bytes) -> None:
    """Writes all of a piece: an unbuffered file takes only a part of it where the disk is nearly full."""
    unwritten = memoryview(piece)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) :]


def _cut_file(file: FileIO, size: int) -> None:
    if file.seek(0, os.SEEK_END) > size:
        file.truncate(size)
