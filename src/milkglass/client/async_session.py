"""`Session` for asyncio: the same methods, awaited.

    async with await AsyncSession.open("my.mgkey", passphrase, "https://gpu.example:8420", token) as session:
        results = await session.classify("model-1a2b3c4d", ["is it safe?"])
        async for piece in await session.generate("model-5e6f7a8b", "Dear all,"):
            print(piece, end="")

Each call runs in threads over a connection of its own. Cancelling a call cuts the connection: nothing more is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import wraps
from itertools import islice
from typing import Any, Concatenate, ParamSpec, TypeVar

from milkglass.client.remote.remote import Remote
from milkglass.client.results import Answer, Conversation, Job
from milkglass.client.session import Session
from milkglass.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


def _threaded(
    method: Callable[Concatenate[Session, P], T], wrap: Callable[[AsyncSession, Session, T], R], alone: bool = False
) -> Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, R]]:
    """Returns a method of `Session` as a coroutine function. `alone`: one call at a time, since it changes the key."""

    @wraps(method)
    async def run(self: AsyncSession, /, *arguments: P.args, **options: P.kwargs) -> R:
        call = self._session if alone else copy(self._session)
        async with self._alone if alone else nullcontext():
            return wrap(self, call, await self._run(call, lambda: method(call, *arguments, **options)))

    return run


def _same(session: AsyncSession, call: Session, result: T) -> T:
    return result


class AsyncAnswer:
    """`Answer` for asyncio. The request starts with the first piece, and ends when the answer is closed or dropped."""

    def __init__(self, session: AsyncSession, call: Session, answer: Answer) -> None:
        self._answer, self._pieces = answer, session._each(call, lambda: answer)

    prompt_tokens = property(lambda self: int(self._answer.prompt_tokens))
    ids = property(lambda self: list[int](self._answer.ids))
    text = property(lambda self: str(self._answer.text))
    tokens = property(lambda self: int(self._answer.tokens))

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def whole(self) -> str:
        return "".join([piece async for piece in self])

    async def close(self) -> None:
        await self._pieces.aclose()


class AsyncJob:
    """`Job` for asyncio. Cancelling a task that waits for the job does not cancel the job on the server."""

    def __init__(self, session: AsyncSession, call: Session, job: Job) -> None:
        self._session, self._call, self._job = session, copy(call), job
        self.id, self.task, self.status = job.id, job.task, job.status

    def follow(self) -> AsyncGenerator[dict[str, Any], None]:
        return self._session._each(call := copy(self._call), lambda: replace(self._job, remote=call.remote).follow())

    async def wait(self) -> str:
        return await self._session._run(call := copy(self._call), lambda: replace(self._job, remote=call.remote).wait())

    async def cancel(self) -> None:
        await self._session._run(call := copy(self._call), lambda: replace(self._job, remote=call.remote).cancel())


class AsyncConversation:
    """`Conversation` for asyncio, one turn at a time. A turn that fails or is cancelled leaves it unchanged."""

    def __init__(self, session: AsyncSession, call: Session, conversation: Conversation) -> None:
        self._session, self._call, self._conversation, self._turn = session, call, conversation, asyncio.Lock()

    turns = property(lambda self: list(self._conversation.turns))

    def clear(self) -> None:
        self._conversation.clear()

    async def say(self, text: str) -> AsyncGenerator[str, None]:
        answer = self._session._each(self._call, lambda: self._conversation.say(text))
        async with self._turn, aclosing(answer):
            async for piece in answer:
                yield piece


class AsyncSession(AbstractAsyncContextManager["AsyncSession"]):
    """`Session` for asyncio. Its methods raise what `Session`'s raise, and UsageError after the session is closed."""

    def __init__(self, session: Session, connect: Callable[[], Remote]) -> None:
        """Wraps a session. `connect` opens another connection to its server."""
        self.codec, self._session, self._connect, self._closed = session.codec, session, connect, False
        self._idle, self._busy, self._threads = [session.remote], set[Remote](), set[asyncio.Future[Any]]()
        self._alone = asyncio.Lock()

    @classmethod
    async def open(
        cls, key: Any, passphrase: str, server: str, token: str | None = None, **options: Any
    ) -> AsyncSession:
        """Opens a session. See `Session.open`."""
        session = await asyncio.to_thread(Session.open, key, passphrase, server, token, **options)
        secure = options.get("allow_http", False), options.get("certificate")
        return cls(session, lambda: Remote(server, token, *secure))

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the calls that are running, and closes all connections."""
        self._closed, remotes = True, [*self._idle, *self._busy]
        for remote in self._busy:
            remote.connection.give_up()
        await asyncio.gather(*self._threads, return_exceptions=True)
        for remote in remotes:
            remote.connection.close()

    unlocked = property(lambda self: self._session.unlocked, doc="The key file, with the labels of fine-tunes.")
    describe = _threaded(Session.describe, _same)
    classify = _threaded(Session.classify, _same)
    prompt = _threaded(Session.prompt, _same)
    require_generator = _threaded(Session.require_generator, _same)
    generate = _threaded(Session.generate, AsyncAnswer)
    chat = _threaded(Session.chat, AsyncConversation)
    finetune = _threaded(Session.finetune, AsyncJob, alone=True)

    async def _run(self, call: Session, work: Callable[[], T]) -> T:
        async with self._connected(call) as remote:
            return await self._step(remote, work)

    async def _each(self, call: Session, begin: Callable[[], Any]) -> AsyncGenerator[Any, None]:
        """Yields what an iterable yields, a thread for each, and closes it when the loop over it is left."""
        async with self._connected(call) as remote:
            source = begin()
            pieces = iter(source)
            try:
                while piece := await self._step(remote, lambda: list(islice(pieces, 1))):
                    yield piece[0]
            finally:
                if not remote.connection.given_up:  # else the thread that is in it still closes it
                    await self._step(remote, source.close)

    @asynccontextmanager
    async def _connected(self, call: Session) -> AsyncIterator[Remote]:
        remote = call.remote = self._idle.pop() if self._idle else self._connect()
        self._busy.add(remote)
        try:
            yield remote
        finally:
            self._busy.discard(remote)
            if not remote.connection.given_up:
                self._idle.append(remote)

    async def _step(self, remote: Remote, work: Callable[[], T]) -> T:
        """Runs `work` in a thread. When cancelled, cuts the connection at once and closes it when the thread ends."""
        if self._closed:
            raise UsageError("the session is closed", "open another with AsyncSession.open")
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        self._threads.add(thread)
        thread.add_done_callback(self._threads.discard)
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            remote.connection.give_up()
            thread.add_done_callback(lambda _: remote.connection.close())
            raise
