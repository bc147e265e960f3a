"""Deadlines of exchanges with a server, and server-sent events as they arrive.

When the time of an exchange is up, its connection is cut. httpx2's timeouts are of silence: a server that sends a byte
now and then never meets them. A thread therefore watches the clock and shuts the socket down, which ends every read and
write on it, of headers and of a body.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakSet

import httpx2

from milkglass.client.remote.strict_json import HINT
from milkglass.errors import RemoteError


@final
class Sockets:
    """The open sockets of one client, as httpcore2's `trace` extension reports them."""

    def __init__(self) -> None:
        self._open: WeakSet[socket.socket] = WeakSet()
        self.given_up = threading.Event()

    def trace(self, event: str, about: dict[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._open.add(about["return_value"].get_extra_info("socket"))
            if self.given_up.is_set():  # while this one was being opened
                self.shut()

    def shut(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):  # closed already
                # Not SSLSocket.shutdown, which drops the TLS state that a thread still reads with
                socket.socket.shutdown(one, socket.SHUT_RDWR)

    def give_up(self) -> None:
        """Shuts all sockets, and any that is opened from now on. Another thread may be using them."""
        self.given_up.set()
        self.shut()


@final
class Watch:
    """A deadline that can be moved while a thread waits for it.

    Attributes:
        seconds: how long the current part of the exchange may take.
        expired: whether the connection was cut.
    """

    def __init__(self, sockets: Sockets, seconds: float) -> None:
        self._sockets, self._changed = sockets, threading.Condition()
        self._due: float | None = None  # None: nothing is waited for
        self._over = self.expired = False
        self.extend(seconds)

    def extend(self, seconds: float) -> None:
        """Allows this many seconds from now on."""
        with self._changed:
            self.seconds, self._due = seconds, time.monotonic() + seconds
            self._changed.notify()

    def pause(self) -> None:
        """Stops the clock until `extend`."""
        with self._changed:
            self._due = None

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()

    def run(self) -> None:
        with self._changed:
            while not self._over:
                left = None if self._due is None else self._due - time.monotonic()
                if left is not None and left <= 0:
                    self.expired = True
                    self._sockets.shut()
                    return
                self._changed.wait(left)


@contextmanager
def watched(sockets: Sockets, seconds: float) -> Iterator[Watch]:
    """Cuts the connections of `sockets` after `seconds`, unless the block ends or extends the time before."""
    watch = Watch(sockets, seconds)
    threading.Thread(target=watch.run, name="milkglass-deadline", daemon=True).start()
    try:
        yield watch
    finally:
        watch.end()


MAX_EVENT = 4 << 20  # bytes of an event
MAX_COMMENTS = 256 << 10  # bytes that are no data, before an event or in an engine's whole answer
EVENT_ID = re.compile(r"[A-Za-z0-9_.-]{0,128}")


@final
@dataclass(frozen=True)
class ServerEvents:
    """An answer that is being read.

    Attributes:
        answer: the response, whose status and headers have arrived.
        watch: cuts the connection when its time is up.
        silence: seconds that an event may take, by default.
    """

    answer: httpx2.Response
    watch: Watch
    silence: float


def server_events(stream: ServerEvents, quiet: float | None = None) -> Iterator[tuple[str | None, str, str]]:
    """Yields (id, event, data) of each server-sent event.

    Args:
        quiet: seconds without an event after which the connection is cut. Comments are no events. The caller's time for
            an event does not count.

    Raises:
        RemoteError: an event is longer than MAX_EVENT, comments before one are longer than MAX_COMMENTS, or an id
            cannot be sent back in a header.
    """
    quiet = stream.silence if quiet is None else quiet
    number: str | None = None
    kind, data, size, comments = "message", list[str](), 0, 0
    stream.watch.extend(quiet)
    for line in _lines(stream.answer):
        size += len(line) + 1
        if size > MAX_EVENT:
            raise RemoteError(f"an event of the answer has more than {MAX_EVENT} bytes", HINT)
        comments += 0 if line.startswith("data") else len(line) + 1
        if comments > MAX_COMMENTS:
            raise RemoteError(f"the answer has more than {MAX_COMMENTS} bytes of comments before an event", HINT)
        if not line:
            if data:
                stream.watch.pause()
                yield number, kind, "\n".join(data)
                stream.watch.extend(quiet)
                size = comments = 0
            kind, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id":
            if not EVENT_ID.fullmatch(value):
                raise RemoteError("an event of the answer has no proper id", HINT)
            number = value


def _lines(answer: httpx2.Response) -> Iterator[str]:
    rest = b""
    for chunk in answer.iter_raw():
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r").decode("utf-8", "replace") for line in whole)
        if len(rest) > MAX_EVENT:
            raise RemoteError(f"a line of the answer has more than {MAX_EVENT} bytes", HINT)
    if rest:
        yield rest.decode("utf-8", "replace")
