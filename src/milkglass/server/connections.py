"""Accepts connections below HTTP, up to the limits (`Limits` in settings.py), and closes those whose time is up.

A new connection takes the place of the oldest idle one, so that idle connections lock no one out. Deadlines are for a
request's headers, for its body's progress, and for reading the answer; uvicorn's own protocol has a deadline
only between two requests.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import fcntl
import logging
import socket
import ssl
import struct
import termios
from collections import Counter
from collections.abc import Callable
from typing import Any, final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from milkglass.server.logs import place_of
from milkglass.server.settings import Limits
from milkglass.system import is_loopback

log = logging.getLogger("milkglass.server")
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
MAX_BUFFERED_BYTES = 64 << 10  # bytes of an answer that wait for the end of a turn of the event loop


class Phase(enum.Enum):
    """Says what a connection is doing, which decides how long it may take."""

    HEAD = "waiting for a request's headers"
    BODY = "waiting for the rest of a request's body"
    WORK = "answering"
    LINGER = "answered, while the request's body is still coming"
    STREAM = "a WebSocket, whose deadlines are the application's"
    CLOSING = "closing"


@final
class BufferedTransport(asyncio.Transport):
    """Joins what is written within one turn of the event loop, so that it takes one call of the system and one packet.

    An answer's head, its first part and its end are often written in one turn. On loopback a call of the system also
    wakes the receiver, and these calls are the largest part of what a short answer costs (the log, 2026-11-27).
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = transport, loop
        self._waiting = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting += data
        if len(self._waiting) >= MAX_BUFFERED_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._transport.write(bytes(self._waiting))
            self._waiting.clear()

    def unwrap(self) -> asyncio.Transport:
        """Returns the transport below, for a protocol that writes whole messages. What waits is written first."""
        self._flush()
        return self._transport

    def get_write_buffer_size(self) -> int:
        return len(self._waiting) + self._transport.get_write_buffer_size()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._waiting.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()


