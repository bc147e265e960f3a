"""Server-sent events, and answers to clients that may leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
GONE = Response(status_code=499)  # no one reads it


def event(data: Any, kind: str | None = None, key: str | None = None) -> str:
    lines = [f"event: {kind}"] if kind else []
    if key is not None:
        lines.append(f"id: {key}")
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return "\n".join([*lines, f"data: {text}"]) + "\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events.

    When it ends, even before the first event, it closes `events` and calls `on_close` once. Otherwise events whose
    reader left would keep what they use until the garbage collector finds them.
    """

    def __init__(self, events: AsyncGenerator[str, None], on_close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._on_close = events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await first(self.stream_response(send), self.listen_for_disconnect(receive))
        finally:
            try:
                await self._events.aclose()
            finally:
                self._on_close()


async def first(work: Awaitable[T], gone: Awaitable[Any]) -> T | None:
    """Returns the result of `work`; if `gone` comes first, cancels `work` and returns None."""
    tasks: tuple[asyncio.Future[Any], ...] = (asyncio.ensure_future(work), asyncio.ensure_future(gone))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # they end before what they use is given back


async def disconnect(request: Request) -> None:
    """Returns when the client has left. To be called once the whole body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
