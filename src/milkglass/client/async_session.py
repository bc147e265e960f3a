"""`Session` for asyncio: the same methods, awaited.

    async with await AsyncSession.open("my.mgkey", passphrase, "https://gpu.example:8420", token) as session:
        results = await session.classify("model-1a2b3c4d", ["is it safe?"])
        async for piece in await session.generate("model-5e6f7a8b", "Dear all,"):
            print(piece, end="")

Each call runs in threads; no two running calls share a connection. Cancelling a call cuts its connection: nothing more
is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from milkglass.client.remote.connection import Connection
from milkglass.client.remote.threads import ThreadRemote, Threads
from milkglass.client.results import Answer, Job
from milkglass.client.session import Session

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class _AsyncWrapper:
    """Wraps a session, or a result of one, and has the attributes of the wrapped object."""

    def __init__(self, threads: Threads, wrapped: Any) -> None:
        self._threads, self._wrapped, self._lock = threads, wrapped, asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def _async_method(
    method: Callable[Concatenate[Any, P], T], wrap: Callable[[Threads, T], R], is_exclusive: bool = False
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Returns a coroutine function that runs `method` in a thread and wraps its result.

    `is_exclusive`: one call at a time.
    """

    @wraps(method)
    async def run(self: _AsyncWrapper, /, *arguments: P.args, **options: P.kwargs) -> R:
        async with self._lock if is_exclusive else nullcontext():
            returned = await self._threads.run(lambda: method(self._wrapped, *arguments, **options))
        return wrap(self._threads, returned)

    return run


def _unwrapped(threads: Threads, returned: T) -> T:
    """Returns a result as it is."""
    return returned


class AsyncAnswer(_AsyncWrapper):
    """Yields the pieces of an `Answer`, and has its attributes.

    The request starts with the first piece, and ends when the answer is closed or dropped.
    """

    def __init__(self, threads: Threads, answer: Answer) -> None:
        super().__init__(threads, answer)
        self._pieces = threads.iterate(answer)

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def whole(self) -> str:
        """Waits for the end, and returns the whole text."""
        return "".join([piece async for piece in self])

    async def close(self) -> None:
        """Ends the request, without waiting for the rest."""
        await self._pieces.aclose()


class AsyncJob(_AsyncWrapper):
    """Wraps a `Job`. Cancelling a task that waits for the job does not cancel the job on the server."""

    wait, cancel = _async_method(Job.wait, _unwrapped), _async_method(Job.cancel, _unwrapped)

    def follow(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the job's events until it ends, past ones first (`Remote.follow`)."""
        return self._threads.iterate(self._wrapped.follow())


class AsyncConversation(_AsyncWrapper):
    """Wraps a `Conversation`, one turn at a time. A turn that fails or is cancelled leaves it unchanged."""

    def clear(self) -> None:
        """Starts again with the system's message."""
        self._wrapped.clear()

    async def say(self, text: str) -> AsyncGenerator[str, None]:
        """Yields the answer to a message in pieces. The turn joins the conversation when the answer is complete."""
        async with self._lock, aclosing(self._threads.iterate(self._wrapped.say(text))) as pieces:
            async for piece in pieces:
                yield piece


class AsyncSession(_AsyncWrapper, AbstractAsyncContextManager["AsyncSession"]):
    """Wraps a `Session`. Its methods raise what `Session`'s raise, and UsageError after the session is closed."""

    @classmethod
    async def open(cls, key: Any, passphrase: str, server: str, token: str | None = None, **options: Any) -> Self:
        """Opens a session. See `Session.open`."""
        session = await asyncio.to_thread(Session.open, key, passphrase, server, token, **options)
        certificate = options.get("certificate")
        security = options.get("allow_http", False), None if certificate is None else Path(certificate)
        threads = Threads(session.remote.connection, lambda: Connection(server, token, *security))
        session.remote = ThreadRemote()
        return cls(threads, session)

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the calls that are running, and closes all connections."""
        await self._threads.close()

    describe = _async_method(Session.describe, _unwrapped)
    classify = _async_method(Session.classify, _unwrapped)
    encode_prompt = _async_method(Session.encode_prompt, _unwrapped)
    require_generator = _async_method(Session.require_generator, _unwrapped)
    generate = _async_method(Session.generate, AsyncAnswer)
    chat = _async_method(Session.chat, AsyncConversation)
    finetune = _async_method(Session.finetune, AsyncJob, is_exclusive=True)  # it changes the key
