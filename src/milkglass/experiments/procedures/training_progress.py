"""What a training worker reports while it runs, in words, every few seconds."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from pydantic import ValidationError

from milkglass.progress import Log
from milkglass.server.spec import Event

LOOK, APART = 1.0, 10.0  # seconds between looks at the file, and between lines


def follow(worker: subprocess.Popen[bytes], events: Path, progress: Log) -> None:
    """Report until the worker ends. What was in the file before it began is not reported again."""
    start = events.stat().st_size if events.is_file() else 0
    due, info = time.monotonic(), ""
    while True:
        try:
            worker.wait(LOOK)
        except subprocess.TimeoutExpired:
            if time.monotonic() < due:
                continue
        words = newest(events, start)
        if words and words != info:
            progress(words)
            info, due = words, time.monotonic() + APART
        if worker.returncode is not None:
            return


def newest(events: Path, start: int = 0) -> str:
    """What the worker says of its last step, after byte `start`; "" before the first."""
    if not events.is_file():
        return ""
    with events.open("rb") as file:
        file.seek(start)
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            event = Event.model_validate_json(line)
        except ValidationError:  # the line is being written
            continue
        if event.type == "metrics":
            return event.message
    return ""
