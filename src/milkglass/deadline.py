"""A time at which long work on this thread ends, for work that takes no such argument.

    with until(time.monotonic() + 60):
        defence.split(...)             # raises JobFailed once the minute is over

`require_time` is called between steps of such work; without a deadline it does nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from milkglass.errors import JobFailed

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Ends the work in the block at a time of `time.monotonic`, or at that of an enclosing block if it is earlier."""
    token = _deadline.set(min(deadline, _deadline.get()))
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_left() -> float:
    """Returns the seconds until the deadline; inf without one."""
    return _deadline.get() - time.monotonic()


def require_time() -> None:
    """Raises JobFailed once the deadline has passed."""
    if seconds_left() <= 0:
        raise JobFailed("the time is over", "the same command with more time goes on")
