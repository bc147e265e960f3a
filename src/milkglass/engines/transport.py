"""HTTP/1.1 over asyncio's streams, for answers of very many small parts: what `httpx2.AsyncClient` sends through.

httpx2's own transport parses every part of a chunked body as a message, which takes longer than all else that is done
with a token. Here a head is parsed strictly and a body is cut out of what arrived at a time. Connections are kept and
used again; one that was closed in the meantime is noticed before it is used. Bodies that are sent have a known length.

Out of scope: proxies, HTTP/2, redirects, cookies. Deadlines of what is read and the number of connections are the
caller's, upstream.py's.
"""

from __future__ import annotations

import asyncio
import re
import selectors
import ssl
import time
from collections.abc import AsyncIterator
from typing import final

import httpx2

from milkglass.engines.chunks import ChunkReader

KEPT = 2.0  # seconds that an idle connection is kept: engines close theirs after 5
MAX_HEAD = 64 << 10  # bytes of an answer's head
READ = 64 << 10  # bytes read at a time
STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})( [^\r\n]*)?")
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")


class BrokenOff(httpx2.RemoteProtocolError):
    """The connection ended before the answer did."""


@final
class StreamTransport(httpx2.AsyncBaseTransport):
    """One pool of connections to one address. Raises httpx2's errors of transport.

    Attributes:
        patience: seconds for a connection.
    """

    def __init__(self, verify: ssl.SSLContext | bool, patience: float) -> None:
        """verify: what verifies the engine's certificate; True: the system's authorities; False: for plain HTTP."""
        self._context = httpx2.create_ssl_context() if verify is True else verify or None
        self.patience = patience
        self._idle = list[_Connection]()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        connection = await self._connection(request)
        try:
            await connection.send(request)
            status, headers = await connection.head()
            body = _Body(self, connection, status, headers)
        except BaseException:  # cancelled, too: half an answer must not be the next one's
            self.release(connection, False)
            raise
        return httpx2.Response(status, headers=headers, stream=body, request=request)

    async def _connection(self, request: httpx2.Request) -> _Connection:
        try:
            while self._idle:
                if (connection := self._idle.pop()).is_usable():
                    return connection
                connection.close()
            url = request.url
            port = url.port or (443 if url.scheme == "https" else 80)
            async with asyncio.timeout(self.patience):
                reader, writer = await asyncio.open_connection(
                    url.host, port, ssl=self._context if url.scheme == "https" else None, limit=MAX_HEAD
                )
            return _Connection(reader, writer)
        except TimeoutError:
            raise httpx2.ConnectTimeout("no connection in time", request=request) from None
        except OSError as error:  # of TLS, too
            raise httpx2.ConnectError(str(error), request=request) from error

    def release(self, connection: _Connection, reusable: bool) -> None:
        """Gives a connection back, or closes it."""
        if reusable:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Connection:
    """One connection.

    Attributes:
        idle_since: when it was given back.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self.idle_since = reader, writer, 0.0

    def is_usable(self) -> bool:
        """Nothing may have arrived: an end, or bytes that would begin the next answer. The system is asked, since a
        busy event loop may not have seen it yet."""
        if time.monotonic() - self.idle_since >= KEPT or self._reader.at_eof() or self._writer.is_closing():
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(self._writer.get_extra_info("socket"), selectors.EVENT_READ)
            return not selector.select(0)

    async def send(self, request: httpx2.Request) -> None:
        lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%s: %s" % field for field in request.headers.raw]
        try:
            self._writer.write(b"\r\n".join([*lines, b"", await request.aread()]))
            await self._writer.drain()
        except OSError as error:
            raise httpx2.WriteError(str(error), request=request) from error

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers of the answer; notices before it are passed over."""
        size = 0
        while True:
            lines = list[bytes]()
            while line := await self.line():
                size += len(line)
                if size > MAX_HEAD:
                    raise httpx2.RemoteProtocolError(f"a head of more than {MAX_HEAD} bytes")
                lines.append(line)
            found = STATUS.fullmatch(lines[0]) if lines else None
            fields = [FIELD.fullmatch(one) for one in lines[1:]]
            if found is None or not all(fields):
                raise httpx2.RemoteProtocolError("an answer that is not HTTP/1.1")
            if (status := int(found[1])) >= 200:
                return status, [(one[1], one[2]) for one in fields if one]

    async def line(self) -> bytes:
        try:
            return (await self._reader.readuntil(b"\n")).removesuffix(b"\n").removesuffix(b"\r")
        except asyncio.IncompleteReadError as error:
            raise BrokenOff("the answer broke off") from error
        except asyncio.LimitOverrunError as error:
            raise httpx2.RemoteProtocolError(f"a line of more than {MAX_HEAD} bytes") from error
        except OSError as error:
            raise httpx2.ReadError(str(error)) from error

    async def some(self, most: int = READ) -> bytes:
        """What has arrived, or the first that does; empty at the end."""
        try:
            return await self._reader.read(most)
        except OSError as error:
            raise httpx2.ReadError(str(error)) from error

    def close(self) -> None:
        self._writer.transport.abort()


class _Body(httpx2.AsyncByteStream):
    """An answer's body, read once. Its connection serves again if it was read to its end."""

    def __init__(
        self, owner: StreamTransport, connection: _Connection, status: int, headers: list[tuple[bytes, bytes]]
    ) -> None:
        self._owner, self._connection, self._over, self._released = owner, connection, False, False
        told = {name.lower(): value.lower() for name, value in headers}
        coding, length = told.get(b"transfer-encoding"), told.get(b"content-length")
        framing = [name for name, _ in headers if name.lower() in (b"transfer-encoding", b"content-length")]
        if len(framing) > 1 or coding not in (None, b"chunked") or not re.fullmatch(rb"[0-9]{1,15}", length or b"0"):
            raise httpx2.RemoteProtocolError("an answer whose length cannot be told")
        self._chunked = coding is not None
        self._length = 0 if status in (204, 304) else None if length is None else int(length)
        self._reusable = told.get(b"connection") != b"close" and bool(framing)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks = ChunkReader() if self._chunked else None
        left = self._length
        while left != 0 and not (chunks is not None and chunks.over):
            part = await self._connection.some(READ if left is None else min(left, READ))
            if not part:
                if self._chunked or left is not None:
                    raise BrokenOff("the answer broke off")
                return
            left = None if left is None else left - len(part)
            if data := part if chunks is None else chunks.take(part):
                yield data
        self._over = True

    async def aclose(self) -> None:
        if not self._released:
            self._released = True
            self._owner.release(self._connection, self._over and self._reusable)
