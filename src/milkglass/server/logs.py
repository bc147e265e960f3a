"""Limits what the server's log may contain and how fast it may grow.

Anyone who reaches the port can cause a log line. Lines of one kind are therefore limited in number, so that the log
cannot fill a disk quickly. An exception is logged by its kind and place: its message may quote a request.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

BURST_LINES = 500  # lines of one kind that are logged at once
LINES_PER_SECOND = 10.0  # further lines of one kind each second
MAX_KINDS = 1000  # kinds that are counted separately; all others count as one
MAX_LINE_CHARACTERS = 2000  # longer lines are cut


def place_of(error: BaseException) -> str:
    """Returns the kind of an error and where it was raised, without its message, which may quote ids."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {place}"


@dataclass
class _Bucket:
    """Counts the lines of one kind: a token bucket, which refills with time.

    Attributes:
        lines_left: how many lines may be logged now.
        filled_at: when it was last refilled, on the throttle's clock.
        dropped: how many lines were left out since the last one that was logged.
    """

    lines_left: float = BURST_LINES
    filled_at: float = 0.0
    dropped: int = 0


@final
class Throttle(logging.Filter):
    """Limits log lines of one kind: those with equal logger, level and message template.

    It must be added to a handler, since only a handler's filters see the records of every logger.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, int, str], _Bucket] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is logged, after shortening it and noting how many were left out before it."""
        if isinstance(record.exc_info, tuple) and isinstance(record.exc_info[1], asyncio.CancelledError):
            return False  # a request that a server ended as it stopped is no fault
        with self._lock:
            bucket = self._bucket(record)
            now = self._clock()
            bucket.lines_left = min(BURST_LINES, bucket.lines_left + (now - bucket.filled_at) * LINES_PER_SECOND)
            bucket.filled_at = now
            if bucket.lines_left < 1:
                bucket.dropped += 1
                return False
            bucket.lines_left -= 1
            dropped, bucket.dropped = bucket.dropped, 0
        _shorten(record, dropped)
        return True

    def _bucket(self, record: logging.LogRecord) -> _Bucket:
        key = (record.name, record.levelno, str(record.msg)[:MAX_LINE_CHARACTERS])
        if key not in self._buckets and len(self._buckets) >= MAX_KINDS:
            key = ("", 0, "")
        return self._buckets.setdefault(key, _Bucket(filled_at=self._clock()))


def _shorten(record: logging.LogRecord, dropped: int) -> None:
    """Cuts a record's line to MAX_LINE_CHARACTERS, and puts an error's kind and place where its traceback would be."""
    try:
        text = record.getMessage()
    except (TypeError, ValueError, KeyError):
        # A library's template does not fit its values: this must not end the caller
        text = str(record.msg)
    if isinstance(record.exc_info, tuple) and record.exc_info[1] is not None:
        text = f"{text.splitlines()[0] if text else 'error'} {place_of(record.exc_info[1])}"
        record.exc_info = record.exc_text = None
    text = text if len(text) <= MAX_LINE_CHARACTERS else f"{text[:MAX_LINE_CHARACTERS]} ..."
    record.msg = f"{text} ({dropped} more lines of this kind were left out)" if dropped else text
    record.args = None


def configure(level: int = logging.INFO) -> None:
    """Logs to stderr, for a server of any kind. Does nothing if logging is configured already."""
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(Throttle())
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(level)
