"""How many connections a server keeps, and how long each may take. Knows nothing of HTTP."""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace
from typing import final

from milkglass.errors import UsageError

OPEN_FILES = 65_536  # wanted; a system that allows fewer gets fewer connections
OTHER_FILES = 128  # files that the server opens besides connections, at least


@final
@dataclass(frozen=True)
class Limits:
    """Of connections. Times are in seconds, rates in bytes a second.

    Attributes:
        total: connections at a time.
        per_address: of these from one address.
        reserved: connections from this machine beyond `total`, so that a health check is answered.
        backlog: connections that the kernel keeps waiting.
        handshake: time for the TLS handshake.
        head: time from the start of a connection, or from the last answer, to the end of a request's headers.
        window: time in which a body, or an answer that waits to be read, must progress.
        body_rate: least rate of a request's body over a window.
        body_grace: time that a body which is kept in memory may take, whatever its length.
        body_pace: rate that adds to this time: a longer body may take longer.
        send_rate: least rate at which a waiting answer is read, over a window.
        linger: time for the rest of a body whose request was answered already.
        tick: time between two looks at the deadlines.
    """

    total: int = 512
    per_address: int = 256
    reserved: int = 16
    backlog: int = 128
    handshake: float = 10.0
    head: float = 20.0
    window: float = 20.0
    body_rate: float = 1024.0
    body_grace: float = 30.0
    body_pace: float = 65_536.0
    send_rate: float = 1024.0
    linger: float = 20.0
    tick: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.per_address <= self.total:
            raise UsageError(
                f"{self.per_address} connections of one address do not fit into {self.total} in all",
                "give 1 at least, and no more than in all",
            )

    def body_time(self, size: int) -> float:
        """Seconds in which a body of `size` bytes must have arrived."""
        return self.body_grace + size / self.body_pace

    def within(self, open_files: int) -> Limits:
        """The same, with no more connections than `open_files` allow: each may need a file besides its socket."""
        total = min(self.total, max(1, (open_files - OTHER_FILES) // 2 - self.reserved))
        per_address = min(self.per_address, max(1, total // 2))
        return replace(self, total=total, per_address=per_address)


def raise_open_files() -> int:
    """Raise this process's limit of open files as far as the system lets it. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= expected:
        return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (expected, hard))
    return expected
