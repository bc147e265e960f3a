"""`Session` for asyncio: the same methods, awaited.

    async with await AsyncSession.open("my.mgkey", passphrase, "https://gpu.example:8420", token) as session:
        job = await session.finetune("model-1a2b3c4d", "train.jsonl", n_epochs=3)
        for result in await session.classify(await job.wait(), ["is it safe?"]):
            print(result.label, result.probability)
        async for piece in await session.generate("model-5e6f7a8b", "Dear all,"):
            print(piece, end="")

Each method runs `Session`'s in a thread (`asyncio.to_thread`), over its own connection, so that calls can run at once.
Cancelling a call cuts its connection: it sends nothing more. `stage` and `notice` are called in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, closing
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from milkglass.client.codec.codec import Codec
from milkglass.client.key.file import UnlockedKey
from milkglass.client.remote.remote import Remote
from milkglass.client.results import Answer, Conversation, Job
from milkglass.client.session import Session
from milkglass.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
_END: Any = object()


class _Call(Session):
    """The session of one call, with its own connection. What it records in the key is shared by all calls."""

    def __init__(self, shared: Session) -> None:
        self._shared, self.codec, self.remote, self._notice = shared, shared.codec, shared.remote, shared._notice

    @property
    def unlocked(self) -> UnlockedKey:
        return self._shared.unlocked

    @unlocked.setter
    def unlocked(self, newer: UnlockedKey) -> None:
        self._shared.unlocked = newer


def _awaited(
    verb: Callable[Concatenate[Session, P], T], wrap: Callable[[AsyncSession, _Call, T], R]
) -> Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, R]]:
    """Returns a coroutine function that runs a method of `Session` and passes its result to `wrap`."""

    @wraps(verb)
    async def run(self: AsyncSession, /, *arguments: P.args, **options: P.kwargs) -> R:
        call = _Call(self._session)
        return wrap(self, call, await self._run(call, lambda: verb(call, *arguments, **options)))

    return run


class AsyncAnswer:
    """`Answer` for asyncio. The request starts with the first piece, and ends when the answer is closed or dropped."""

    def __init__(self, session: AsyncSession, call: _Call, answer: Answer) -> None:
        def pieces() -> Iterator[str]:
            with closing(answer):
                yield from answer

        self._answer, self._pieces = answer, session._each(call, pieces)

    prompt_tokens = property(lambda self: int(self._answer.prompt_tokens), doc="How many ids were sent.")
    ids = property(lambda self: list[int](self._answer.ids), doc="The scrambled ids that came back so far.")
    text = property(lambda self: str(self._answer.text), doc="What was read so far.")
    tokens = property(lambda self: int(self._answer.tokens), doc="How many ids came back so far.")

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def whole(self) -> str:
        """Waits for the end, and returns the whole text."""
        async for _ in self:
            pass
        return self._answer.text

    async def close(self) -> None:
        """Ends the request, without waiting for the rest."""
        await self._pieces.aclose()


class AsyncJob:
    """`Job` for asyncio. Cancelling a task that waits for the job does not cancel the job on the server."""

    def __init__(self, session: AsyncSession, call: _Call, job: Job) -> None:
        self._session, self._call, self.id, self.task, self.status = session, call, job.id, job.task, job.status

    def follow(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the job's events until it ends, past ones first (`Remote.follow`)."""
        call = _Call(self._call)
        return self._session._each(call, lambda: self._of(call).follow())

    async def wait(self) -> str:
        """Waits for the job, and returns its model's id on the server. Raises JobFailed if it did not succeed."""
        call = _Call(self._call)
        return await self._session._run(call, lambda: self._of(call).wait())

    async def cancel(self) -> None:
        """Cancels the job on the server."""
        call = _Call(self._call)
        await self._session._run(call, lambda: self._of(call).cancel())

    def _of(self, call: _Call) -> Job:
        return Job(call.remote, self.id, self.task, self.status)


class AsyncConversation:
    """`Conversation` for asyncio, one turn at a time. A turn that fails or is cancelled leaves it unchanged."""

    def __init__(self, session: AsyncSession, call: _Call, conversation: Conversation) -> None:
        self._session, self._call, self._conversation, self._turn = session, call, conversation, asyncio.Lock()

    turns = property(lambda self: self._conversation.turns, doc="All messages so far.")

    def clear(self) -> None:
        """Starts again with the system's message."""
        self._conversation.clear()

    async def say(self, text: str) -> AsyncGenerator[str, None]:
        """Yields the answer to a message in pieces. The turn joins the conversation when the answer is complete."""
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
        self._tuning = asyncio.Lock()
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

    @property
    def unlocked(self) -> UnlockedKey:
        """Returns the key file, which is written when label names or scales are recorded in it."""
        return self._session.unlocked

    @property
    def codec(self) -> Codec:
        """Returns the codec. Several threads may use it."""
        return self._session.codec

    describe = _awaited(Session.describe, lambda session, call, result: result)
    classify = _awaited(Session.classify, lambda session, call, result: result)
    prompt = _awaited(Session.prompt, lambda session, call, result: result)
    require_generator = _awaited(Session.require_generator, lambda session, call, result: result)
    generate = _awaited(Session.generate, AsyncAnswer)
    chat = _awaited(Session.chat, AsyncConversation)

    @wraps(Session.finetune)
    async def finetune(self, *arguments: Any, **options: Any) -> AsyncJob:
        async with self._tuning:  # one after the other: each notes label names in the key
            call = _Call(self._session)
            return AsyncJob(self, call, await self._run(call, lambda: call.finetune(*arguments, **options)))

    async def _run(self, call: _Call, work: Callable[[], T]) -> T:
        async with self._connected(call):
            return await self._step(call.remote, work)

    async def _each(self, call: _Call, begin: Callable[[], Iterator[T]]) -> AsyncGenerator[T, None]:
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
    async def _connected(self, call: _Call) -> AsyncIterator[Remote]:
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
