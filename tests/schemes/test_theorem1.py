"""ObfusLM, Theorem 1: what its proof says of two rows of one cluster, computed.

A cluster has a seed i, and each member j has cos(i, j) >= gamma, gamma being the seed's beta-quantile. The proof bounds
the cosine of two members by 2 gamma^2 - 1, through cos(i,j) cos(i,k) - sqrt((1 - cos(i,j))^2 (1 - cos(i,k))^2). The
bound holds where gamma >= 0. The step as printed does not: under the root of the triangle inequality for cosines stands
1 - cos^2, not (1 - cos)^2.
"""

from __future__ import annotations

import numpy as np
import torch

from milkglass.schemes.clustering import embed_cluster

BETA, K = 0.9, 8


def cosines(x: np.ndarray) -> np.ndarray:
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return unit @ unit.T


def test_two_rows_of_a_cluster_are_at_least_as_alike_as_the_theorem_says() -> None:
    rng = np.random.default_rng(0)
    groups = rng.normal(size=(40, 24))
    x = np.repeat(groups, 10, axis=0) + 0.4 * rng.normal(size=(400, 24))  # rows that have near neighbours
    cos = cosines(x)
    checked, printed_fails = 0, 0
    for members in embed_cluster(torch.from_numpy(x), rng.permutation(400), K, BETA):
        seed, others = int(members[0]), members[1:].astype(int)
        gamma = float(np.quantile(cos[seed], BETA))
        assert (cos[seed, others] >= gamma - 1e-9).all()
        if gamma < 0:
            continue
        for j in others:
            for k in others:
                checked += 1
                assert cos[j, k] >= 2 * gamma**2 - 1 - 1e-9
                root = np.sqrt((1 - cos[seed, j] ** 2) * (1 - cos[seed, k] ** 2))
                assert cos[j, k] >= cos[seed, j] * cos[seed, k] - root - 1e-9
                printed = np.sqrt((1 - cos[seed, j]) ** 2 * (1 - cos[seed, k]) ** 2)
                printed_fails += bool(cos[j, k] < cos[seed, j] * cos[seed, k] - printed - 1e-9)
    assert checked > 500
    assert printed_fails > 0, "the printed step would be a tighter bound, and it is violated"


def test_the_bound_is_reached_and_the_printed_step_is_not_a_bound() -> None:
    """Two members at the angle a on either side of the seed: their cosine is cos 2a = 2 cos^2 a - 1."""
    a = 0.5
    x = np.array([[1.0, 0.0], [np.cos(a), np.sin(a)], [np.cos(a), -np.sin(a)]])
    cos, gamma = cosines(x), np.cos(a)
    assert np.isclose(cos[1, 2], 2 * gamma**2 - 1)
    assert cos[1, 2] < gamma * gamma - (1 - gamma) ** 2
