"""WeightSynth, Algorithm 2 of ObfusLM (appendix B): the noisy weights with which a cluster's rows are mixed.

Deviation 4 of obfuslm.py is made here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.nearest.products import BLOCK_BYTES
from milkglass.nearest.seed_row import DECIMALS
from milkglass.schemes.clustering import unit_rows
from milkglass.schemes.mixture import Ids

Noise = Callable[[int], NDArray[np.float64]]  # that many draws of Laplace(1)

SCORE_STEP = 2.0**-40  # noisy scores are rounded to multiples of it


def weight_synth(table: torch.Tensor, clusters: list[Ids], epsilon: float, noise: Noise) -> list[NDArray[np.float32]]:
    """Returns (s, s) weights for each cluster of s tokens by Algorithm 2; each row sums to 1.

    The noise is drawn cluster by cluster, s * s numbers each, independently of the order of the work: clusters of one
    size are computed together. Noisy scores are rounded to SCORE_STEP. No guarantee rests on this noise: see (4) in
    `paper.deviations`.
    """
    sizes = np.array([len(cluster) for cluster in clusters], np.int64)
    ends = np.cumsum(sizes**2)
    draws = noise(int(ends[-1])) if len(clusters) else np.empty(0)
    # In one piece: small arrays that were kept between the blocks of rows would hold these, up to 2 GB of them
    weights = np.empty(len(draws), np.float32)
    for size in np.unique(sizes).tolist():
        equal = np.flatnonzero(sizes == size)
        step = max(1, BLOCK_BYTES // (8 * size * table.shape[1]))
        for selected in np.split(equal, range(step, len(equal), step)):
            places = (ends[selected] - size**2)[:, None] + np.arange(size**2)
            z = draws[places].reshape(-1, size, size)
            made = _weights(table, np.stack([clusters[c] for c in selected]), epsilon, z)
            weights[places] = made.reshape(len(selected), -1)
    spans = zip((ends - sizes**2).tolist(), ends.tolist(), sizes.tolist(), strict=True)
    return [weights[begin:end].reshape(size, size) for begin, end, size in spans]


def _weights(table: torch.Tensor, members: Ids, epsilon: float, z: NDArray[np.float64]) -> NDArray[np.float32]:
    """Computes lines 5 to 9 for c clusters of s tokens at once; members (c, s), z (c, s, s)."""
    unit = unit_rows(table, members.reshape(-1), torch.float64).reshape(*members.shape, -1)
    cosines = np.round((unit @ unit.transpose(1, 2)).numpy(), DECIMALS)
    scale = (cosines.max(2, keepdims=True) - cosines.min(2, keepdims=True)) / 2
    u = np.round((epsilon * cosines / 2 + scale * z) / SCORE_STEP) * SCORE_STEP
    e = np.exp(u - u.max(2, keepdims=True))
    return (e / e.sum(2, keepdims=True)).astype(np.float32)
