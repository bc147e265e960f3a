"""Partial selection: the best of each row of similarities, or a value that the best ones reach, without sorting a row.

Columns are dealt into heaps. The j-th largest of the heaps' maxima is no larger than the j-th largest of the row, so
that only what reaches it, little more than j, has to be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
HEAP = 32  # columns


def reached(similarity: NDArray[np.float32], counts: Sequence[int]) -> NDArray[np.float32]:
    """(b, len(counts)) for each row values that at least so many of its columns reach; -inf where that is too many for
    heaps of two."""
    rows, n = similarity.shape
    heaps = max(1, n // HEAP)
    maxima = _maxima(similarity, heaps)
    within = [heaps - count for count in counts if count <= heaps // 2]
    ranked = np.partition(maxima, within, axis=1) if within else maxima
    result = np.full((rows, len(counts)), -np.inf, np.float32)
    for place, count in enumerate(counts):
        if count <= heaps // 2:
            result[:, place] = ranked[:, heaps - count]
    return result


def best(similarity: NDArray[np.float32], k: int) -> tuple[Ids, NDArray[np.float32]]:
    """The k largest of every row, largest first, ties by index; both (b, k)."""
    count, n = similarity.shape
    heaps = max(k, n // HEAP)
    bound = np.partition(_maxima(similarity, heaps), heaps - k, axis=1)[:, heaps - k]
    row, column = np.nonzero(similarity >= bound[:, None])
    value = similarity[row, column]
    order = np.lexsort((column, -value, row))
    first = np.searchsorted(row, np.arange(count))  # `row` ascends
    selected = order[first[:, None] + np.arange(k)]
    return column[selected], value[selected]


def _maxima(similarity: NDArray[np.float32], heaps: int) -> NDArray[np.float32]:
    """(b, heaps), of as many columns as fill the heaps."""
    count, n = similarity.shape
    deep = n // heaps
    result: NDArray[np.float32] = similarity[:, : deep * heaps].reshape(count, deep, heaps).max(1)
    return result
