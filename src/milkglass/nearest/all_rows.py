"""Finds the k nearest rows of every row of a table by cosine, and divides a table into groups of near rows.

On the CPU `nearest` compares each pair of rows once: cosines are symmetric, so only tiles on and above the diagonal are
multiplied. A sample of columns gives an estimate of the bound that a pair must reach. An estimate that is too high
leaves fewer than k pairs; such a row is compared with all others again, so that estimates cost time and never a
neighbour. One that is too low (a table with many equal rows) leaves too many pairs in a strip of rows. They are then
cut to the k best of each row, and the bound becomes the k-th of these. Memory: the pairs of a strip of TILE_SIZE rows,
and two tiles for each core (20 MB each if all rows are equal), never n x n. A GPU compares each row with all others, in
blocks of TILE_SIZE x n.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from milkglass import device
from milkglass.errors import UsageError
from milkglass.nearest.select import Ids, Metric, Vectors, k_largest, require_k, similarities, unit_rows
from milkglass.progress import Progress, no_progress
from milkglass.system import core_count

Pairs = tuple[NDArray[np.int16], NDArray[np.int32], NDArray[np.float32]]  # a row in its strip, a column, a cosine
NeighbourLists = tuple[NDArray[np.int32], NDArray[np.float32]]  # (n, k) columns and cosines, best first
TILE_SIZE = 1024  # rows and columns of a tile: 4 MB
SAMPLE_COLUMNS = 2048  # columns from which bounds are estimated
SAMPLE_BUCKET_COLUMNS = 16  # columns of a bucket of the sample, whose maximum alone is looked at where that suffices
ROWS_COMPARED_AGAIN = 256  # rows compared at a time where single rows are compared again
MAX_HELD_PAIRS = 512  # pairs that a row of a strip holds on average, at most, unless k is large
MIN_FREE_SHARE = 0.8  # the pool is packed when a smaller share of it is free
SEEDS_AT_A_TIME = 64  # seeds compared at a time: so few that an earlier one seldom takes a later one


def nearest(vectors: Vectors, k: int, progress: Progress = no_progress) -> NeighbourLists:
    """Returns (n, k) the k other rows of the largest cosine for every row, and (n, k) these cosines, in fp32.

    It uses the GPU, or else all cores. Equal computed cosines are in the order of their rows; cosines of equal rows may
    differ in the last bit.

    Args:
        vectors: (n, d) the rows.
        k: from 1 to n - 1.
        progress: counts the n rows.

    Raises:
        UsageError: k is not from 1 to n - 1, or a row is not finite.
    """
    from milkglass.nearest.products import limit_threads  # imports torch, which listing methods does not need

    n = len(vectors)
    require_k(k, n - 1, lowest=1)
    vectors = np.asarray(vectors, np.float32)
    if nonfinite_count := int((~np.isfinite(vectors).all(1)).sum()):
        raise UsageError(f"{nonfinite_count} of {n} rows are not finite in fp32", "repair the table, or leave them out")
    unit = unit_rows(vectors)
    lists = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
    if device.on_gpu():
        _fill_on_gpu(unit, k, lists, progress)
        return lists
    incomplete_rows = list[Future[Ids]]()
    with limit_threads(1) as begin, ThreadPoolExecutor(core_count(), initializer=begin) as pool:
        bounds = _estimate_bounds(unit, k, pool)
        strips = [_Strip(top, k, bounds[top : top + TILE_SIZE]) for top in range(0, n, TILE_SIZE)]
        done_by_strip = np.diff(n * np.cumsum(np.arange(len(strips), -1, -1)) // sum(range(len(strips) + 1)), prepend=0)
        for index, strip in enumerate(strips):
            tiles = _run_ahead(pool, partial(_tile_pairs, unit, bounds, strip.top), range(strip.top, n, TILE_SIZE))
            for other_strip, (row_pairs, column_pairs) in zip(strips[index:], tiles, strict=True):
                strip.add(row_pairs)
                if other_strip is not strip:
                    other_strip.add(column_pairs)
            incomplete_rows.append(pool.submit(strip.finish, *lists))
            progress(int(done_by_strip[index]))
    _compare_again(unit, np.concatenate([future.result() for future in incomplete_rows]), *lists)
    return lists


def _fill_on_gpu(unit: Vectors, k: int, lists: NeighbourLists, progress: Progress) -> None:
    """Writes the lists of all rows, by comparing each row with all others.

    A GPU compares each pair twice in less time than the CPU needs to take out a tile's pairs.
    """
    table = device.tensor(unit)
    for top in range(0, len(unit), TILE_SIZE):
        block = table[top : top + TILE_SIZE] @ table.T
        block.diagonal(top).fill_(-math.inf)  # a row is not its own neighbour
        values, columns = block.sort(dim=1, descending=True, stable=True)  # topk gives equal values any order
        rows = slice(top, top + len(block))
        lists[0][rows], lists[1][rows] = device.array(columns[:, :k]), device.array(values[:, :k])
        progress(len(block))


def _run_ahead(
    pool: ThreadPoolExecutor, work: Callable[[int], tuple[Pairs, Pairs]], first_columns: range
) -> Iterator[tuple[Pairs, Pairs]]:
    """Yields the results of `work` in the order of the columns, a few of them computed ahead."""
    max_waiting, waiting = 2 * core_count(), deque[Future[tuple[Pairs, Pairs]]]()
    for first_column in first_columns:
        waiting.append(pool.submit(work, first_column))
        if len(waiting) > max_waiting:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _estimate_bounds(unit: Vectors, k: int, pool: ThreadPoolExecutor) -> NDArray[np.float32]:
    """Returns (n,) for each row a cosine that, by a sample, k others reach with three deviations to spare."""
    import torch

    from milkglass.nearest.products import Cosines

    n, size = len(unit), min(SAMPLE_COLUMNS, len(unit))
    sample = Cosines.of(torch.from_numpy(unit[np.linspace(0, n - 1, size).astype(np.int64)]))
    expected = k * size / n
    rank = min(size, math.ceil(expected + 3 * math.sqrt(expected)) + 2)  # one more, since the row may be in the sample
    bucket_count = min(size, max(SAMPLE_BUCKET_COLUMNS * rank, size // SAMPLE_BUCKET_COLUMNS))
    bucket_size = size // bucket_count

    def strip_bounds(top: int) -> NDArray[np.float32]:
        """Returns the estimated bounds of a strip of rows."""
        block = sample(torch.from_numpy(unit[top : top + TILE_SIZE]))[0].numpy()
        maxima = block[:, : bucket_size * bucket_count].reshape(len(block), bucket_size, bucket_count).max(1)
        return np.partition(maxima, bucket_count - rank, axis=1)[:, bucket_count - rank]

    return np.concatenate([*pool.map(strip_bounds, range(0, n, TILE_SIZE))])


def _tile_pairs(unit: Vectors, bounds: NDArray[np.float32], top: int, first_column: int) -> tuple[Pairs, Pairs]:
    """Returns a tile's pairs that reach their row's bound, and, transposed, those that reach their column's."""
    import torch

    from milkglass.nearest.products import product

    block = product(
        torch.from_numpy(unit[top : top + TILE_SIZE]), torch.from_numpy(unit[first_column : first_column + TILE_SIZE])
    ).numpy()
    if top == first_column:
        np.fill_diagonal(block, -np.inf)  # a row is not its own neighbour
    row, column, value = _reached_pairs(block, block >= bounds[top : top + TILE_SIZE, None])
    row_pairs = (row.astype(np.int16), column + np.int32(first_column), value)
    if top == first_column:
        return row_pairs, row_pairs
    row, column, value = _reached_pairs(block, block >= bounds[first_column : first_column + TILE_SIZE])
    return row_pairs, (column.astype(np.int16), row + np.int32(top), value)


