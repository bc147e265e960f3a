"""Aliases, literally: which token each slot is for, and each row of the scrambled table by itself.

The oracle of `milkglass.schemes.aliases`. Imports nothing of milkglass; `weight_synth` is that of obfuslm.py beside it.
"""

from __future__ import annotations

import numpy as np
from obfuslm import Matrix, weight_synth


def slots(n: int, r: int, single: set[int]) -> list[tuple[int, int]]:
    """(token, alias) of each slot: first every token's first alias, then the second aliases, and so on."""
    found = [(token, 0) for token in range(n)]
    for alias in range(1, r):
        for token in range(n):
            if token not in single:
                found.append((token, alias))
    return found


def scrambled(
    x: Matrix, clusters: list[list[int]], epsilon: float, noises: list[Matrix], single: set[int], sigma: list[int]
) -> Matrix:
    """x: (n, d). noises: one array of draws for each alias. sigma: scrambled id of each slot. Returns (n', d)."""
    places = slots(len(x), len(noises), single)
    out = np.full((len(places), x.shape[1]), np.nan)
    for alias, noise in enumerate(noises):
        w = weight_synth(x, clusters, epsilon, noise)
        clustered = {token for cluster in clusters for token in cluster}
        for slot, (token, which) in enumerate(places):
            if which == alias:
                out[sigma[slot]] = w[token] @ x if token in clustered else x[token]
    return out
