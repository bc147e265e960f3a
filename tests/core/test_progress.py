"""How long the rest takes: by the latest speed, not by the mean since the start."""

from __future__ import annotations

import pytest

from milkglass.progress import WINDOW, TimeLeft


def test_the_latest_speed_counts() -> None:
    now = 0.0
    left = TimeLeft(1000, lambda: now)
    assert left.after(0) is None
    now = 10.0
    assert left.after(1) is None  # a slow first step says nothing of the others
    now += 1.0
    assert left.after(2) == pytest.approx(998)
    for _ in range(199):
        now += 1.0
        seconds = left.after(int(now) - 9)
    assert seconds == pytest.approx(1000 - 201)  # a step a second over the window
    now += WINDOW
    assert left.after(201) is not None  # slower, and still a number


def test_nothing_done_has_no_speed() -> None:
    left = TimeLeft(10, lambda: 1.0)
    assert left.after(0) is None and left.after(0) is None
    assert TimeLeft(10).after(10) is None
