"""Reads and writes events.jsonl, a worker's reports. The id of an event is the byte after its line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from milkglass.server.spec import Event

FILE = "events.jsonl"
PROGRESS = ("step", "total_steps", "loss")
TAIL = 1 << 16  # bytes


@dataclass(frozen=True)
class WorkerEvents:
    id: int
    event: Event

    def as_json(self) -> dict[str, Any]:
        event = self.event
        return {
            "object": "fine_tuning.job.event",
            "id": f"ftevent-{self.id}",
            "created_at": int(event.time),
            "level": event.level,
            "type": event.type,
            "message": event.message,
            "data": event.data,
        }


def read(job: Path, after: int = 0) -> list[WorkerEvents]:
    """Returns the events after an id, without a line that a killed worker left unfinished."""
    path = job / FILE
    if not path.is_file() or after >= path.stat().st_size:
        return []
    result = []
    with path.open("rb") as file:
        file.seek(after)
        at = after
        for line in file:
            if not line.endswith(b"\n"):
                break  # still being written
            at += len(line)
            event = _parse(line)
            if event is not None:
                result.append(WorkerEvents(at, event))
    return result


def progress(job: Path) -> dict[str, float]:
    """Returns the newest `step`, `total_steps` and `loss`, from the end of the file only."""
    path, result = job / FILE, dict[str, float]()
    if not path.is_file():
        return result
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        lines = file.read(TAIL).splitlines()
    for line in reversed(lines):
        info = _parse(line)
        numbers = info.data if info else {}
        result = {name: numbers[name] for name in PROGRESS if type(numbers.get(name)) in (int, float)} | result
        if len(result) == len(PROGRESS):
            break
    return result


def _parse(line: bytes) -> Event | None:
    try:
        return Event.model_validate_json(line)
    except ValidationError:
        return None  # `mend` closed a line that a kill had cut


def emit(job: Path, message: str, level: str = "info", data: Mapping[str, Any] | None = None) -> None:
    """Writes an event, of metrics if it has data. Each is one write in append mode, so that writers never mix lines."""
    kind = "metrics" if data else "message"
    event = Event(time=time.time(), level=level, type=kind, message=message, data=dict(data or {}))  # type: ignore[arg-type]
    with (job / FILE).open("ab", buffering=0) as file:
        file.write(event.model_dump_json().encode() + b"\n")


def mend(job: Path) -> None:
    """Ends an unfinished line of a killed worker, before the next one is started."""
    path = job / FILE
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
