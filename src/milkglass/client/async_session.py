"""`Session` for asyncio: the same methods, awaited.

    async with await AsyncSession.open("my.mgkey", passphrase, "https://gpu.example:8420", token) as session:
        results = await session.classify("model-1a2b3c4d", ["is it safe?"])
        async for piece in await session.generate("model-5e6f7a8b", "Dear all,"):
            print(piece, end="")

Each method runs `Session`'s in a thread (`asyncio.to_thread`), over its own connection, so that calls can run at once.
Cancelling a call cuts its connection: it sends nothing more. `stage` and `notice` are called in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, closing
from copy import copy
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from milkglass.client.remote.remote import Remote
from milkglass.client.results import Answer, Conversation, Job
from milkglass.client.session import Session
from milkglass.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
_END: Any = object()


def _awaited(
    verb: Callable[Concatenate[Session, P], T], wrap: Callable[[AsyncSession, Session, T], R]
) -> Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, R]]:
    """Returns a coroutine function that runs a method of `Session` and passes its result to `wrap`."""

    @wraps(verb)
    async def run(self: AsyncSession, /, *arguments: P.args, **options: P.kwargs) -> R:
        call = copy(self._session)
        return wrap(self, call, await self._run(call, lambda: verb(call, *arguments, **options)))

    return run


class AsyncAnswer:
    """`Answer` for asyncio. The request starts with the first piece, and ends when the answer is closed or dropped."""

    def __init__(self, session: AsyncSession, call: Session, answer: Answer) -> None:
        def pieces() -> Iterator[str]:
            with closing(answer):
                yield from answer

        self._answer, self._pieces = answer, session._each(call, pieces)

    prompt_tokens = property(lambda self: int(self._answer.prompt_tokens))
    ids = property(lambda self: list[int](self._answer.ids))
    text = property(lambda self: str(self._answer.text))
    tokens = property(lambda self: int(self._answer.tokens))

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    @wraps(Answer.whole)
    async def whole(self) -> str:
        return "".join([piece async for piece in self])

    @wraps(Answer.close)
    async def close(self) -> None:
        await self._pieces.aclose()


class AsyncJob:
    """`Job` for asyncio. Cancelling a task that waits for the job does not cancel the job on the server."""

    def __init__(self, session: AsyncSession, call: Session, job: Job) -> None:
        self._session, self._call, self._job = session, call, job
        self.id, self.task, self.status = job.id, job.task, job.status

    @wraps(Job.follow)
    def follow(self) -> AsyncGenerator[dict[str, Any], None]:
        return self._session._each(call := copy(self._call), lambda: replace(self._job, remote=call.remote).follow())

    @wraps(Job.wait)
    async def wait(self) -> str:
        return await self._session._run(call := copy(self._call), lambda: replace(self._job, remote=call.remote).wait())

    @wraps(Job.cancel)
    async def cancel(self) -> None:
        await self._session._run(call := copy(self._call), lambda: replace(self._job, remote=call.remote).cancel())


class AsyncConversation:
    """`Conversation` for asyncio, one turn at a time. A turn that fails or is cancelled leaves it unchanged."""

    def __init__(self, session: AsyncSession, call: Session, conversation: Conversation) -> None:
        self._session, self._call, self._conversation, self._turn = session, call, conversation, asyncio.Lock()

    turns = property(lambda self: list(self._conversation.turns))

    @wraps(Conversation.clear)
    def clear(self) -> None:
        self._conversation.clear()

    @wraps(Conversation.say)
    async def say(self, text: str) -> AsyncGenerator[str, None]:
        spoken = self._session._each(self._call, lambda: self._conversation.say(text))
        async with self._turn, aclosing(spoken) as pieces:
            async for piece in pieces:
                yield piece


class AsyncSession(AbstractAsyncContextManager["AsyncSession"]):
    """`Session` for asyncio. Use it as an asynchronous context, or close it.

    Methods raise what `Session`'s raise, and UsageError after the session is closed.
    """

    def __init__(self, session: Session, connect: Callable[[], Remote]) -> None:
        """Wraps a session. `connect` opens another connection to its server."""
        self._session, self._connect, self._closed = session, connect, False
        self.codec, self._tuning = session.codec, asyncio.Lock()
        self._idle, self._busy, self._running = [session.remote], set[Remote](), set[asyncio.Future[Any]]()

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
        self._closed = True
        for remote in self._busy:
            remote.connection.give_up()
        await asyncio.gather(*self._running, return_exceptions=True)
        for remote in self._idle:
            remote.connection.close()

    unlocked = property(lambda self: self._session.unlocked, doc="The key file, with the labels of fine-tunes.")
    describe = _awaited(Session.describe, lambda session, call, result: result)
    classify = _awaited(Session.classify, lambda session, call, result: result)
    prompt = _awaited(Session.prompt, lambda session, call, result: result)
    require_generator = _awaited(Session.require_generator, lambda session, call, result: result)
    generate = _awaited(Session.generate, AsyncAnswer)
    chat = _awaited(Session.chat, AsyncConversation)

    @wraps(Session.finetune)
    async def finetune(self, *arguments: Any, **options: Any) -> AsyncJob:
        async with self._tuning:  # one after the other: each notes label names in the key
            call = copy(self._session)
            try:
                return AsyncJob(self, call, await self._run(call, lambda: call.finetune(*arguments, **options)))
            finally:
                self._session.unlocked = call.unlocked

    async def _run(self, call: Session, work: Callable[[], T]) -> T:
        async with self._connected(call) as remote:
            return await self._step(remote, work)

    async def _each(self, call: Session, begin: Callable[[], Iterator[T]]) -> AsyncGenerator[T, None]:
        """Yields what an iterator yields, and closes it when the loop over it is left."""
        async with self._connected(call) as remote:
            pieces: Any = begin()
            try:
                while (piece := await self._step(remote, lambda: next(pieces, _END))) is not _END:
                    yield piece
            finally:
                if not remote.connection.given_up:  # else the thread that is in it still closes it
                    await self._step(remote, pieces.close)

    @asynccontextmanager
    async def _connected(self, call: Session) -> AsyncIterator[Remote]:
        self._require_open()
        remote = call.remote = self._idle.pop() if self._idle else self._connect()
        self._busy.add(remote)
        try:
            yield remote
        finally:
            self._busy.discard(remote)
            if not remote.connection.given_up:
                self._idle.append(remote)
            elif self._closed:
                remote.connection.close()

    async def _step(self, remote: Remote, work: Callable[[], T]) -> T:
        """Runs `work` in a thread. When cancelled, cuts the connection at once and closes it when the thread ends."""
        self._require_open()
        running = asyncio.ensure_future(asyncio.to_thread(work))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            remote.connection.give_up()
            running.add_done_callback(lambda _: remote.connection.close())
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the session is closed", "open another with AsyncSession.open")
