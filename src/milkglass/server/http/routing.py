"""What routes share: requests' JSON read strictly, server-sent events, and answers to clients that may leave.

JSON has no NaN, no infinities, no lone surrogates, and limited nesting.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Annotated, Any, Protocol, TypeVar

import pydantic_core
from fastapi import Path, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from milkglass.errors import UsageError
from milkglass.server.http.errors import RefusedRequest

PLAIN_NAME = r"^[A-Za-z0-9](\.?[A-Za-z0-9_-])*$"  # no slash, no leading dot, no two dots in a row

Name = Annotated[str, Field(pattern=PLAIN_NAME, min_length=1, max_length=128)]
PathName = Annotated[str, Path(pattern=PLAIN_NAME, min_length=1, max_length=128)]

MAX_FIELDS = 64  # fields of one JSON object
T = TypeVar("T")
CLIENT_GONE = Response(status_code=499)  # the answer to a client that has left


def limit_fields(value: Any) -> Any:
    """Returns the value. Refuses an object with very many fields, before each unknown field becomes an error."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", f"has more than {MAX_FIELDS} fields")
    return value


class RequestBody(BaseModel):
    """Validates a request's body. Unknown fields are refused, because ignoring one would be a silent fallback."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _limit_fields(cls, value: Any) -> Any:
        return limit_fields(value)


class _StrictRequest(Request):
    async def json(self) -> Any:
        """Returns the body's JSON. Raises RefusedRequest for what is not strict JSON."""
        try:
            return pydantic_core.from_json(await self.body(), allow_inf_nan=False)
        except ValueError:
            hint = "no NaN or Infinity, 200 levels of nesting at most, UTF-8"
            raise RefusedRequest(UsageError("the body is not valid JSON", hint)) from None


class StrictRoute(APIRoute):
    """Reads JSON strictly, and answers nothing to a client that is gone."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler of requests."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(_StrictRequest(request.scope, request.receive))
            except ClientDisconnect:
                return CLIENT_GONE

        return handle


def sse_event(data: Any, event_type: str | None = None, event_id: str | None = None) -> str:
    """Returns a server-sent event. `data` is a string, which is sent as it is, or what becomes JSON."""
    lines = [f"event: {event_type}"] if event_type else []
    if event_id is not None:
        lines.append(f"id: {event_id}")
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return "\n".join([*lines, f"data: {text}"]) + "\n\n"


class AsyncCloseable(Protocol):
    """Holds what an event stream uses, which is closed when the stream ends."""

    def aclose(self) -> Awaitable[None]: ...


class EventStream(StreamingResponse):
    """Answers with server-sent events.

    When it ends, even before the first event, it closes `events` and then `resource`. Otherwise events whose reader
    left would keep what they use until the garbage collector finds them.
    """

    def __init__(self, events: AsyncGenerator[str, None], resource: AsyncCloseable | None = None) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._resource = events, resource

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await result_unless_gone(self.stream_response(send), self.listen_for_disconnect(receive))
        finally:
            try:
                await self._events.aclose()
            finally:
                if self._resource is not None:
                    await self._resource.aclose()


async def result_unless_gone(work: Awaitable[T], departure: Awaitable[Any]) -> T | None:
    """Awaits `work` and returns its result; if `departure` ends first, cancels `work` and returns None."""
    tasks: tuple[asyncio.Future[Any], ...] = (asyncio.ensure_future(work), asyncio.ensure_future(departure))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # they end before what they use is given back


async def wait_for_disconnect(request: Request) -> None:
    """Waits until the client has left. Call it after the whole body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
