"""Sends requests on separate connections, each with a pool of its own.

httpcore's pool looks at every idle connection whenever a request comes and whenever one ends. Beside many streams that
is a third of what a hop costs. So each connection has a pool of its own here, and the connection that was used last is
used first. Cookies are dropped: requests of several clients share a cookie jar, and the cookies of one would be sent
with the requests of another.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx2

from milkglass.errors import Busy

MAX_IDLE_CONNECTIONS = 64  # the most connections that are kept for later requests
IDLE_SECONDS = 2.0  # how long a connection is kept: servers close theirs after 5 s, which a request must not meet
CONNECT_SECONDS = 30.0  # how long a connection may take to be made
SILENCE_SECONDS = 600.0  # how long the other side may be silent, and a request may wait for a free connection


def make_client(
    server: str, max_connections: int, context: ssl.SSLContext | None = None, silence: float = SILENCE_SECONDS
) -> httpx2.AsyncClient:
    """Returns a client of one server, whose requests do not name this library.

    Args:
        server: the server's address.
        max_connections: the most requests at a time; further ones wait.
        context: the TLS context. None: the library's own.
        silence: the seconds that the server may be silent, and that a request waits for a free connection.
    """
    client = httpx2.AsyncClient(
        base_url=server, trust_env=False, timeout=httpx2.Timeout(silence, connect=CONNECT_SECONDS),
        headers={"Accept-Encoding": "identity"},
        transport=SeparateConnectionsTransport(max_connections, context, silence),
    )  # fmt: skip
    del client.headers["User-Agent"]
    return client


class SeparateConnectionsTransport(httpx2.AsyncBaseTransport):
    """Sends each request on a connection that is free, or on a new one. The arguments are those of `make_client`."""

    def __init__(self, max_connections: int, context: ssl.SSLContext | None, silence: float) -> None:
        # All connections share one context, which takes longer to make than a request
        self._context = context or httpx2.create_ssl_context(trust_env=False)
        self._free_slots = asyncio.Semaphore(max_connections)
        self._max_connections, self._silence = max_connections, silence
        self._idle = list[httpx2.AsyncHTTPTransport]()
        self._is_closed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a request. Raises Busy if no connection is free in time."""
        try:
            async with asyncio.timeout(self._silence):
                await self._free_slots.acquire()
        except TimeoutError:
            raise Busy(
                f"all {self._max_connections} connections to {request.url.host} were in use for {self._silence:g} s",
                "try again later, with fewer requests at a time",
            ) from None
        connection = self._idle.pop() if self._idle else self._new_connection()
        try:
            answer = await connection.handle_async_request(request)
        except BaseException:
            await self._release(connection)
            raise
        assert isinstance(answer.stream, httpx2.AsyncByteStream)
        body = _ReleasingStream(answer.stream, lambda: self._release(connection))
        answer.headers.pop("Set-Cookie", None)
        return httpx2.Response(
            answer.status_code, headers=answer.headers, stream=body, extensions=answer.extensions, request=request
        )

    def _new_connection(self) -> httpx2.AsyncHTTPTransport:
        """Returns a transport for one connection, which opens at the first request."""
        limits = httpx2.Limits(max_connections=1, keepalive_expiry=IDLE_SECONDS)
        return httpx2.AsyncHTTPTransport(verify=self._context, trust_env=False, limits=limits)

    async def _release(self, connection: httpx2.AsyncHTTPTransport) -> None:
        """Keeps a connection for the next request, or closes it where no more are kept."""
        self._free_slots.release()
        if len(self._idle) < MAX_IDLE_CONNECTIONS and not self._is_closed:
            self._idle.append(connection)
        else:
            await connection.aclose()

    async def aclose(self) -> None:
        self._is_closed = True
        while self._idle:
            await self._idle.pop().aclose()


@dataclass
class _ReleasingStream(httpx2.AsyncByteStream):
    """Yields the body of an answer, and frees its connection when it is closed.

    Attributes:
        stream: the body.
        release: frees the connection.
        is_closed: whether the stream was closed.
    """

    stream: httpx2.AsyncByteStream
    release: Callable[[], Awaitable[None]]
    is_closed: bool = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self.stream:
            yield chunk

    async def aclose(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        try:
            await self.stream.aclose()
        finally:
            await self.release()
