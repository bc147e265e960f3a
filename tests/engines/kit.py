"""A server whose every byte a test decides, and shorthands. The server shares no code with milkglass."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from milkglass.engines.engine import IdsChunk, IdsEngine, IdsRequest
from milkglass.engines.upstream import Timeouts, Upstream
from milkglass.engines.vllm import VLLM

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HASTY = Timeouts(connect=5.0, begin=1.5, silence=1.5, body=1.5, pause=0.01, connections=64)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
ASKED = IdsRequest(prompt=[5, 6, 7], max_tokens=4)


class Wire:
    """The server.

    Attributes:
        calls: head and body of every request, as they arrived.
        left: is set when a client closed its side of a connection.
        answer: what is done after a request has arrived.
    """

    def __init__(self, answer: Script) -> None:
        self.calls: list[tuple[str, bytes]] = []
        self.left = asyncio.Event()
        self.answer, self.connections, self.port = answer, 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def upstream(self, engine: IdsEngine | None = None, **more: Any) -> Upstream:
        return Upstream(engine or VLLM(), self.url, **{"timeouts": HASTY, **more})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-len")]
                self.calls.append((head, await reader.readexactly(int(lengths[0]) if lengths else 0)))
                await self.answer(reader, writer)
                await writer.drain()
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def wire(answer: Script) -> AsyncIterator[Wire]:
    result = Wire(answer)
    tasks = set[asyncio.Task[None]]()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(result.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    result.port = server.sockets[0].getsockname()[1]
    try:
        yield result
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def event(ids: list[int], finish: str | None = None, **more: Any) -> bytes:
    """As vLLM writes one."""
    choice = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None, "token_ids": ids, **more}
    return b"data: " + json.dumps({"request_id": "generate-tokens-1", "choices": [choice]}).encode() + b"\n\n"


def sending(*parts: bytes, close: bool = True) -> Script:
    """Sends these bytes, and hangs up or not."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if close:
            writer.close()

    return script


async def collect(upstream: Upstream, request: IdsRequest = ASKED, model: str = "tiny") -> list[IdsChunk]:
    try:
        return [chunk async for chunk in upstream.generate(model, request)]
    finally:
        await upstream.close()


def answer_to(script: Script, request: IdsRequest = ASKED, **more: Any) -> list[IdsChunk]:
    """What comes of a script, in an event loop of its own."""

    async def run() -> list[IdsChunk]:
        async with wire(script) as server:
            return await collect(server.upstream(**more), request)

    return asyncio.run(run())


def answers(upstream: Upstream, *requests: IdsRequest, model: str) -> list[list[IdsChunk]]:
    """Answers to all requests at once, over one upstream, which is closed."""

    async def one(request: IdsRequest) -> list[IdsChunk]:
        return [chunk async for chunk in upstream.generate(model, request)]

    async def run() -> list[list[IdsChunk]]:
        try:
            return await asyncio.gather(*map(one, requests))
        finally:
            await upstream.close()

    return asyncio.run(run())
