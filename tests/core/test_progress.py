"""How long the rest takes: by the latest speed, not by the mean since the start."""

from __future__ import annotations

import time

import pytest

from milkglass.cli.ui import terminal
from milkglass.cli.ui.terminal import bars, note, report_activity
from milkglass.progress import WINDOW_SECONDS, Heartbeat, TimeLeft, heartbeat


def test_the_latest_speed_counts() -> None:
    now = 0.0
    left = TimeLeft(1000, lambda: now)
    assert left.estimate(0) is None
    now = 10.0
    assert left.estimate(1) is None  # a slow first step says nothing of the others
    now += 1.0
    assert left.estimate(2) == pytest.approx(998)
    for _ in range(199):
        now += 1.0
        seconds = left.estimate(int(now) - 9)
    assert seconds == pytest.approx(1000 - 201)  # a step a second over the window
    now += WINDOW_SECONDS
    assert left.estimate(201) is not None  # slower, and still a number


def test_nothing_done_has_no_speed() -> None:
    left = TimeLeft(10, lambda: 1.0)
    assert left.estimate(0) is None and left.estimate(0) is None
    assert TimeLeft(10).estimate(10) is None


def test_silent_work_is_said_to_go_on() -> None:
    lines = list[str]()
    with heartbeat(lines.append, silence=0.2) as log:
        for _ in range(4):
            time.sleep(0.1)
            log("step")
        assert lines == ["step"] * 4
        time.sleep(0.7)
    beats = [one for one in lines if one != "step"]
    assert 2 <= len(beats) <= 4 and all(one == "still at work, 1 s after the start" for one in beats[1:])
    time.sleep(0.4)
    assert len(lines) == 4 + len(beats)


def test_a_command_that_is_at_work_says_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "Heartbeat", lambda log: Heartbeat(log, 0.2))
    with report_activity(), bars() as stage:
        advance = stage("find shadows", 10)
        time.sleep(0.5)
        advance(1)
        note("halfway")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "find shadows: still at work, 0 s after the start" and said[-1] == "halfway"
    with report_activity(is_quiet=True), bars(as_json=True) as stage:
        stage("find shadows", 10)
        time.sleep(0.5)
    assert capsys.readouterr().err == ""