@final
class ServerConnection(H11Protocol):
    """Serves HTTP on one connection, and closes it when a deadline passes.

    `check` must be called about once a second. `on_lost` is called once, when the connection is gone.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: Limits,
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._limits, self._on_lost = limits, on_lost
        self.has_answered = False
        self._phase: Phase | None = None  # as `check` last saw it; None: one has begun since
        self._phase_since = self.loop.time()
        self._received_bytes = 0  # in all
        self._bytes_at_window_start = 0  # of these at the start of the window
        self._unread_bytes: int | None = None  # that waited to be read when the window began; None: no window
        self._unread_since = 0.0
        self._is_upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(BufferedTransport(transport, self.loop))

    @property
    def is_idle(self) -> bool:
        """Returns whether closing the connection would lose no work: no request is in progress."""
        return self._current_phase() in (Phase.HEAD, Phase.LINGER)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        self.has_answered = True
        self._phase = None  # a request that came and was answered between two checks
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._unread_bytes = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hands the transport over to another protocol.

        That protocol must report when the connection is gone, and must not answer pings while the peer reads nothing,
        since the answers would fill the memory.
        """
        self._is_upgraded = self.has_answered = True
        assert isinstance(self.transport, BufferedTransport)
        self.transport = self.transport.unwrap()
        super().handle_websocket_upgrade(event)
        successor: Any = self.transport.get_protocol()
        on_connection_lost, on_ping = successor.connection_lost, successor.handle_ping

        def connection_lost(exc: Exception | None) -> None:
            on_connection_lost(exc)
            self._on_lost()

        def handle_ping() -> None:
            if successor.writable.is_set():
                on_ping()
            else:
                successor.conn.data_to_send()  # taken out and dropped: the answers that are due

        successor.connection_lost, successor.handle_ping = connection_lost, handle_ping

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP. If an answer has begun, or has no body (HEAD), it closes the connection."""
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering:
            cycle.disconnected = True  # its own answer would come after this one
            cycle.message_event.set()
        must_stay_silent = is_answering and (cycle.response_started or self.scope["method"] == "HEAD")
        if must_stay_silent or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def abort(self) -> None:
        """Closes the connection at once, without an answer."""
        self.transport.abort()

    def check(self, now: float) -> str | None:
        """Closes the connection if a deadline has passed, and returns that deadline in words, or None.

        Args:
            now: the event loop's time.
        """
        deadline = self._missed_deadline(now)
        if deadline:
            self.transport.abort()
        return deadline

    def _missed_deadline(self, now: float) -> str | None:
        phase = self._current_phase()
        if phase is not self._phase:
            self._phase, self._phase_since, self._bytes_at_window_start = phase, now, self._received_bytes
        if self._is_unread(now):
            return "an answer was not read"
        seconds = now - self._phase_since
        if phase is Phase.HEAD and seconds > self._limits.head_seconds:
            return "no request came"
        if phase is Phase.LINGER and seconds > self._limits.linger_seconds:
            return "a refused request did not end"
        if phase is Phase.BODY and self._is_stalled(now):
            return "a request's body stopped coming"
        return None

    def _current_phase(self) -> Phase:
        if self.transport is None or self.transport.is_closing():
            return Phase.CLOSING
        if self._is_upgraded:
            return Phase.STREAM
        if self.conn.their_state is h11.IDLE:
            return Phase.HEAD
        is_answered = self.cycle is None or self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.LINGER if is_answered else Phase.BODY
        return Phase.CLOSING if is_answered else Phase.WORK

    def _is_stalled(self, now: float) -> bool:
        """Returns whether the body arrives too slowly. Time in which the server does not read is not counted."""
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            self._phase_since, self._bytes_at_window_start = now, self._received_bytes
            return False
        if now - self._phase_since < self._limits.window_seconds:
            return False
        is_late = self._received_bytes - self._bytes_at_window_start < self._limits.min_body_rate * (
            now - self._phase_since
        )
        self._phase_since, self._bytes_at_window_start = now, self._received_bytes
        return is_late

    def _is_unread(self, now: float) -> bool:
        """Returns whether bytes of an answer wait, here or in the kernel, and the peer reads too few of them.

        While the application may add more to the answer, and is not held up by the peer, the result is False.
        """
        unread_bytes = self.transport.get_write_buffer_size()
        has_more = self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing()
        if not unread_bytes or (has_more and not self.flow.write_paused):
            self._unread_bytes = None
            return False
        unread_bytes += self._unacknowledged_bytes()
        if self._unread_bytes is None or unread_bytes > self._unread_bytes:
            self._unread_bytes, self._unread_since = unread_bytes, now
        if now - self._unread_since < self._limits.window_seconds:
            return False
        is_late = self._unread_bytes - unread_bytes < self._limits.min_send_rate * (now - self._unread_since)
        self._unread_bytes, self._unread_since = unread_bytes, now
        return is_late

    def _unacknowledged_bytes(self) -> int:
        """Returns how many bytes the peer has not acknowledged."""
        sock = self.transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return 0
        try:
            packed_count = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        except OSError:
            return 0  # a system that does not say so of sockets: what waits here counts alone
        return int(struct.unpack("i", packed_count)[0])


@final
class AcceptedConnection:
    """Tracks one accepted connection. `protocol` is None during the TLS handshake."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.protocol: ServerConnection | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Returns whether closing the connection would lose no work, as during the handshake."""
        return self.protocol is None or self.protocol.is_idle

    @property
    def has_answered(self) -> bool:
        """Returns whether a request was answered on the connection."""
        return self.protocol is not None and self.protocol.has_answered

    def close(self) -> None:
        """Closes the connection at once, also during the handshake."""
        if self.protocol is not None:
            self.protocol.abort()
        elif self.task is not None:
            self.task.cancel()


