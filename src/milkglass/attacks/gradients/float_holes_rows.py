"""Float holes of a gradient: rows of the embeddings that are noise alone are distinguished from others.

Of a token that no text has, the embedding's gradient is 0, and its row is fl(s z): every entry is a number that
floating-point noise can be (`Holes`). A row of a token that was read is fl(g + fl(s z)), and some entries lie
in holes. One entry suffices; a row has hundreds. Clipping and the width of the noise, and with it epsilon, change
nothing of this.

Guarantees of differential privacy are of real numbers. Noise on a grid leaves the same numbers to every row: then all
rows are alike, half are over any bound, and nothing is named. Where the head is the table as well, every row has a
gradient, and this reads nothing either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.attacks.gradients.free_tokens import MAX_SHARE_OF_ROWS, NOT_SHARED, dealt, table_gradient
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch
from milkglass.attacks.noise_holes import FEWEST, Holes
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import required

ROWS_AT_A_TIME = 4096  # looked at at a time


@dataclass(frozen=True)
class FloatHolesRows(Inversion):
    """No parameters."""

    name = "float-holes-rows"
    title = "Holes of floating-point noise, rows of the embeddings' gradient"
    paper = papers.FLOAT_HOLES.but("Rows of a table's gradient are tested, where the paper tests one number.")
    assumes = frozenset({"step", "noise"})
    uses = frozenset({"lengths"})

    def misses(self, batch: SharedBatch) -> str | None:
        if table_gradient(batch) is None:
            return NOT_SHARED
        return "noise of this width reaches every number" if holes(batch).share < FEWEST else None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        rows, hole = required(table_gradient(batch)).float().numpy(), holes(batch)
        noise = np.concatenate(
            [hole.noise(rows[at : at + ROWS_AT_A_TIME]).all(1) for at in range(0, len(rows), ROWS_AT_A_TIME)]
        )
        named = np.flatnonzero(~noise)
        return dealt(named if len(named) <= MAX_SHARE_OF_ROWS * len(rows) else named[:0], batch)


def holes(batch: SharedBatch) -> Holes:
    return Holes(np.float32(required(batch.noise).width))
