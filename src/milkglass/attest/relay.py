"""A relay between a client and a TLS server that notes the sizes and times of the server's records, as anybody could.

It sees what crosses encrypted: the heads of TLS records, of five bytes each (RFC 8446, section 5.1).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

HEAD, APPLICATION_DATA = 5, 23


@dataclass
class RecordRelay:
    """The relay.

    Attributes:
        answers: of each answer the size of each record, and the seconds from the request to it. An answer is what the
            server sends after the client sent something.
    """

    host: str
    port: int
    answers: list[list[tuple[int, float]]] = field(default_factory=list)
    _asked: float = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Yields the port at which the relay listens."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            back, forth = await asyncio.open_connection(self.host, self.port)
            await asyncio.gather(self._sent(reader, forth), self._received(back, writer))

    async def _sent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while part := await reader.read(1 << 16):
                self._asked = time.monotonic()
                if not self.answers or self.answers[-1]:
                    self.answers.append([])
                writer.write(part)
                await writer.drain()
        writer.close()

    async def _received(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting = bytearray()
        with suppress(OSError):
            while part := await reader.read(1 << 16):
                now = time.monotonic() - self._asked
                waiting += part
                while len(waiting) >= HEAD and len(waiting) >= HEAD + (size := int.from_bytes(waiting[3:5], "big")):
                    if waiting[0] == APPLICATION_DATA and self.answers:
                        self.answers[-1].append((size, now))
                    del waiting[: HEAD + size]
                writer.write(part)
                await writer.drain()
        writer.close()