@final
class Acceptor:
    """Accepts connections from `start` to `close`.

    `make_protocol` receives the function that a protocol calls when its connection is gone.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Callable[[], None]], ServerConnection],
        limits: Limits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener, self._make_protocol, self._limits, self._tls = listener, make_protocol, limits, tls
        self._connections: dict[AcceptedConnection, None] = {}  # the oldest first
        self._count_by_address: Counter[str] = Counter()  # connections of each address
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to accept and to watch connections, in the running event loop."""
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._accept()), loop.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(_log_failure)

    def close(self) -> None:
        """Stops accepting connections. Those whose handshake is done stay."""
        for task in self._tasks:
            task.cancel()
        self._listener.close()
        for client in list(self._connections):
            if client.protocol is None:
                client.close()

    async def wait_closed(self) -> None:
        """Waits until both tasks have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._connections)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    log.warning("no connection can be accepted: %s", errno.errorcode[error.errno])
                    self._close_oldest(None)
                if error.errno != errno.ECONNABORTED:  # any other may last, and must not keep the loop busy
                    await asyncio.sleep(self._limits.tick_seconds)
                continue
            self._admit(connection, str(address[0]))
            await asyncio.sleep(0)  # sock_accept does not yield while connections are waiting

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Serves a new connection, or closes it if there is no room."""
        if not self._make_room(address):
            connection.close()
            log.warning("a connection was refused: %d are open and busy", len(self))
            return
        client = AcceptedConnection(address)
        self._connections[client] = None
        self._count_by_address[address] += 1
        client.task = asyncio.get_running_loop().create_task(self._connect(connection, client))

    def _make_room(self, address: str) -> bool:
        """Returns whether a connection of this address may be opened, after closing an idle one if it must."""
        reserved = self._limits.reserved if is_loopback(address) else 0
        if self._count_by_address[address] >= self._limits.per_address + reserved and not self._close_oldest(address):
            return False
        return len(self) < self._limits.total + reserved or self._close_oldest(None)

    def _close_oldest(self, address: str | None) -> bool:
        """Closes the oldest idle connection of an address, and returns whether there was one.

        Args:
            address: None: the address with the most connections of those that have an idle one.
        """
        for candidate in [name for name, _ in self._count_by_address.most_common()] if address is None else [address]:
            if (oldest := self._oldest_idle(candidate)) is not None:
                self._forget(oldest)
                oldest.close()
                return True
        return False

    def _oldest_idle(self, address: str) -> AcceptedConnection | None:
        """Returns an address's oldest idle connection, preferably one on which no request was answered yet.

        In a flood such a one is among the first, so that a new connection does not cost a search of all.
        """
        oldest = None
        for client in self._connections:
            if client.address == address and client.is_idle:
                if not client.has_answered:
                    return client
                oldest = oldest or client
        return oldest

    def _forget(self, client: AcceptedConnection) -> None:
        if self._connections.pop(client, self) is self:
            return  # forgotten already
        self._count_by_address[client.address] -= 1
        if not self._count_by_address[client.address]:
            del self._count_by_address[client.address]

    async def _connect(self, connection: socket.socket, client: AcceptedConnection) -> None:
        """Does the TLS handshake, if there is one, then starts the protocol."""
        protocol = self._make_protocol(lambda: self._forget(client))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.handshake_seconds if self._tls else None,
                ssl_shutdown_timeout=self._limits.handshake_seconds if self._tls else None,
            )
        except ssl.SSLError as error:
            log.info("a TLS handshake failed (%s): the client refused the certificate, or speaks no TLS", error.reason)
        except OSError as error:  # the client left, as one without a lease for an attested key (attest/channel.py) does
            log.debug("a connection ended before its first request: %s", type(error).__name__)
        else:
            client.protocol = protocol
        finally:
            if client.protocol is None:
                self._forget(client)
                connection.close()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limits.tick_seconds)
            now = loop.time()
            for client in list(self._connections):
                fault = self._check(client, now)
                if fault:
                    log.info("a connection was closed: %s", fault)

    def _check(self, client: AcceptedConnection, now: float) -> str | None:
        """Checks one connection. An error in it does not end the watch over the others."""
        try:
            return client.protocol.check(now) if client.protocol is not None else None
        except Exception as error:  # noqa: BLE001
            log.error("a connection could not be checked %s", place_of(error))
            self._forget(client)
            client.close()
            return "it could not be checked"


def _log_failure(task: asyncio.Task[None]) -> None:
    """Logs the error of a task that should not have ended, and for which no one waits."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.critical("connections are no longer looked after: %s", place_of(error))
