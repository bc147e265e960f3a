"""Whether a training's loss was still falling when it ended, by the losses that its worker reported.

    falls where   mean(third quarter) - mean(last quarter)  >  2 sqrt(s3^2/n3 + s4^2/n4)

The quarters are of the reports; s^2 is the variance within one. Two standard errors of the difference (Welch 1947): a
fall that the noise of batches explains is not called one. With fewer than LEAST reports in a quarter nothing is said.

Out of scope: whether more training would help. A loss on training rows falls where a model learns them by heart, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from milkglass.server.jobs import events

LEAST, ERRORS = 4, 2.0  # reports in a quarter; standard errors


def reported(job: Path) -> list[float]:
    """The losses in a job's events, in the order of their steps; a step that was repeated after a stop counts once."""
    losses = dict[int, float]()
    for one in events.read(job):
        data = one.event.data or {}
        if "loss" in data and "step" in data:
            losses[int(data["step"])] = float(data["loss"])
    return [losses[step] for step in sorted(losses)]


def fall(losses: Sequence[float]) -> tuple[float, float] | None:
    """The mean losses of the third and the last quarter of a training that was still falling; None: nothing shows
    it."""
    count = len(losses) // 4
    if count < LEAST:
        return None
    before, last = np.asarray(losses[-2 * count : -count]), np.asarray(losses[-count:])
    error = math.sqrt((before.var(ddof=1) + last.var(ddof=1)) / count)
    means = float(before.mean()), float(last.mean())
    return means if means[0] - means[1] > ERRORS * error else None
