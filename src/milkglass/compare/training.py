"""What a training says of itself: rows that it cut, and whether its loss was still falling at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from milkglass.models.checkpoint import Checkpoint
from milkglass.models.tokenizer import load_tokenizer
from milkglass.server.jobs.folder import read_events
from milkglass.threat.defence import LabelledTexts

REPORTS = 32  # of a training's loss, at least: by these its end is judged
IN_A_QUARTER, ERRORS = 4, 2.0  # reports in a quarter, at least; standard errors


def cut_words(base: Checkpoint, rows: LabelledTexts, max_length: int) -> str:
    """Returns a message if rows are cut, else ""."""
    tokenizer = load_tokenizer(base.folder)
    lengths = np.array([len(ids) for ids in tokenizer(list(rows.texts), rows.pairs)["input_ids"]])
    if not (count := int((lengths > max_length).sum())):
        return ""
    return f"{count:,} of {len(lengths):,} rows are cut to {max_length} tokens: a larger --max-length reads them whole"


def reported_losses(job: Path) -> list[float]:
    """Returns the losses in a job's events, in the order of their steps. A step repeated after a stop counts once."""
    losses = dict[int, float]()
    for one in read_events(job):
        data = one.event.data or {}
        if "loss" in data and "step" in data:
            losses[int(data["step"])] = float(data["loss"])
    return [losses[step] for step in sorted(losses)]


def loss_fall(losses: Sequence[float]) -> tuple[float, float] | None:
    """Returns the mean losses of the third and the last quarter of a training that was still falling when it ended.

        falls where   mean(third quarter) - mean(last quarter)  >  2 sqrt(s3^2/n3 + s4^2/n4)

    The quarters are of the reports; s^2 is the variance within one. The limit is two standard errors of the difference
    (Welch 1947), so that noise of batches does not count as a fall. A loss on training rows also falls if a model
    memorises them.

    Returns:
        None if nothing shows a fall, or if a quarter has fewer than IN_A_QUARTER reports.
    """
    count = len(losses) // 4
    if count < IN_A_QUARTER:
        return None
    before, last = np.asarray(losses[-2 * count : -count]), np.asarray(losses[-count:])
    error = math.sqrt((before.var(ddof=1) + last.var(ddof=1)) / count)
    means = float(before.mean()), float(last.mean())
    return means if means[0] - means[1] > ERRORS * error else None
