"""The bytes of one request as they come: hashed, and kept in a nameless file rather than in memory."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, final

from fastapi.concurrency import run_in_threadpool

from milkglass.errors import BadUpload

PIECE = 1 << 20  # bytes written at a time


@final
class Arrival:
    """Raises OSError when the disk is full.

    Attributes:
        size: bytes that have come.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0

    async def take(self, source: AsyncIterator[bytes], limit: int) -> None:
        """Everything that `source` gives. Raises BadUpload as soon as that is more than `limit` bytes; those beyond are
        never written."""
        waiting = bytearray()
        async for piece in source:
            if self.size + len(waiting) + len(piece) > limit:
                raise BadUpload(f"this chunk goes beyond the {limit} bytes that are left", "start a new upload")
            waiting += piece
            if len(waiting) >= PIECE:
                await run_in_threadpool(self._add, bytes(waiting))
                waiting.clear()
        await run_in_threadpool(self._add, bytes(waiting))

    def _add(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._file.write(piece)
        self.size += len(piece)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def pieces(self) -> Iterator[bytes]:
        """From the beginning."""
        self._file.seek(0)
        while piece := self._file.read(PIECE):
            yield piece


@contextmanager
def arriving(folder: Path) -> Iterator[Arrival]:
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        yield Arrival(file)
