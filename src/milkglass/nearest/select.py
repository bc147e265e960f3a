"""Computes similarities between rows, and selects the largest of each row without sorting it. All of it is NumPy.

Columns are dealt into buckets. The j-th largest of the buckets' maxima is at most the j-th largest of the row, so only
the values that reach it, little more than j, have to be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError

Ids = NDArray[np.int64]
COLUMNS_PER_BUCKET = 32  # columns of a bucket, whose maximum is looked at
Metric = Literal["cosine", "euclidean"]
Vectors = NDArray[np.float32]


class LikelyRow(NamedTuple):
    """Holds the values of one row that reach a higher and a lower bound.

    Attributes:
        bounds: the higher and the lower bound (`LikelyRows.of`); -inf for one that is not known.
        columns: the columns that reach the higher bound, in order.
        values: the values of these columns.
        low_values: the values that reach the lower bound; the whole row if that is -inf.
    """

    bounds: tuple[float, float]
    columns: Ids
    values: NDArray[np.float32]
    low_values: NDArray[np.float32]


@dataclass(frozen=True)
class LikelyRows:
    """Finds the large values of many rows at once. Indexed by a row, it gives the row's `LikelyRow`.

    Attributes:
        similarity: (b, n) the values of all columns.
        bounds: (b, 2) the higher and the lower bound of each row; -inf for one that is not known.
        bound_index: the bound that was searched for: 1, the lower one, or 0 if the lower one is -inf.
        flat_indices: indices into the flattened `similarity` where that bound is reached, ascending.
        starts: (b + 1,) where each row's indices begin among `flat_indices`.
    """

    similarity: NDArray[np.float32] = field(repr=False)
    bounds: NDArray[np.float32] = field(repr=False)
    bound_index: int
    flat_indices: Ids = field(repr=False)
    starts: Ids = field(repr=False)

    @classmethod
    def of(cls, similarity: NDArray[np.float32], high_count: int, low_count: int) -> LikelyRows:
        """Chooses two bounds for each row, so that `high_count` columns reach the higher, and `low_count` the lower.

        All rows are searched at once, since a call for each is slow.
        """
        row_count, n = similarity.shape
        bounds = _bounds(similarity, (high_count, max(high_count, low_count)))
        index = int(np.isfinite(bounds[:, 1]).all())
        flat_indices = np.flatnonzero(similarity >= bounds[:, index : index + 1])  # far faster than np.nonzero
        return cls(similarity, bounds, index, flat_indices, np.searchsorted(flat_indices, n * np.arange(row_count + 1)))

    def __getitem__(self, row: int) -> LikelyRow:
        """Returns the large values of one row."""
        similarity, (high, low) = self.similarity[row], self.bounds[row].tolist()
        columns = self.flat_indices[self.starts[row] : self.starts[row + 1]] - row * len(similarity)
        values = similarity.take(columns)
        if not self.bound_index:
            return LikelyRow((high, low), columns, values, similarity)
        is_high = values >= high
        return LikelyRow((high, low), columns[is_high], values[is_high], values)


def _bounds(similarity: NDArray[np.float32], counts: Sequence[int]) -> NDArray[np.float32]:
    """Returns (rows, counts) a value that at least `count` columns of the row reach, for each of `counts`.

    It is -inf where no such value is known.
    """
    row_count, n = similarity.shape
    bucket_count = max(1, n // COLUMNS_PER_BUCKET)
    maxima = _bucket_maxima(similarity, bucket_count)
    positions = [bucket_count - count for count in counts if count <= bucket_count // 2]
    ranked = np.partition(maxima, positions, axis=1) if positions else maxima
    bounds = np.full((row_count, len(counts)), -np.inf, np.float32)
    for column, count in enumerate(counts):
        if count <= bucket_count // 2:
            bounds[:, column] = ranked[:, bucket_count - count]
    return bounds


def k_largest(similarity: NDArray[np.float32], k: int) -> tuple[Ids, NDArray[np.float32]]:
    """Returns (b, k) the columns of the k largest values of every row, and (b, k) these values, largest first.

    k is from 1 to n. Ties go to the lower column.
    """
    row_count, n = similarity.shape
    bucket_count = max(k, n // COLUMNS_PER_BUCKET)
    bound = np.partition(_bucket_maxima(similarity, bucket_count), bucket_count - k, axis=1)[:, bucket_count - k]
    rows, columns = np.nonzero(similarity >= bound[:, None])
    values = similarity[rows, columns]
    order = np.lexsort((columns, -values, rows))
    row_starts = np.searchsorted(rows, np.arange(row_count))  # `rows` ascends
    selected = order[row_starts[:, None] + np.arange(k)]
    return columns[selected], values[selected]


def _bucket_maxima(similarity: NDArray[np.float32], bucket_count: int) -> NDArray[np.float32]:
    """Returns (b, bucket_count) the maximum of each bucket. Columns that do not fill all buckets are left out."""
    row_count, n = similarity.shape
    bucket_size = n // bucket_count
    maxima: NDArray[np.float32] = (
        similarity[:, : bucket_size * bucket_count].reshape(row_count, bucket_size, bucket_count).max(1)
    )
    return maxima


def unit_rows(vectors: Vectors) -> Vectors:
    """Returns the rows scaled to length 1. A row of zeros stays zero: its cosine with everything is 0."""
    with np.errstate(over="ignore"):
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
    needs_fp64 = ((norms < 1e-15) | (norms > 1e15))[:, 0]  # squares leave fp32
    rows = vectors[needs_fp64].astype(np.float64)
    unit[needs_fp64] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return unit


def require_k(k: int, n: int, lowest: int = 2) -> None:
    """Raises UsageError if k is not from `lowest` to n."""
    if not lowest <= k <= n:
        if n < lowest:
            raise UsageError(f"k is {k}, and this table has too few words for any value", "give a larger table")
        raise UsageError(f"k is {k}, from {lowest} to {n} fit this table", f"give --k {n} or less, or a larger table")


def similarities(rows: Vectors, others: Vectors, metric: Metric) -> NDArray[np.float32]:
    """Returns (b, n) similarities, larger for nearer rows: cosines of unit rows, or minus the Euclidean distances."""
    product = rows @ others.T
    if metric == "cosine":
        return product
    squares = (rows * rows).sum(1)[:, None] + (others * others).sum(1) - 2 * product
    return -np.sqrt(np.maximum(squares, 0))
