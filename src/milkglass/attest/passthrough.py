"""Requests that are handed on as they are: by a client's proxy to an attested server, and by it to an engine.

Only listed paths and headers cross. A quiet answer says little by its sizes and times:

    whole    the answer is collected, and padded with blanks to a multiple of PAD_BYTES
    slots    every SLOT_SECONDS exactly SLOT_BYTES are sent: the events that came, then a comment that fills the slot
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Literal, get_args

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from milkglass.errors import MilkglassError, Unreachable, UsageError

Quiet = Literal["whole", "slots"]
QUIET_HEADER = "Milkglass-Quiet"  # the header by which a client asks for it
STATE_HEADER = "Milkglass-Attested"  # the header of each answer
MAX_BODY = 32 << 20
PATHS = {
    "/v1/models": "GET", "/v1/chat/completions": "POST", "/v1/completions": "POST", "/v1/embeddings": "POST",
    "/v1/responses": "POST", "/tokenize": "POST", "/detokenize": "POST", "/version": "GET", "/health": "GET",
    "/v1/score": "POST", "/v1/rerank": "POST",
    # Of vLLM, llama.cpp and SGLang, by token ids: what a proxy with a key asks
    "/inference/v1/generate": "POST", "/completion": "POST", "/generate": "POST",
}  # fmt: skip
FORWARDED_HEADERS = ("content-type", "accept", "authorization")
ANSWERED_HEADERS = ("content-type", "retry-after")
PAD_BYTES, SLOT_BYTES, SLOT_SECONDS = 16 << 10, 4 << 10, 0.25
JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream"


Endpoint = Callable[[Request], Awaitable[Response]]


def answering(work: Endpoint, headers: Mapping[str, str]) -> Endpoint:
    """Returns an endpoint whose answers have these headers, and whose errors are in OpenAI's form."""

    async def endpoint(request: Request) -> Response:
        try:
            answer = await work(request)
        except MilkglassError as error:
            fields = {"message": f"{error.message}. {error.hint}".strip(), "type": type(error).__name__, "code": None}
            answer = JSONResponse({"error": fields}, 502 if isinstance(error, Unreachable) else error.status)
        answer.headers.update(headers)
        return answer

    return endpoint


async def body_of(request: Request, limit: int = MAX_BODY) -> bytes:
    """Returns a request's body. Raises UsageError if it has more than `limit` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise UsageError(f"the body has more than {limit:,} bytes", "send less at a time")
    return bytes(body)


def kept(headers: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


def padded(body: bytes, size: int = PAD_BYTES) -> bytes:
    """Returns JSON padded with blanks to a multiple of `size` bytes, which changes nothing of what it says."""
    return body + b" " * (-len(body) % size)


def quiet_of(header: str | None) -> Quiet | None:
    """Returns how quiet an answer shall be. Raises UsageError for an unknown word."""
    if header is not None and header not in get_args(Quiet):
        raise UsageError(f"{QUIET_HEADER} is {header!r}", f"one of {', '.join(get_args(Quiet))}")
    return header  # type: ignore[return-value]


async def closing(parts: AsyncIterator[bytes], answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Yields the parts of an answer, and closes it at their end or when they are not read on."""
    try:
        async for part in parts:
            yield part
    except httpx2.TransportError as error:
        raise Unreachable(f"the answer broke off ({type(error).__name__})", "try again") from None
    finally:
        await asyncio.shield(answer.aclose())


async def slots(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields pieces of SLOT_BYTES bytes at fixed times, until the answer has ended.

    An event begins in a slot only when all of it has come. One that is longer than a slot takes several.
    """
    buffer, ended = bytearray(), asyncio.Event()

    async def collect() -> None:
        try:
            async for part in parts:
                buffer.extend(part)
        finally:
            ended.set()

    task = asyncio.create_task(collect())
    loop = asyncio.get_running_loop()
    due = loop.time()
    try:
        while True:
            due += SLOT_SECONDS
            await asyncio.sleep(max(0.0, due - loop.time()))
            is_last = ended.is_set()
            ready_bytes = len(buffer) if is_last else buffer.rfind(b"\n\n") + 2 if b"\n\n" in buffer else 0
            piece = bytes(buffer[: min(ready_bytes, SLOT_BYTES)])
            del buffer[: len(piece)]
            yield piece + filler(SLOT_BYTES - len(piece))
            if is_last and not buffer:
                break
        await task
    finally:
        task.cancel()


def filler(size: int) -> bytes:
    """Returns what readers of server-sent events skip: a comment, or line ends where there is no room for one."""
    return b"\n" * size if size < len(b":\n\n") else b":" + b" " * (size - 3) + b"\n\n"
