"""Decides which checkpoint a job resumes from, without torch, so that server and worker use the same rule.

It is the newest complete checkpoint, even if a newer one has the weights without the optimiser's state: only from a
complete one does training end at the weights of an uninterrupted run. One without the optimiser's state is used if
there is no complete one.
"""

from __future__ import annotations

import re
from pathlib import Path

from milkglass.server.spec import COMPLETE, SHORT

_NAME = re.compile(r"checkpoint-(\d{1,15})", re.ASCII)


def checkpoints(job: Path) -> list[Path]:
    """Returns all checkpoints of a job, the newest last."""
    return sorted((folder for folder in (job / "checkpoints").glob("*") if _NAME.fullmatch(folder.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def marked(job: Path) -> list[Path]:
    """Returns the checkpoints that are complete or have the weights alone, the newest last."""
    return [
        checkpoint
        for checkpoint in checkpoints(job)
        if any((checkpoint / mark).is_file() for mark in (COMPLETE, SHORT))
    ]


def resumed_from(job: Path) -> Path | None:
    """Returns the newest complete checkpoint, or else the newest that has the weights alone, or None."""
    return max(
        marked(job), key=lambda checkpoint: ((checkpoint / COMPLETE).is_file(), step_of(checkpoint)), default=None
    )


def step_kept(job: Path) -> int:
    """Returns the step that a job resumes from; 0: its beginning."""
    newest = resumed_from(job)
    return 0 if newest is None else step_of(newest)
