"""Server-sent events, and answers whose asker may go away."""

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
    """`on_close` runs once, however it ends: also when the client left before the first event. `events` is closed then:
    one whose reader left between two events would otherwise keep what it uses until the garbage collector finds it."""

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
    """Await `work` and return its result; None when `gone` came first, and then `work` is cancelled."""
    tasks: tuple[asyncio.Future[Any], ...] = (asyncio.ensure_future(work), asyncio.ensure_future(gone))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # they end before what they use is given back


async def disconnect(request: Request) -> None:
    """Returns when the client left. Only once the whole body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
