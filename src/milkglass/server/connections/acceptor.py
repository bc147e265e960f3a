"""Accepts connections up to the limits, and closes those whose time is up.

A new connection takes the place of the oldest idle one, so that idle connections lock no one out.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import final

from milkglass.server.connections.connection import ServerConnection
from milkglass.server.connections.logs import place_of
from milkglass.server.settings import Limits
from milkglass.system import is_loopback

log = logging.getLogger("milkglass.server")
NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@final
class ClientConnection:
    """One accepted socket.

    Attributes:
        address: the peer's.
        protocol: None during the TLS handshake.
        task: makes the protocol.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.protocol: ServerConnection | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return self.protocol is None or self.protocol.idle

    @property
    def answered(self) -> bool:
        return self.protocol is not None and self.protocol.answered

    def close(self) -> None:
        if self.protocol is not None:
            self.protocol.abort()
        elif self.task is not None:
            self.task.cancel()


@final
class Acceptor:
    """Accepts connections from `start` to `close`.

    `make` returns the protocol of a new connection. The protocol calls `make`'s argument when the connection is gone.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[Callable[[], None]], ServerConnection],
        limits: Limits,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._listener, self._make, self._limits, self._context = listener, make, limits, context
        self._connections: dict[ClientConnection, None] = {}  # the oldest first
        self._of: Counter[str] = Counter()  # clients of each address
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._accept()), loop.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(_report)

    def close(self) -> None:
        """Stops accepting connections. Those whose handshake is done stay."""
        for task in self._tasks:
            task.cancel()
        self._listener.close()
        for client in list(self._connections):
            if client.protocol is None:
                client.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._connections)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in NO_FILES:
                    log.warning("no connection can be accepted: %s", errno.errorcode[error.errno])
                    self._close_oldest(None)
                if error.errno != errno.ECONNABORTED:  # any other may last, and must not keep the loop busy
                    await asyncio.sleep(self._limits.tick)
                continue
            self._admit(connection, str(address[0]))
            await asyncio.sleep(0)  # sock_accept does not yield while connections are waiting

    def _admit(self, connection: socket.socket, address: str) -> None:
        if not self._make_room(address):
            connection.close()
            log.warning("a connection was refused: %d are open and busy", len(self))
            return
        client = ClientConnection(address)
        self._connections[client] = None
        self._of[address] += 1
        client.task = asyncio.get_running_loop().create_task(self._connect(connection, client))

    def _make_room(self, address: str) -> bool:
        extra = self._limits.reserved if is_loopback(address) else 0
        if self._of[address] >= self._limits.per_address + extra and not self._close_oldest(address):
            return False
        return len(self) < self._limits.total + extra or self._close_oldest(None)

    def _close_oldest(self, address: str | None) -> bool:
        """Closes the oldest idle connection of an address. None: of the address with the most connections."""
        for peer in [name for name, _ in self._of.most_common()] if address is None else [address]:
            if (gone := self._oldest(peer)) is not None:
                self._forget(gone)
                gone.close()
                return True
        return False

    def _oldest(self, address: str) -> ClientConnection | None:
        """Returns an address's oldest idle connection, one that was never answered if there is such a one.

        In a flood that one is among the first, so that a new connection does not cost a search of all.
        """
        answered = None
        for client in self._connections:
            if client.address == address and client.idle:
                if not client.answered:
                    return client
                answered = answered or client
        return answered

    def _forget(self, client: ClientConnection) -> None:
        if self._connections.pop(client, self) is self:
            return  # forgotten already
        self._of[client.address] -= 1
        if not self._of[client.address]:
            del self._of[client.address]

    async def _connect(self, connection: socket.socket, client: ClientConnection) -> None:
        """Does the TLS handshake, if there is one, then starts the client's protocol."""
        protocol = self._make(lambda: self._forget(client))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.handshake if self._context else None,
                ssl_shutdown_timeout=self._limits.handshake if self._context else None,
            )
        except OSError as error:
            log.info("a connection ended before its first request: %s", type(error).__name__)
        else:
            client.protocol = protocol
        finally:
            if client.protocol is None:
                self._forget(client)
                connection.close()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limits.tick)
            now = loop.time()
            for client in list(self._connections):
                late = self._check(client, now)
                if late:
                    log.info("a connection was closed: %s", late)

    def _check(self, client: ClientConnection, now: float) -> str | None:
        """Checks one connection. An error in it does not end the watch over the others."""
        try:
            return client.protocol.check(now) if client.protocol is not None else None
        except Exception as error:  # noqa: BLE001
            log.error("a connection could not be checked %s", place_of(error))
            self._forget(client)
            client.close()
            return "it could not be checked"


def _report(task: asyncio.Task[None]) -> None:
    """Logs the error of a task that should not have ended, and for which no one waits."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.critical("connections are no longer looked after: %s", place_of(error))
