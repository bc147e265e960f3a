"""Which of a job's checkpoints it can go on from, read without torch: the server and the worker ask the same.

The newest complete checkpoint is taken, even where a newer one has the weights without the optimiser's state: from a
complete one training ends at the weights of an uninterrupted run, from the other it does not. One without the
optimiser's state is taken only where there is no complete one.
"""

from __future__ import annotations

import re
from pathlib import Path

from milkglass.server.spec import COMPLETE, SHORT

_NAME = re.compile(r"checkpoint-(\d{1,15})", re.ASCII)


def checkpoints(job: Path) -> list[Path]:
    """All checkpoints of a job, the newest last."""
    return sorted((folder for folder in (job / "checkpoints").glob("*") if _NAME.fullmatch(folder.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def marked(job: Path) -> list[Path]:
    """The checkpoints that were written to their end or have the weights alone, the newest last."""
    return [
        checkpoint
        for checkpoint in checkpoints(job)
        if any((checkpoint / mark).is_file() for mark in (COMPLETE, SHORT))
    ]


def resumed_from(job: Path) -> Path | None:
    """The newest complete checkpoint; where there is none, the newest that has the weights alone."""
    return max(
        marked(job), key=lambda checkpoint: ((checkpoint / COMPLETE).is_file(), step_of(checkpoint)), default=None
    )


def step_kept(job: Path) -> int:
    """The step that a job goes on from; 0: its beginning."""
    newest = resumed_from(job)
    return 0 if newest is None else step_of(newest)