def _reached_pairs(
    block: NDArray[np.float32], is_reached: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Returns the rows, the columns and the values of a block where they reached their bounds."""
    flat_index = np.flatnonzero(is_reached)
    row, column = np.divmod(flat_index.astype(np.int32), np.int32(block.shape[1]))
    return row, column, block.ravel()[flat_index]


@dataclass
class _Strip:
    """Collects the pairs of up to TILE_SIZE rows that reached their bounds, in the order of their columns.

    Attributes:
        top: the index of the strip's first row.
        k: how many neighbours each row needs.
        bounds: (b,) the cosine that a pair must reach; a view of the bounds of all rows.
        pairs: the pairs that are held.
        pair_count: how many pairs are held.
    """

    top: int
    k: int
    bounds: NDArray[np.float32] = field(repr=False)
    pairs: list[Pairs] = field(default_factory=list, repr=False)
    pair_count: int = 0

    def add(self, pairs: Pairs) -> None:
        """Adds pairs, whose columns must be larger than those of all pairs before."""
        self.pairs.append(pairs)
        self.pair_count += len(pairs[0])
        if self.pair_count > len(self.bounds) * max(MAX_HELD_PAIRS, 4 * self.k):
            self._prune()

    def finish(self, ids: NDArray[np.int32], cosines: NDArray[np.float32]) -> Ids:
        """Writes the lists of this strip's rows. Returns rows with fewer than k neighbours, whose lists are wrong."""
        columns, values, counts = self._select_best()
        self.pairs = []
        rows = slice(self.top, self.top + len(self.bounds))
        ids[rows], cosines[rows] = columns, values
        return self.top + np.flatnonzero(counts < self.k)

    def _prune(self) -> None:
        """Keeps the k best pairs of each row. A later pair must be better, since ties go to the smaller index."""
        columns, values, counts = self._select_best()
        is_full = counts >= self.k
        self.bounds[is_full] = np.nextafter(values[is_full, -1], np.float32(np.inf))
        row, rank = np.nonzero(np.arange(self.k) < counts[:, None])
        self.pairs, self.pair_count = [(row.astype(np.int16), columns[row, rank], values[row, rank])], len(row)

    def _select_best(self) -> tuple[NDArray[np.int32], NDArray[np.float32], Ids]:
        """Returns (b, k) the best columns and their cosines, ties by column, and (b,) how many pairs each row has."""
        row, column, value = (np.concatenate(parts) for parts in zip(*self.pairs, strict=True))
        counts = np.bincount(row, minlength=len(self.bounds))
        keys = np.full((len(counts), max(self.k, int(counts.max()))), np.iinfo(np.int64).max)
        keys[np.arange(keys.shape[1]) < counts[:, None]] = _pack(column, value)[np.argsort(row, kind="stable")]
        keys.partition(self.k - 1, axis=1)
        return *_unpack(np.sort(keys[:, : self.k], axis=1)), counts


def _pack(column: NDArray[np.int32], value: NDArray[np.float32]) -> NDArray[np.int64]:
    """Packs pairs into integers, which NumPy sorts faster than it ranks: by descending values, then columns."""
    descending = ~_ordered_bits((value + np.float32(0)).view(np.int32))  # -0 is 0
    return descending.astype(np.int64) << 32 | column


def _unpack(keys: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns the columns and values of packed pairs."""
    return keys.astype(np.int32), _ordered_bits(~(keys >> 32).astype(np.int32)).view(np.float32)


def _ordered_bits(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    """Maps the bits of numbers to integers in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _compare_again(unit: Vectors, rows: Ids, ids: NDArray[np.int32], cosines: NDArray[np.float32]) -> None:
    """Recomputes the lists of these rows by comparison with all others."""
    for start in range(0, len(rows), ROWS_COMPARED_AGAIN):
        row_block = rows[start : start + ROWS_COMPARED_AGAIN]
        block = unit[row_block] @ unit.T
        block[np.arange(len(row_block)), row_block] = -np.inf
        ids[row_block], cosines[row_block] = k_largest(block, ids.shape[1])


def group_rows(vectors: Vectors, order: Ids, k: int, metric: Metric, progress: Progress = no_progress) -> list[Ids]:
    """Divides the rows into groups of k: the first free row in `order` takes the k - 1 nearest free rows, and so on.

    The fewer than k rows that remain at the end join the last group, which then has up to 2k - 1. A smaller group would
    hide its rows less than requested. Memory is a block times n, never n x n.

    Args:
        vectors: (n, d) the rows.
        order: (n,) the rows in the order in which they begin groups.
        k: the size of a group, from 2 to n.
        metric: what "nearest" means.
        progress: counts the n rows.

    Returns:
        The indices of the rows of each group. The row that began the group is the first.

    Raises:
        UsageError: k is not from 2 to n.
    """
    n = len(vectors)
    require_k(k, n)
    rows = unit_rows(vectors) if metric == "cosine" else vectors
    pool, pool_rows, waiting = np.arange(n), rows, order  # the free rows, and some that were taken after it was packed
    is_free, free_count, group_list = np.ones(n, np.bool_), n, list[Ids]()
    while free_count >= k:
        waiting = waiting[is_free[waiting]]
        if free_count < MIN_FREE_SHARE * len(pool):
            pool = np.flatnonzero(is_free)
            pool_rows = rows[pool]
        is_taken = ~is_free[pool]
        seeds = waiting[:SEEDS_AT_A_TIME]
        for seed, similarity in zip(seeds, similarities(rows[seeds], pool_rows, metric), strict=True):
            if not is_free[seed] or free_count < k:
                continue
            similarity[is_taken] = -np.inf
            similarity[np.searchsorted(pool, seed)] = np.inf  # the seed is in its own group, in spite of rounding
            group = k_largest(similarity[None], k)[0][0]
            is_taken[group], is_free[pool[group]] = True, False
            free_count -= k
            group_list.append(pool[group])
            progress(k)
    group_list[-1] = np.concatenate([group_list[-1], np.flatnonzero(is_free)])
    return group_list
