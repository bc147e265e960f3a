"""A watch over one exchange with a server: when its time is up, the connection is cut, whatever it is waiting for.

httpx2's timeouts are of silence: a server that sends a byte now and then never meets them. So a thread looks at the
clock and shuts the socket down, which ends every read and write on it, of headers as well as of a body.

Out of scope: what is sent, and what follows from a cut.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakSet


@final
class Sockets:
    """The open sockets of one client, as httpcore2's `trace` extension reports them."""

    def __init__(self) -> None:
        self._open: WeakSet[socket.socket] = WeakSet()

    def trace(self, event: str, about: dict[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._open.add(about["return_value"].get_extra_info("socket"))

    def shut(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):  # closed already
                socket.socket.shutdown(
                    one, socket.SHUT_RDWR
                )  # not SSLSocket's own, which waits for nothing but says so


@final
class Watch:
    """A deadline that can be moved while a thread waits for it.

    Attributes:
        seconds: how long the part of the exchange that is under way may take.
        expired: whether the connection was cut.
    """

    def __init__(self, sockets: Sockets, seconds: float) -> None:
        self._sockets, self._changed = sockets, threading.Condition()
        self._due: float | None = None  # None: nothing is waited for
        self._over = self.expired = False
        self.extend(seconds)

    def extend(self, seconds: float) -> None:
        """From now on so many seconds are left."""
        with self._changed:
            self.seconds, self._due = seconds, time.monotonic() + seconds
            self._changed.notify()

    def pause(self) -> None:
        """No time passes until `extend`."""
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
    """Cut the connections of `sockets` after so many seconds, unless the block ends or extends the time before."""
    watch = Watch(sockets, seconds)
    threading.Thread(target=watch.run, name="milkglass-deadline", daemon=True).start()
    try:
        yield watch
    finally:
        watch.end()
