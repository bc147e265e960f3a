"""One HTTP request to the proxy's application without a connection, whose answer is read as it arrives."""

from __future__ import annotations

import asyncio

import httpx2
from starlette.types import ASGIApp, Message, Scope

OWN = frozenset({b"host", b"origin", b"authorization"})  # headers that the application does not decide


class InPlaceExchange:
    """One request to an ASGI application."""

    def __init__(self, app: ASGIApp, request: httpx2.Request, body: bytes) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=64)
        self._left, self._body, self._begun, self._ended = asyncio.Event(), body, False, False
        self._patience: float | None = (request.extensions.get("timeout") or {}).get("read")
        headers = [(name.lower(), value) for name, value in request.headers.raw if name.lower() not in OWN]
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method,
            "headers": [*headers, (b"host", b"127.0.0.1")], "scheme": "http", "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0], "query_string": request.url.query, "root_path": "",
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 0),
        }  # fmt: skip
        self._task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._messages.put)
        finally:
            await self._messages.put(None)

    async def _receive(self) -> Message:
        if not self._begun:
            self._begun = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def begin(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Returns status and headers."""
        message = await self._next()
        if message is None:
            raise httpx2.RemoteProtocolError("the proxy gave no answer")
        return int(message["status"]), list(message["headers"])

    async def part(self) -> bytes | None:
        """Returns the next part of the body, or None at its end. Raises RemoteProtocolError if it breaks off."""
        if self._ended:
            return None
        message = await self._next()
        if message is None:
            raise httpx2.RemoteProtocolError("the answer broke off")
        self._ended = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def _next(self) -> Message | None:
        try:
            async with asyncio.timeout(self._patience):
                return await self._messages.get()
        except TimeoutError:
            raise httpx2.ReadTimeout(f"no answer within {self._patience:g} s") from None

    async def close(self) -> None:
        self._left.set()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
