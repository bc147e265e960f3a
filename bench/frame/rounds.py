"""Seconds of two sides that take turns, so that what else runs on the machine moves both."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

Work = Callable[[], object]


def seconds(work: Work) -> float:
    """By the clock. What was left by earlier work is collected before it starts."""
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def interleaved(ours: Work, other: Work, rounds: int, warm: bool = True) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of each round of both. The side that begins changes from round to round: neither always runs on the
    caches that the other left.

    warm: whether a round that is not counted comes first.
    """
    return paired(lambda: seconds(ours), lambda: seconds(other), rounds, warm)


def paired(
    ours: Callable[[], float], other: Callable[[], float], rounds: int, warm: bool = True
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The same of works that measure themselves."""
    if warm:
        ours(), other()
    mine, theirs = list[float](), list[float]()
    for number in range(rounds):
        if number % 2:
            theirs.append(other())
            mine.append(ours())
        else:
            mine.append(ours())
            theirs.append(other())
    return tuple(mine), tuple(theirs)
