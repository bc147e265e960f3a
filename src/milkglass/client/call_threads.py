"""Calls of a session in threads, for asyncio: each over a connection of its own, which ends when the call is cancelled.

A session's work blocks: it encodes, and it waits for a server. Here it runs in threads of the session's own, so that a
job that is waited for does not take the threads of the application. Connections are kept and used again.

What is cancelled sends nothing more: its connection is cut and every further request over it is refused. Work on this
machine that has begun, such as encoding a file, ends in its thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from milkglass.client.codec.conversation import Message
from milkglass.client.key.file import UnlockedKey
from milkglass.client.remote.remote import Remote, Sampling
from milkglass.client.results import Answer
from milkglass.client.session import Session
from milkglass.errors import UsageError

T = TypeVar("T")
MOST = 64  # calls at once; more wait
_END = object()


class SessionCall(Session):
    """The session of one call. Its key and codec are those of all calls; what is noted in the key is noted for all."""

    def __init__(self, shared: Session) -> None:
        self._shared = shared  # the key stays there: another call may note something in it at this moment
        self.codec, self.remote, self._notice = shared.codec, shared.remote, shared._notice

    @property
    def unlocked(self) -> UnlockedKey:
        return self._shared.unlocked

    @unlocked.setter
    def unlocked(self, newer: UnlockedKey) -> None:
        self._shared.unlocked = newer

    def turn(self, model: str, turns: list[Message], sampling: Sampling | None) -> Answer:
        """The answer to a conversation with a model that was described already."""
        return self._answer(model, self.codec.encode_chat(turns), sampling)


class CallThreads:
    """The threads and connections of a session."""

    def __init__(self, shared: Session, connect: Callable[[], Remote]) -> None:
        """connect: opens another connection to the same server."""
        self._shared, self._connect = shared, connect
        self._executor = ThreadPoolExecutor(MOST, thread_name_prefix="milkglass-call")
        self._idle, self._busy = [shared.remote], set[Remote]()
        self._closed = False

    def call(self) -> SessionCall:
        return SessionCall(self._shared)

    async def run(self, work: Callable[[SessionCall], T], call: SessionCall | None = None) -> T:
        """What `work` returns; call: the one that goes on."""
        call = call or self.call()
        remote = call.remote = self._take()
        try:
            return await self._step(remote, work, call)
        finally:
            self._give(remote)

    async def stream(
        self, begin: Callable[[SessionCall], Generator[T]], call: SessionCall | None = None
    ) -> AsyncGenerator[T, None]:
        """What the generator yields. It is closed where the loop over it is left."""
        call = call or self.call()
        remote = call.remote = self._take()
        try:
            pieces = begin(call)
            step: Callable[[], Any] = partial(next, pieces, _END)
            try:
                while (piece := await self._step(remote, step)) is not _END:
                    yield piece
            finally:
                if not remote.connection.given_up:  # else the thread that is in it still closes it
                    await self._step(remote, pieces.close)
        finally:
            self._give(remote)

    async def close(self) -> None:
        """End all calls and wait for their threads."""
        self._closed = True
        for remote in self._busy:
            remote.connection.give_up()
        await asyncio.to_thread(self._executor.shutdown)
        for remote in self._idle:
            remote.connection.close()

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the session is closed", "open another with AsyncSession.open")

    async def _step(self, remote: Remote, work: Callable[..., T], *arguments: Any) -> T:
        self._require_open()
        running = self._executor.submit(work, *arguments)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            remote.connection.give_up()
            running.add_done_callback(lambda _: remote.connection.close())
            raise

    def _take(self) -> Remote:
        self._require_open()
        remote = self._idle.pop() if self._idle else self._connect()
        self._busy.add(remote)
        return remote

    def _give(self, remote: Remote) -> None:
        self._busy.discard(remote)
        if not remote.connection.given_up:
            self._idle.append(remote)
        elif self._closed:
            remote.connection.close()
