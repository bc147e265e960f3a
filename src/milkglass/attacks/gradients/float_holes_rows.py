"""Float holes of a gradient: distinguishes rows of the embeddings' gradient that are noise alone.

If no text has a token, the gradient of its embedding is 0 and its row is fl(s z). Floating-point noise cannot produce
every number: it has holes (`Holes`), and no entry of this row lies in one. The row of a token that was read is fl(g +
fl(s z)), and some of its hundreds of entries lie in holes. One such entry suffices. Neither clipping nor the width of
the noise, and with it epsilon, changes this.

Guarantees of differential privacy are about real numbers. Noise on a grid can produce the same numbers in every row.
Then rows cannot be distinguished: more than half exceed any bound, and none is named. If the head is the table as well,
every row has a gradient, and this attack reads nothing either.
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
    """The attack. It has no parameters."""

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
    """Returns the holes of the noise that was added to this batch's gradient."""
    return Holes(np.float32(required(batch.noise).width))
