"""Reports the progress of long work. All parts share these types, so that any part can watch any other.

`Progress` receives the amount that was done since the last call (rows, bytes, texts). `Stage` receives the name and the
size of a part of the work and returns a `Progress`. Size 0 is an unknown size: the stage ends at its first call. `Log`
receives a line of words.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 60.0  # seconds over which a speed is measured
SILENCE_SECONDS = 9.0  # seconds after which a log says that work goes on
Progress = Callable[[int], None]
Stage = Callable[[str, int], Progress]
Log = Callable[[str], None]


def no_progress(amount: int) -> None:
    """Ignores the amount."""


def no_stage(name: str, size: int) -> Progress:
    """Returns a progress that ignores what it receives, for work that nobody watches."""
    return no_progress


def no_log(words: str) -> None:
    """Ignores the words."""


def duration_text(seconds: float) -> str:
    """Returns a finite length of time in words, such as "2 min 5 s"."""
    total = round(seconds)
    hours, minutes = divmod(total // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {total % 60} s" if minutes else f"{total} s"


class TimeLeft:
    """Estimates the remaining time from the speed of the last WINDOW_SECONDS, which follows the machine's load.

    The first step does not count, because the preparation before it can take longer than all the rest.
    """

    def __init__(self, total: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins without a measurement.

        Args:
            total: the amount of all the work, in any unit.
            clock: returns the time in seconds.
        """
        self.total, self._clock = total, clock
        self._measurements: deque[tuple[float, float]] = deque()

    def estimate(self, work_done: float) -> float | None:
        """Returns the seconds that the rest takes, given the amount done so far; None before a speed was measured."""
        now = self._clock()
        if work_done > 0 and self._measurements and self._measurements[0][1] == 0:
            self._measurements.clear()
        self._measurements.append((now, work_done))
        while len(self._measurements) > 2 and self._measurements[1][0] < now - WINDOW_SECONDS:
            self._measurements.popleft()
        start, amount = self._measurements[0]
        return None if work_done <= amount else (self.total - work_done) * (now - start) / (work_done - amount)


class Heartbeat:
    """Logs that work goes on whenever nothing was logged for `silence` seconds, from a thread of its own.

    Attributes:
        activity: what is being done, for the words; "" if nothing is known.
    """

    def __init__(self, log: Log, silence: float = SILENCE_SECONDS) -> None:
        self._log, self._silence, self.activity = log, silence, ""
        self._started_at = self._last_words_at = time.monotonic()
        self._end_event = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def note_words(self) -> None:
        """Notes that something was logged just now."""
        self._last_words_at = time.monotonic()

    def _beat(self) -> None:
        while not self._end_event.wait(min(1.0, self._silence / 4)):
            if time.monotonic() - self._last_words_at >= self._silence:
                self.note_words()
                prefix = f"{self.activity}: " if self.activity else ""
                self._log(f"{prefix}still at work, {duration_text(time.monotonic() - self._started_at)} in all so far")

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def end(self) -> None:
        """Stops the thread, and waits until it has ended."""
        self._end_event.set()
        self._thread.join()
