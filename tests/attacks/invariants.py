"""Invariant finder: what a transformation of embeddings leaves alone (Lin et al. 2024, section 5.1).

For a transformation phi(x) = W x + b, drawn anew for each key, a linear map A with A phi(x) = A x for every x lets
anybody match scrambled and public rows whatever the permutation. Then A (W - I) = 0 and A b = 0, for every key. So A's
rows are orthogonal to every displacement phi(x) - x: given phi as a black box, collect displacements of many points
under many keys, and the invariants are the null space of their matrix D (one displacement a row).

    the space of invariants = { a : D a = 0 },      its dimension = d - rank(D).

The rank is decided by the gap in D's singular values: sampling can only find displacements that exist, so after enough
points the dimension is an upper bound that no longer falls. For the glide-reflection the displacements are multiples
of the vector of ones, and the dimension is d - 1; for a fresh random mixture of rows it is 0.

What this does not know: invariants that are not linear (norms, angles, distances between rows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from milkglass.errors import UsageError

Transformation = Callable[[torch.Tensor, int], torch.Tensor]  # points (m, d) and a key's seed to points (m, d)


@dataclass(frozen=True)
class Invariants:
    """basis: (dimension, d), orthonormal rows a with a.phi(x) = a.x. singular: (d,) D's, largest first, for the
    reader who doubts the rank."""

    basis: torch.Tensor
    singular: torch.Tensor

    @property
    def dimension(self) -> int:
        return len(self.basis)


def find(
    phi: Transformation,
    dimensions: int,
    rng: np.random.Generator,
    points: int | None = None,
    keys: int = 8,
    tolerance: float = 1e-4,
) -> Invariants:
    """Ask phi about `points` random points (default 2 d) under each of `keys` keys. tolerance: a direction counts as
    moved when its singular value reaches this share of the points' own size (fp32 rounding is below 1e-6 of it).
    """
    count = 2 * dimensions if points is None else points
    if count * keys < dimensions:
        raise UsageError(f"{count} points under {keys} keys span less than {dimensions} dimensions", "ask more points")
    moved = []
    for key in range(keys):
        x = torch.from_numpy(rng.standard_normal((count, dimensions)))
        y = phi(x, key).double()
        if y.shape != x.shape:
            raise UsageError(
                f"the transformation gave {tuple(y.shape)} for {tuple(x.shape)}", "an invariant needs the same space"
            )
        moved.append(y - x)
    size = float(np.sqrt(count * keys))  # the singular values of as many standard points
    _, singular, rows = torch.linalg.svd(torch.cat(moved), full_matrices=False)
    return Invariants(rows[singular <= tolerance * size], singular)
