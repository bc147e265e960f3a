"""HTTP/1.1's chunked bodies (RFC 9112, section 7.1), cut out of whatever bytes have arrived at a time."""

from __future__ import annotations

import re
from typing import final

import httpx2

SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[^\r\n]*)?")
MAX_LINE = 16 << 10  # bytes of a chunk's line, and of all trailers together


@final
class ChunkReader:
    """What has arrived of a chunked body, and what of it is data.

    Attributes:
        over: whether the body is whole, its trailers too.
    """

    def __init__(self) -> None:
        self._rest, self._left, self._last, self._trailers, self.over = bytearray(), 0, False, 0, False

    def take(self, part: bytes) -> bytes:
        """The data in what has arrived now. Raises RemoteProtocolError, also for bytes after the body."""
        self._rest += part
        data, at = list[bytes](), 0  # _left: bytes of the chunk that has begun, and of the line's end after it
        while not self.over:
            if self._left:
                end = min(len(self._rest), at + self._left)
                data.append(bytes(self._rest[at : min(end, at + max(0, self._left - 2))]))
                self._left -= end - at
                at = end
                if self._left:
                    break
            end = self._rest.find(b"\n", at)
            if end < 0:
                break
            self._line(bytes(self._rest[at:end]).removesuffix(b"\r"))
            at = end + 1
        del self._rest[:at]
        if len(self._rest) > MAX_LINE or (self.over and self._rest):
            raise httpx2.RemoteProtocolError("an answer that is not chunked as it says")
        return b"".join(data)

    def _line(self, line: bytes) -> None:
        if self._last:
            self._trailers += len(line) + 1
            if self._trailers > MAX_LINE:
                raise httpx2.RemoteProtocolError(f"trailers of more than {MAX_LINE} bytes")
            self.over = not line
            return
        found = SIZE.fullmatch(line)
        if found is None:
            raise httpx2.RemoteProtocolError("a chunk without a size")
        size = int(found[1], 16)
        self._last = size == 0
        self._left = size + 2 if size else 0
