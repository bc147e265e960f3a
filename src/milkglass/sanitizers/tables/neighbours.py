"""What is near in a table: directions, the best of each row of similarities, and a partition into groups of near rows.

Memory is a block times n, never n x n. The k nearest of every row are in nearest.py.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.progress import Progress, no_progress
from milkglass.sanitizers.tables.table import Ids, Vectors

Metric = Literal["cosine", "euclidean"]
HEAP = 32  # columns
PACKED = 0.8  # the pool is packed when a smaller share of it is free
SEEDS = 64  # seeds compared at a time: few are taken by a seed before them, so that little is compared in vain


def directions(vectors: Vectors) -> Vectors:
    """Rows of length one. A row of zeros has no direction and stays: its cosine with everything is 0."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, np.finfo(np.float32).tiny)


def require_k(k: int, n: int, lowest: int = 2) -> None:
    if not lowest <= k <= n:
        if n < lowest:
            raise UsageError(f"k is {k}, and this table has too few words for any value", "give a larger table")
        raise UsageError(f"k is {k}, from {lowest} to {n} fit this table", f"give --k {n} or less, or a larger table")


def best(similarity: NDArray[np.float32], k: int) -> tuple[Ids, NDArray[np.float32]]:
    """The k largest of every row, largest first, ties by index; both (b, k).

    Columns are dealt into heaps. The k-th largest of the heaps' maxima is no larger than the k-th largest of the row,
    so that only what reaches it, little more than k, has to be sorted.
    """
    count, n = similarity.shape
    heaps = max(k, n // HEAP)
    deep = n // heaps
    maxima = similarity[:, : deep * heaps].reshape(count, deep, heaps).max(1)
    bound = np.partition(maxima, heaps - k, axis=1)[:, heaps - k]
    row, column = np.nonzero(similarity >= bound[:, None])
    value = similarity[row, column]
    order = np.lexsort((column, -value, row))
    first = np.searchsorted(row, np.arange(count))  # `row` ascends
    selected = order[first[:, None] + np.arange(k)]
    return column[selected], value[selected]


def similarities(rows: Vectors, others: Vectors, metric: Metric) -> NDArray[np.float32]:
    """(b, n), the larger the nearer. Cosine of unit rows, or minus the Euclidean distance."""
    product = rows @ others.T
    if metric == "cosine":
        return product
    squares = (rows * rows).sum(1)[:, None] + (others * others).sum(1) - 2 * product
    return -np.sqrt(np.maximum(squares, 0))


def groups(vectors: Vectors, order: Ids, k: int, metric: Metric, progress: Progress = no_progress) -> list[Ids]:
    """Every row in one group of k: the first free row in `order` takes the k - 1 free rows that are nearest.

    What is left at the end, fewer than k rows, joins the last group, which then has up to 2k - 1: a smaller group
    would hide its rows less than requested. progress: of n rows.
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
