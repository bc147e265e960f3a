"""One HTTP connection with deadlines for a request's headers, for its body's progress, and for reading the answer.

uvicorn's own protocol has a deadline between two requests and none within one.
"""

from __future__ import annotations

import enum
import fcntl
import struct
import termios
from collections.abc import Callable
from typing import Any, final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from milkglass.server.settings import Limits


class Phase(enum.Enum):
    HEAD = "waiting for a request's headers"
    BODY = "waiting for the rest of a request's body"
    WORK = "answering"
    LINGER = "answered, while the request's body is still coming"
    STREAM = "a WebSocket, whose deadlines are the application's"
    CLOSING = "closing"


@final
class ServerConnection(H11Protocol):
    """One HTTP connection. `check` is called about once a second, and calls `on_lost` once when the connection is gone.

    Attributes:
        answered: whether a request was answered on it.
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
        self.answered = False
        self._phase: Phase | None = None  # as `check` last saw it; None: one has begun since
        self._since = self.loop.time()
        self._received = 0  # bytes, in all
        self._mark = 0  # of these at the start of the window
        self._unread: int | None = None  # bytes that waited to be read at the start of the window; None: no window
        self._unread_since = 0.0
        self._upgraded = False

    @property
    def idle(self) -> bool:
        """Returns whether closing the connection would lose no work: no request is in progress."""
        return self._current() in (Phase.HEAD, Phase.LINGER)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        self.answered = True
        self._phase = None  # a request that came and was answered between two checks
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._unread = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hands the transport over to another protocol.

        That protocol must report when the connection is gone, and must not answer pings while the peer reads nothing,
        since the answers would fill the memory.
        """
        self._upgraded = self.answered = True
        super().handle_websocket_upgrade(event)
        successor: Any = self.transport.get_protocol()
        lost, pinged = successor.connection_lost, successor.handle_ping

        def connection_lost(exc: Exception | None) -> None:
            lost(exc)
            self._on_lost()

        def handle_ping() -> None:
            if successor.writable.is_set():
                pinged()
            else:
                successor.conn.data_to_send()  # taken out and dropped: the answers that are due

        successor.connection_lost, successor.handle_ping = connection_lost, handle_ping

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP. If an answer has begun, or has no body (HEAD), it closes the connection."""
        cycle = self.cycle
        running = cycle is not None and not cycle.response_complete
        if running:
            cycle.disconnected = True  # its own answer would come after ours
            cycle.message_event.set()
        silent = running and (cycle.response_started or self.scope["method"] == "HEAD")
        if silent or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def abort(self) -> None:
        self.transport.abort()

    def check(self, now: float) -> str | None:
        """Closes the connection if a deadline has passed, and returns which one in words."""
        late = self._late(now)
        if late:
            self.transport.abort()
        return late

    def _late(self, now: float) -> str | None:
        phase = self._current()
        if phase is not self._phase:
            self._phase, self._since, self._mark = phase, now, self._received
        if self._is_unread(now):
            return "an answer was not read"
        waited = now - self._since
        if phase is Phase.HEAD and waited > self._limits.head:
            return "no request came"
        if phase is Phase.LINGER and waited > self._limits.linger:
            return "a refused request did not end"
        if phase is Phase.BODY and self._is_stalled(now):
            return "a request's body stopped coming"
        return None

    def _current(self) -> Phase:
        if self.transport is None or self.transport.is_closing():
            return Phase.CLOSING
        if self._upgraded:
            return Phase.STREAM
        if self.conn.their_state is h11.IDLE:
            return Phase.HEAD
        answered = self.cycle is None or self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.LINGER if answered else Phase.BODY
        return Phase.CLOSING if answered else Phase.WORK

    def _is_stalled(self, now: float) -> bool:
        """Returns whether the body arrives too slowly. Time in which the server does not read is not counted."""
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            self._since, self._mark = now, self._received
            return False
        if now - self._since < self._limits.window:
            return False
        late = self._received - self._mark < self._limits.body_rate * (now - self._since)
        self._since, self._mark = now, self._received
        return late

    def _is_unread(self, now: float) -> bool:
        """Returns whether sent bytes wait, here or in the kernel, and the peer reads too few of them.

        It is not asked while the application may add more.
        """
        waiting = self.transport.get_write_buffer_size()
        more = self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing()
        if not waiting or (more and not self.flow.write_paused):
            self._unread = None
            return False
        waiting += self._in_kernel()
        if self._unread is None or waiting > self._unread:
            self._unread, self._unread_since = waiting, now
        if now - self._unread_since < self._limits.window:
            return False
        late = self._unread - waiting < self._limits.send_rate * (now - self._unread_since)
        self._unread, self._unread_since = waiting, now
        return late

    def _in_kernel(self) -> int:
        """Returns the number of bytes that the peer has not acknowledged."""
        file = self.transport.get_extra_info("socket")
        if file is None or file.fileno() < 0:
            return 0
        try:
            raw = fcntl.ioctl(file.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        except OSError:
            return 0  # a system that does not say so of sockets: what waits here counts alone
        return int(struct.unpack("i", raw)[0])
