"""How long work says how far it is. One set of types, so that any part can be watched by any other.

`Progress` receives how much more is done (rows, bytes, texts), `Stage` names a part of the work and its size and
returns a `Progress`, `Log` receives a line of words. Size 0: unknown; the stage is over at the first call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW = 60.0  # seconds over which a speed is measured
Progress = Callable[[int], None]
Stage = Callable[[str, int], Progress]
Log = Callable[[str], None]


def no_progress(amount: int) -> None:
    """Receives how much more is done, and says nothing."""


def no_stage(name: str, size: int) -> Progress:
    """A stage that nobody watches."""
    return no_progress


def no_log(words: str) -> None:
    """Receives a line of words, and drops it."""


def duration(seconds: float) -> str:
    """A length of time in words, such as "2 min 5 s". seconds: finite."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


class TimeLeft:
    """How long the rest takes, by the speed of the last WINDOW seconds, so that a machine that becomes busy shows. The
    first step does not count: what is prepared before it can take longer than all of the rest.

    Attributes:
        total: how much there is to do.
    """

    def __init__(self, total: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self._clock = total, clock
        self._marks: deque[tuple[float, float]] = deque()

    def after(self, done: float) -> float | None:
        """Seconds that the rest takes, now that so much is done. None before there is a speed."""
        now = self._clock()
        if done > 0 and self._marks and self._marks[0][1] == 0:
            self._marks.clear()
        self._marks.append((now, done))
        while len(self._marks) > 2 and self._marks[1][0] < now - WINDOW:
            self._marks.popleft()
        (then, before) = self._marks[0]
        return None if done <= before else (self.total - done) * (now - then) / (done - before)
