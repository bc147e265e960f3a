"""Partitions a table into groups of near rows. Memory is a block times n, never n x n."""

from __future__ import annotations

import numpy as np

from milkglass.nearest.select import Ids, best
from milkglass.nearest.similarities import Metric, Vectors, directions, require_k, similarities
from milkglass.progress import Progress, no_progress

PACKED = 0.8  # the pool is packed when a smaller share of it is free
SEEDS = 64  # seeds compared at a time: few are taken by a seed before them, so that little is compared in vain


def groups(vectors: Vectors, order: Ids, k: int, metric: Metric, progress: Progress = no_progress) -> list[Ids]:
    """Returns every row in one group of k: the first free row in `order` takes the k - 1 nearest free rows.

    The fewer than k rows that remain at the end join the last group, which then has up to 2k - 1. A smaller group would
    hide its rows less than requested.

    Args:
        progress: receives how many of n rows are done.
    """
    n = len(vectors)
    require_k(k, n)
    rows = directions(vectors) if metric == "cosine" else vectors
    pool, pooled, waiting = np.arange(n), rows, order  # those that are free, and some that were lately
    free, left, result = np.ones(n, np.bool_), n, list[Ids]()
    while left >= k:
        waiting = waiting[free[waiting]]
        if left < PACKED * len(pool):
            pool = np.flatnonzero(free)
            pooled = rows[pool]
        taken = ~free[pool]
        seeds = waiting[:SEEDS]
        for seed, near in zip(seeds, similarities(rows[seeds], pooled, metric), strict=True):
            if not free[seed] or left < k:
                continue
            near[taken] = -np.inf
            near[np.searchsorted(pool, seed)] = np.inf  # the seed is in its own group, in spite of rounding
            group = best(near[None], k)[0][0]
            taken[group], free[pool[group]] = True, False
            left -= k
            result.append(pool[group])
            progress(k)
    result[-1] = np.concatenate([result[-1], np.flatnonzero(free)])
    return result
