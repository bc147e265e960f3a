"""EDNN, Figure 2: how far an obfuscated row's differences lie from its own token's, and from the nearest other token's.

Where the two do not overlap, Algorithm 1 reads every token, however far training moved the rows. Distances are those of
Algorithm 1 (attacks/embeddings/ednn.py). Out of scope: drawing the densities; their quantiles are figures of a result.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.attacks.embeddings.ednn import differences
from milkglass.sequences import Ids

ROWS = 1024  # rows compared at a time
Floats = NDArray[np.float64]


def own_and_nearest(server: torch.Tensor, public: torch.Tensor, origin: Ids) -> tuple[Floats, Floats]:
    """(n,) each, for the rows (n, d) of the server's table: the distance to the public row that it stands for, and to
    the nearest other one.

    Args:
        public: (m, d).
        origin: (n,) which public row each stands for.
    """
    theirs, mine = differences(public.double()), differences(server.double())
    own, other = [], []
    for start in range(0, len(mine), ROWS):
        place = torch.from_numpy(origin[start : start + ROWS])
        far = torch.cdist(mine[start : start + ROWS], theirs)
        rows = torch.arange(len(place))
        own.append(far[rows, place].clone())
        far[rows, place] = torch.inf
        other.append(far.min(1).values)
    return torch.cat(own).numpy(), torch.cat(other).numpy()


def quantiles(own: Floats, other: Floats) -> dict[str, float]:
    """The figures of a result: medians and the ends that face each other, and the share of rows that are nearest to
    their own token, in percent."""
    return {
        "own distance, median": float(np.median(own)),
        "own distance, 99 %": float(np.quantile(own, 0.99)),
        "nearest other distance, 1 %": float(np.quantile(other, 0.01)),
        "nearest other distance, median": float(np.median(other)),
        "own is nearest": 100 * float((own < other).mean()),
    }
