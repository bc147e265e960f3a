"""Runs asyncio calls in threads, each over a connection of its own. Cancelling a call cuts its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeVar, final

from milkglass.client.remote.connection import Connection
from milkglass.client.remote.remote import Remote
from milkglass.errors import UsageError

T = TypeVar("T")
_connection: ContextVar[Connection] = ContextVar("the connection of the call that a thread works for")


class ThreadRemote(Remote):
    """Reaches a server over the connection of the call that the thread works for."""

    connection = property(lambda self: _connection.get())  # type: ignore[assignment]

    def __init__(self) -> None: ...


@final
class Threads:
    """Runs calls to one server in threads, each over a connection of its own."""

    def __init__(self, first_connection: Connection, connect: Callable[[], Connection]) -> None:
        """Prepares the calls. `first_connection` is open already, and `connect` opens another one."""
        self._connect, self._closed = connect, False
        self._idle, self._busy, self._running = [first_connection], set[Connection](), set[asyncio.Future[Any]]()

    async def close(self) -> None:
        """Ends the calls that are running, and closes all connections."""
        self._closed, connections = True, [*self._idle, *self._busy]
        for connection in self._busy:
            connection.give_up()
        await asyncio.gather(*self._running, return_exceptions=True)
        for connection in connections:
            connection.close()

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread over a connection of its own, and returns its result."""
        async with self._borrow_connection() as connection:
            return await self._run_in_thread(connection, work)

    async def iterate(self, iterable: Any) -> AsyncGenerator[Any, None]:
        """Yields the elements of an iterable, each computed in a thread. Closes the iterable when the loop is left."""
        pieces = iter(iterable)
        async with self._borrow_connection() as connection:
            try:
                while piece := await self._run_in_thread(connection, lambda: list(islice(pieces, 1))):
                    yield piece[0]
            finally:
                if not connection.is_given_up:  # else the thread that is in it still closes it
                    await self._run_in_thread(connection, iterable.close)

    @asynccontextmanager
    async def _borrow_connection(self) -> AsyncIterator[Connection]:
        connection = self._idle.pop() if self._idle else self._connect()
        self._busy.add(connection)
        try:
            yield connection
        finally:
            self._busy.discard(connection)
            if not connection.is_given_up:
                self._idle.append(connection)

    async def _run_in_thread(self, connection: Connection, work: Callable[[], T]) -> T:
        """Runs `work` in a thread. When cancelled, cuts the connection at once and closes it when the thread ends.

        Raises UsageError if the session is closed.
        """
        if self._closed:
            raise UsageError("the session is closed", "open another with AsyncSession.open")

        def over_connection() -> T:
            _connection.set(connection)
            return work()

        thread = asyncio.ensure_future(asyncio.to_thread(over_connection))
        self._running.add(thread)
        thread.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            connection.give_up()
            thread.add_done_callback(lambda _: connection.close())
            raise
