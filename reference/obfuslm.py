"""ObfusLM's appendix B, transcribed literally: slow, dense, one statement for one line of the paper.

The oracle of `milkglass.schemes.obfuslm`. Needs NumPy only and imports nothing of milkglass. Line numbers are those of
Algorithms 1 and 2. Departures are the ones that the paper's prose asks for, and are marked with their number in
`ObfusLM.paper.deviations`. Memory: an n x n matrix of fp64 (7.5 GB at n = 30,522).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def cos_sim(x: Matrix) -> Matrix:
    """All pairs. Ten decimals, so that equal rows tie on every machine; a zero row has cosine 0 with everything."""
    norms = np.sqrt((x * x).sum(axis=1))
    unit = x / np.maximum(norms, 1e-30)[:, None]
    cosines = unit @ unit.T.copy()  # a copy: without, this crashed once at n = 30,522 (cause not established)
    return np.round(cosines, 10, out=cosines)


def embed_cluster(x: Matrix, k: int, beta: float) -> list[list[int]]:
    """Algorithm 1. x: (n, d), in the order of the visit. Returns clusters of indices, the seed first."""
    n = len(x)
    flags = np.zeros(n, dtype=int)  # 1: B
    clusters: list[list[int]] = []  # 1: M
    d = cos_sim(x)  # 2
    for i in range(n):  # 3
        if flags[i] == 1:  # 4
            continue  # 5
        s = [i]  # 7
        flags[i] = 1  # deviation 2: the seed is assigned explicitly
        indices = np.lexsort((np.arange(n), -d[i]))  # 7: ArgSort, largest first, ties by index
        gamma = round(float(np.quantile(d[i], beta)), 10)  # 8
        for j in indices:  # 9
            if flags[j] == 1:  # deviation 1: one cluster per embedding
                continue
            if len(s) == k or d[i, j] < gamma:  # 10
                break  # 11
            s.append(int(j))  # 13
            flags[j] = 1  # 13
        clusters.append(s)  # 16
    return clusters  # 18


def weight_synth(x: Matrix, clusters: list[list[int]], epsilon: float, noise: Matrix) -> Matrix:
    """Algorithm 2. noise: draws of Laplace(1), taken in order, one for each weight. Returns W, (n, n), dense."""
    m = len(x)
    w = np.zeros((m, m))  # 1
    used = 0
    for s in clusters:  # 2, 3
        y = x[s]
        sigma = cos_sim(y)
        for i in range(len(s)):  # 4, 5
            e = np.exp(epsilon * sigma[i] / 2)
            u = np.log(e / e.sum())  # 6
            delta = u.max() - u.min()  # 7
            scale = delta / epsilon if epsilon > 0 else (sigma[i].max() - sigma[i].min()) / 2  # 7, its limit at 0
            z = noise[used : used + len(s)] * scale
            used += len(s)
            u_noisy = u + z  # 7
            u_tilde = np.exp(u_noisy) / np.exp(u_noisy).sum()  # 8
            for j in range(len(s)):
                w[s[i], s[j]] = u_tilde[j]  # 9
    return w  # 12
