"""Limits how long attacks take.

A budget counts one of three things: CPU seconds by default, so that an attack finds as much on a busy machine (recipes,
`milkglass ui`, `milkglass audit --records`, `lab.audit_defence`); the clock's seconds (all other audits); or work
(`Budget.of_work`, which `milkglass compare` uses). For work, an attack says what each of its steps costs in seconds of
one core of the machine on which attacks were timed. The sum is the same on every machine and in every run, so that a
budget of work always ends an attack at the same step. An attack asks its budget and ends by itself; `time_limit` ends
one that does not.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from milkglass.errors import UsageError

DEFAULT_BUDGET = "15m"  # two to five times the time that all strong attacks take on some thousands of sentences


class WorkClock:
    """Counts the work that attacks report, in place of time.

    Attributes:
        seconds: the seconds of work that were reported.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Returns the seconds of work so far, in place of a clock's time."""
        return self.seconds


@dataclass
class Budget:
    """Limits the time that an attack may take. An attack that has to stop early returns its best guess so far.

    An attack that asks `left` in a loop also reports by `spend` what the loop did.

    Attributes:
        seconds: how long the attack may take, from the moment at which the budget is made.
        progress: receives the share of the work that is done, from 0 to 1.
        stopped: returns whether the attack must end at once.
        clock: returns seconds: by default those of the CPU, over all threads of this process, so attacks must not use
            child processes. A `WorkClock` counts work.
    """

    seconds: float = float("inf")
    progress: Callable[[float], None] = lambda share: None  # noqa: E731
    stopped: Callable[[], bool] = lambda: False  # noqa: E731
    clock: Callable[[], float] = time.process_time
    _started: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    @classmethod
    def parse(cls, text: str, clock: Callable[[], float] = time.process_time) -> Budget:
        """Parses a text such as `90s`, `2m`, `1h` or `90` (seconds). Raises UsageError for others, and for zero."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
        if not match:
            raise UsageError(f"budget {text!r} is not a length of time", "give seconds, or 90s, 2m, 1h")
        if float(match[1]) == 0:
            raise UsageError(f"budget {text!r} is zero, more than 0 is needed", "give seconds, or 90s, 2m, 1h")
        return cls(float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]], clock=clock)

    @classmethod
    def of_work(cls, seconds: float, stopped: Callable[[], bool] = lambda: False) -> Budget:
        """Returns a budget of so many seconds of work, which ends an attack at the same step in every run.

        Args:
            seconds: seconds of work on one core of the machine on which attacks were timed.
            stopped: returns whether the attack must end at once.
        """
        return cls(seconds, stopped=stopped, clock=WorkClock())

    @property
    def counts_work(self) -> bool:
        """Returns whether the budget counts work, so that `spend` moves its clock on."""
        return isinstance(self.clock, WorkClock)

    def spend(self, seconds: float) -> None:
        """Counts work that was done (attacks/work.py). A budget of time ignores it."""
        if isinstance(self.clock, WorkClock):
            self.clock.seconds += seconds

    def left(self) -> float:
        """Returns the seconds that are left: 0 once `stopped` is true, and less than 0 after an overrun."""
        return 0.0 if self.stopped() else self._started + self.seconds - self.clock()

    def part(self, share: float, progress: Callable[[float], None] = lambda share: None) -> Budget:
        """Returns a budget of a part of the seconds that are left, with the same clock and the same `stopped`.

        Args:
            share: the part, from 0 to 1.
            progress: receives the share of the part's work that is done, from 0 to 1.
        """
        return Budget(max(0.0, self.left()) * share if share else 0.0, progress, self.stopped, self.clock)


class OutOfTime(BaseException):
    """Ends an attack that did not end by itself. It is no Exception, so that no `except Exception` catches it."""


OUT_OF_TIME_REPEAT_SECONDS = 0.5  # the pause before OutOfTime is raised again in an attack that went on


@contextmanager
def time_limit(budget: Budget | None) -> Iterator[None]:
    """Raises OutOfTime inside the block once the budget, which counts the clock's seconds, is spent.

    If the block goes on, OutOfTime is raised again every OUT_OF_TIME_REPEAT_SECONDS.

    Nothing is raised if `budget` is None or infinite, or outside of the process's main thread. A timer that runs
    already, such as that of a test, goes on afterwards.
    """
    is_bounded = budget is not None and budget.seconds < float("inf")
    if budget is None or not is_bounded or threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_out_of_time(signal_number: int, frame: object) -> None:
        raise OutOfTime

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, raise_out_of_time)
    other_delay, other_interval = signal.setitimer(
        signal.ITIMER_REAL, max(0.01, budget.left()), OUT_OF_TIME_REPEAT_SECONDS
    )
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if other_delay:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, other_delay - (time.monotonic() - started)), other_interval)
