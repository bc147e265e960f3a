"""Forwards requests from a client's proxy to an attested server, and from that to an engine.

Only listed paths and headers are forwarded. A quiet answer reveals little by its sizes and times, and quiet requests
and refusals are padded, too. There are two modes:

    whole    the answer is collected, and padded with blanks to a multiple of PAD_BYTES
    slots    every SLOT_SECONDS exactly SLOT_BYTES are sent: the events that came, then a filler
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import httpx2
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from milkglass.errors import MilkglassError, Unreachable, UsageError
from milkglass.server.http.errors import HTTP_ERROR_MESSAGES, RefusedRequest
from milkglass.server.http.routing import result_unless_gone
from milkglass.server.settings import error_for_caller

QuietMode = Literal["whole", "slots"]
QUIET_HEADER = "Milkglass-Quiet"  # the header by which a client asks for a quiet answer
STATE_HEADER = "Milkglass-Attested"  # the header of each answer that says whether the server was attested
MAX_BODY_BYTES = 32 << 20  # of a request
MAX_QUIET_BYTES = 2 << 20  # of a quiet answer that may wait here
# The paths that are forwarded, each with its method
METHOD_BY_PATH = {
    "/v1/models": "GET", "/v1/chat/completions": "POST", "/v1/completions": "POST", "/v1/embeddings": "POST",
    "/v1/responses": "POST", "/tokenize": "POST", "/detokenize": "POST", "/version": "GET", "/health": "GET",
    "/v1/score": "POST", "/v1/rerank": "POST",
    # A proxy with a key asks vLLM, llama.cpp and SGLang by token ids
    "/inference/v1/generate": "POST", "/completion": "POST", "/generate": "POST",
}  # fmt: skip
REQUEST_HEADERS = (b"content-type", b"accept", b"authorization")
RESPONSE_HEADERS = (b"content-type", b"retry-after")
PAD_BYTES, SLOT_BYTES, SLOT_SECONDS = 16 << 10, 4 << 10, 0.25
PATHS_HINT = f"It has {', '.join(METHOD_BY_PATH)}"
# The values of STATE_HEADER; OWN_ANSWER is that of errors of the client's proxy
SEE_EVIDENCE, BY_POLICY, NOT_ATTESTED = "see the evidence", "by policy", "NOT ATTESTED"
OWN_ANSWER = "the proxy's own answer"
JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream"


def web_app(routes: list[Route], lifespan: Lifespan[Starlette]) -> Starlette:
    """Returns an application whose errors have OpenAI's form, also those of its guard and of unknown paths."""

    async def on_known(request: Request, error: Any) -> Response:
        known_error = error_for_caller(error)
        if known_error is None:
            raise error
        status = 502 if isinstance(known_error, Unreachable) else known_error.status
        headers = {"Retry-After": str(known_error.extra.get("retry_after", 2))} if status == 503 else None
        return _refusal(f"{known_error.message}. {known_error.hint}", type(known_error).__name__, status, headers)

    async def on_http(request: Request, error: Any) -> Response:
        if isinstance(error, RefusedRequest):
            return await on_known(request, error.error)
        message = f"{HTTP_ERROR_MESSAGES.get(error.status_code, 'the request was refused')}. {PATHS_HINT}"
        return _refusal(message, f"http_{error.status_code}", error.status_code, error.headers)

    handlers: dict[Any, Any] = {MilkglassError: on_known, OSError: on_known, HTTPException: on_http}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirection is not the answer of a listed path
    return app


def _refusal(message: str, kind: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an error in OpenAI's form."""
    return JSONResponse({"error": {"message": message.strip(), "type": kind, "code": None}}, status, headers)


class HeaderMiddleware:
    """Adds headers to every answer of an application, where they are missing.

    Args:
        headers: returns the headers for a path and a status.
    """

    def __init__(self, app: ASGIApp, headers: Callable[[str, int], Mapping[str, str]]) -> None:
        self._app, self._headers = app, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=[*message["headers"]])
                for name, value in self._headers(scope["path"], message["status"]).items():
                    headers.setdefault(name, value)
                message = {**message, "headers": headers.raw}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


