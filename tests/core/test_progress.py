"""How long the rest takes: by the latest speed, not by the mean since the start."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from milkglass.cli.ui import terminal
from milkglass.cli.ui.terminal import note, note_resumption, progress_bars, report_activity
from milkglass.progress import WINDOW_SECONDS, Heartbeat, TimeLeft
from milkglass.system import exit_on_sigterm


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
    beat = Heartbeat(lines.append, silence=0.2)
    beat.begin()
    for _ in range(4):
        time.sleep(0.1)
        beat.note_words()
    assert not lines
    time.sleep(0.7)
    beat.end()
    assert 2 <= len(lines) <= 4 and all(line == "still at work, 1 s in all so far" for line in lines[1:])
    count = len(lines)
    time.sleep(0.4)
    assert len(lines) == count


def test_a_command_that_is_at_work_says_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "Heartbeat", lambda log: Heartbeat(log, 0.2))
    with report_activity(), progress_bars() as stage:
        advance = stage("find shadows", 10)
        time.sleep(0.5)
        advance(1)
        note("halfway")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "find shadows: still at work, 0 s in all so far" and said[-1] == "halfway"
    with report_activity(is_quiet=True), progress_bars(is_quiet=True) as stage:
        stage("find shadows", 10)
        time.sleep(0.5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_says_where_its_work_is(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)) as stop, exit_on_sigterm(), note_resumption(tmp_path):
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, own)
    expected = f"stopped; what was finished is kept in {tmp_path}, the same command again goes on\n"
    assert capsys.readouterr().err == expected
    assert number == signal.SIGINT or (isinstance(stop.value, SystemExit) and stop.value.code == 143)
    assert signal.getsignal(signal.SIGTERM) == before
