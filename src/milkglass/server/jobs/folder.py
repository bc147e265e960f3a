"""Reads and writes a job's folder without torch: its events, and the checkpoint from which it resumes.

events.jsonl has a worker's reports; the id of an event is the byte after its line. A job resumes from the newest
complete checkpoint, even if a newer one has the weights without the optimiser's state: only from a complete one does
training end at the weights of an uninterrupted run. A checkpoint without that state is used if there is no complete
one.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from milkglass.server.spec import COMPLETE_MARK, RESERVE_FILE, WEIGHTS_ONLY_MARK, Event

EVENTS_FILE = "events.jsonl"
TEMPORARY_NAMES = ("checkpoints", "result.partial", RESERVE_FILE)  # files and folders that only a resumed job needs
PROGRESS_FIELDS = ("step", "total_steps", "loss")
TAIL_BYTES = 1 << 16  # bytes at the end of the event file in which the newest progress is looked for
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{1,15})", re.ASCII)


@dataclass(frozen=True)
class StoredEvent:
    """Holds an event of events.jsonl.

    Attributes:
        id: the position of the byte after the event's line.
        event: the event.
    """

    id: int
    event: Event

    def as_json(self) -> dict[str, Any]:
        """Returns the event in OpenAI's format, with its data."""
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


def read_events(job: Path, after: int = 0) -> list[StoredEvent]:
    """Returns the events of a job, without a line that a killed worker left unfinished.

    Args:
        job: the job's folder.
        after: the id of the event after which they begin. 0: all events.
    """
    path = job / EVENTS_FILE
    if not path.is_file() or after >= path.stat().st_size:
        return []
    stored_events = []
    with path.open("rb") as file:
        file.seek(after)
        line_end = after
        for line in file:
            if not line.endswith(b"\n"):
                break  # still being written
            line_end += len(line)
            event = _parse_event(line)
            if event is not None:
                stored_events.append(StoredEvent(line_end, event))
    return stored_events


def read_progress(job: Path) -> dict[str, float]:
    """Returns the newest `step`, `total_steps` and `loss` that the last TAIL_BYTES of the events have."""
    path, progress = job / EVENTS_FILE, dict[str, float]()
    if not path.is_file():
        return progress
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).splitlines()
    for line in reversed(lines):
        event = _parse_event(line)
        metrics = event.data if event else {}
        older_progress = {name: metrics[name] for name in PROGRESS_FIELDS if type(metrics.get(name)) in (int, float)}
        progress = older_progress | progress
        if len(progress) == len(PROGRESS_FIELDS):
            break
    return progress


def _parse_event(line: bytes) -> Event | None:
    """Returns the event in a line, or None if the line is not one."""
    try:
        return Event.model_validate_json(line)
    except ValidationError:
        return None  # `mend_events` closed a line that a kill had cut


def write_event(job: Path, message: str, level: str = "info", data: Mapping[str, Any] | None = None) -> None:
    """Appends an event, of metrics if it has data. Each is one write in append mode, so that lines are never mixed."""
    event_type = "metrics" if data else "message"
    event = Event(time=time.time(), level=level, type=event_type, message=message, data=dict(data or {}))  # type: ignore[arg-type]
    with (job / EVENTS_FILE).open("ab", buffering=0) as file:
        file.write(event.model_dump_json().encode() + b"\n")


def mend_events(job: Path) -> None:
    """Ends an unfinished line of a killed worker, before the next one is started."""
    path = job / EVENTS_FILE
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")


def all_checkpoints(job: Path) -> list[Path]:
    """Returns the folders of all checkpoints, complete or not, the newest last."""
    return sorted(
        (folder for folder in (job / "checkpoints").glob("*") if _CHECKPOINT_NAME.fullmatch(folder.name)), key=step_of
    )


def step_of(checkpoint: Path) -> int:
    """Returns the training step after which a checkpoint was saved, from its folder's name."""
    return int(checkpoint.name.rpartition("-")[2])


def usable_checkpoints(job: Path) -> list[Path]:
    """Returns the checkpoints that are complete or have the weights alone, the newest last."""
    return [
        folder
        for folder in all_checkpoints(job)
        if (folder / COMPLETE_MARK).is_file() or (folder / WEIGHTS_ONLY_MARK).is_file()
    ]


def checkpoint_to_resume(job: Path) -> Path | None:
    """Returns the newest complete checkpoint, or else the newest that has the weights alone, or None."""
    return max(
        usable_checkpoints(job), key=lambda folder: ((folder / COMPLETE_MARK).is_file(), step_of(folder)), default=None
    )


def step_to_resume(job: Path) -> int:
    """Returns the step that a job resumes from; 0: its beginning."""
    newest = checkpoint_to_resume(job)
    return 0 if newest is None else step_of(newest)


def drop_temporary(job: Path, is_resumable: bool = False) -> None:
    """Removes the files of an ended job that only a resumed job needs: up to three times a model's size.

    Args:
        job: the job's folder.
        is_resumable: whether the job can be resumed, so that its checkpoints stay.
    """
    (job / RESERVE_FILE).unlink(missing_ok=True)
    for name in ("result.partial", *(() if is_resumable else ("checkpoints",))):
        shutil.rmtree(job / name, ignore_errors=True)