class PaddingMiddleware:
    """Pads answers of a known length, refusals too, where the request asks for a quiet answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None

        async def send_padded(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and "content-length" in Headers(raw=message["headers"]):
                start = message
                return
            if start is not None:
                message = {**message, "body": pad_json(message["body"])}
                headers = MutableHeaders(raw=[*start["headers"]])
                headers["content-length"] = str(len(message["body"]))
                await send({**start, "headers": headers.raw})
                start = None
            await send(message)

        is_quiet = scope["type"] == "http" and QUIET_HEADER in Headers(scope=scope)
        await self._app(scope, receive, send_padded if is_quiet else send)


def select_headers(headers: Iterable[tuple[bytes, bytes]], names: tuple[bytes, ...]) -> httpx2.Headers:
    """Returns the headers with these names, their values byte for byte. Of several with one name the last counts.

    Args:
        names: the names in lower case.
    """
    return httpx2.Headers({name.lower(): value for name, value in headers if name.lower() in names}, "latin-1")


def pad_json(body: bytes) -> bytes:
    """Pads JSON with blanks, which mean nothing in it, to a multiple of PAD_BYTES, at least PAD_BYTES."""
    return body + b" " * (-len(body) % PAD_BYTES if body else PAD_BYTES)


def parse_quiet_mode(header: str | None) -> QuietMode | None:
    """Returns the mode that QUIET_HEADER asks for, or None without it. Raises UsageError for an unknown mode."""
    if header is not None and header not in get_args(QuietMode):
        raise UsageError(f"{QUIET_HEADER} is {header!r}", f"one of {', '.join(get_args(QuietMode))}")
    return header  # type: ignore[return-value]


class ForwardedResponse(StreamingResponse):
    """Forwards an answer as it arrives, or in slots.

    However it ends, even before the first part was read, it frees the answer's connection.
    """

    def __init__(self, answer: httpx2.Response, headers: Mapping[str, str], in_slots: bool = False) -> None:
        self._answer, self._parts = answer, iterate_parts(answer)
        if in_slots:
            self._parts = fill_slots(self._parts)
        super().__init__(self._parts, answer.status_code, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await result_unless_gone(self.stream_response(send), self.listen_for_disconnect(receive))
        finally:
            await asyncio.shield(self._close())

    async def _close(self) -> None:
        try:
            await self._parts.aclose()
        finally:
            await self._answer.aclose()


async def iterate_parts(answer: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """Yields the parts of an answer. Raises Unreachable if it breaks off."""
    try:
        async for part in answer.aiter_raw():
            yield part
    except httpx2.TransportError as error:
        raise Unreachable(f"the answer broke off ({type(error).__name__})", "try again") from None


async def read_whole(answer: httpx2.Response) -> bytes:
    """Returns the whole body of an answer. Raises Unreachable if it breaks off, or is too long."""
    body = bytearray()
    try:
        async for part in iterate_parts(answer):
            body += part
            _require_bounded(body)
        return bytes(body)
    finally:
        await asyncio.shield(answer.aclose())


def _require_bounded(buffer: bytearray) -> None:
    """Raises Unreachable, and clears the buffer, if too much of a quiet answer waits."""
    if len(buffer) > MAX_QUIET_BYTES:
        buffer.clear()  # to send all of it before the error would take minutes
        raise Unreachable(
            f"more than {MAX_QUIET_BYTES:,} bytes of a quiet answer wait",
            f"ask for less at a time, or without {QUIET_HEADER}",
        )


async def fill_slots(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yields an answer of events in pieces of SLOT_BYTES bytes at fixed times, until the answer has ended.

    An event is sent only when all of it has come, except one that the end of the answer cuts off. One that does not fit
    into the rest of a slot goes on in the next. Raises Unreachable if the answer breaks off, or too much of it waits.
    """
    buffer, end_event = bytearray(), asyncio.Event()

    async def collect() -> None:
        try:
            async for part in parts:
                buffer.extend(part)
                _require_bounded(buffer)
        finally:
            end_event.set()

    task = asyncio.create_task(collect())
    loop = asyncio.get_running_loop()
    due_time = loop.time()
    try:
        while True:
            due_time += SLOT_SECONDS
            await asyncio.sleep(max(0.0, due_time - loop.time()))
            is_last = end_event.is_set()
            ready_bytes = len(buffer) if is_last else buffer.rfind(b"\n\n") + 2 if b"\n\n" in buffer else 0
            piece = bytes(buffer[: min(ready_bytes, SLOT_BYTES)])
            del buffer[: len(piece)]
            yield piece + filler_bytes(SLOT_BYTES - len(piece))
            if is_last and not buffer:
                break
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # so that it does not read while the answer is closed


def filler_bytes(size: int) -> bytes:
    """Returns `size` bytes that readers of server-sent events skip: a comment, or line ends if that has no room."""
    return b"\n" * size if size < len(b":\n\n") else b":" + b" " * (size - 3) + b"\n\n"
