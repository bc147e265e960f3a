"""Distinguishes rows of the embeddings' gradient that are noise alone, by holes of floating-point noise.

fl rounds to fp32, s is the width of the noise, z a number drawn from the standard normal distribution, and g an entry
of a token's own gradient. If no text has a token, g is 0 and the token's row is fl(s z). Floating-point noise cannot
produce every number: it has holes (`Holes`), and no entry of this row lies in one. The row of a token that was read is
fl(g + fl(s z)), and some of its hundreds of entries lie in holes. One such entry suffices. Neither clipping nor the
width of the noise, and with it epsilon, changes this.

Guarantees of differential privacy are about real numbers. Noise on a grid can produce the same numbers in every row, so
that rows cannot be distinguished. If more than half of the rows seem read, none is reported. If the head is the table
as well, every row has a gradient, and this attack reads nothing either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass import papers
from milkglass.attacks.gradients.free_tokens import (
    MAX_SHARE_OF_ROWS,
    NOT_SHARED_REASON,
    divide_among_texts,
    table_gradient,
)
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import require_known

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

MIN_HOLE_SHARE = 0.01  # share of holes below which noise of this width rules nothing out
UP, DOWN = np.float32(np.inf), np.float32(-np.inf)
ROWS_AT_A_TIME = 4096  # rows tested at a time


@dataclass(frozen=True)
class Holes:
    """Finds numbers that noise of one width cannot produce: fl(x + fl(s z)) over fp32 z has holes (Mironov 2012).

    The product of s and an fp32 number is rounded to one of 2^23 numbers between two powers of two. If the mantissa of
    s is above 1, some of these never occur: 17 % of those between s's mantissa and 2 for s = 1.2. If a number that is
    sent lies in such a hole, seen from a guess x, it rules the guess out. It never rules out the true x.

    Attributes:
        width: s, the width of the noise in fp32.
    """

    width: np.float32

    @property
    def share(self) -> float:
        """Returns the share of the numbers between two powers of two that are holes, by a sample of them."""
        sample = np.linspace(1, 2, 20_001, dtype=np.float32)[:-1]
        return 1 - float(self.can_be_noise(sample).mean())

    def can_be_noise(self, n: Floats) -> Mask:
        """Returns where n = fl(s z) for some fp32 number z."""
        z = (n.astype(np.float64) / np.float64(self.width)).astype(np.float32)
        hit = (self.width * z) == n
        for direction in (UP, DOWN):
            hit |= (self.width * np.nextafter(z, direction)) == n
        return hit

    def is_reachable(self, x: Floats, y: Floats) -> Mask:
        """Returns where y = fl(x + n) for some possible noise n."""
        x, y = np.broadcast_arrays(x, y)
        middle = (y.astype(np.float64) - x.astype(np.float64)).astype(np.float32)
        up, down = np.nextafter(middle, UP), np.nextafter(middle, DOWN)
        hit = np.zeros(x.shape, np.bool_)
        for n in (middle, up, down, np.nextafter(up, UP), np.nextafter(down, DOWN)):
            is_candidate = ~hit & ((x + n) == y)
            hit[is_candidate] = self.can_be_noise(n[is_candidate])
        return hit


@dataclass(frozen=True)
class FloatHolesRows(Inversion):
    """Reads the tokens whose rows of the embeddings' gradient hold numbers that noise alone cannot produce."""

    name = "float-holes-rows"
    title = "Holes of floating-point noise, rows of the embeddings' gradient"
    paper = papers.FLOAT_HOLES.with_deviations(
        "Rows of a table's gradient are tested, where the paper tests one number."
    )
    assumes = frozenset({"step", "noise"})
    uses = frozenset({"lengths"})

    def why_unreadable(self, batch: SharedBatch) -> str | None:
        if table_gradient(batch) is None:
            return NOT_SHARED_REASON
        return "noise of this width reaches every number" if noise_holes_of(batch).share < MIN_HOLE_SHARE else None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        rows, noise_holes = require_known(table_gradient(batch)).float().numpy(), noise_holes_of(batch)
        is_noise = np.concatenate(
            [
                noise_holes.can_be_noise(rows[at : at + ROWS_AT_A_TIME]).all(1)
                for at in range(0, len(rows), ROWS_AT_A_TIME)
            ]
        )
        read_ids = np.flatnonzero(~is_noise)
        return divide_among_texts(read_ids if len(read_ids) <= MAX_SHARE_OF_ROWS * len(rows) else read_ids[:0], batch)


def noise_holes_of(batch: SharedBatch) -> Holes:
    """Returns the holes of the noise that was added to this batch's gradient."""
    return Holes(np.float32(require_known(batch.noise).width))
