"""Computes EmbedCluster and WeightSynth, Algorithms 1 and 2 of ObfusLM (appendix B).

EmbedCluster clusters similar rows and merges small clusters; WeightSynth makes the noisy weights with which a cluster's
rows are mixed. Deviations 1 to 4 of obfuslm.py are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device
from milkglass.nearest.products import BLOCK_BYTES, MIN_LENGTH, Cosines, Slack, blocks, limit_threads
from milkglass.nearest.seed_row import COSINE_DECIMALS, OUTSIDE_VALUE, SeedRow
from milkglass.nearest.select import LikelyRows
from milkglass.progress import Progress
from milkglass.schemes.mixture import Ids

Leftover = Literal["merge", "paper"]  # what becomes of clusters smaller than k

LARGE_TABLE_ROWS = 100_000  # rows from which on a first look in bf16 saves more time than comparing again takes
LONG_ROW_WIDTH = 1024  # dimensions from which on products take much longer than the search in their results
MIN_WAVE_SEEDS, MAX_WAVE_SEEDS = 32, 192  # seeds of a wave, which are compared together
WAVE_BYTES = 128 << 20  # the most bytes of the cosines of a wave
LaplaceDraws = Callable[[int], NDArray[np.float64]]  # takes a count, and returns so many draws of Laplace(1)
SCORE_STEP = 2.0**-40  # noisy scores are rounded to multiples of it


def unit_rows(table: torch.Tensor, rows: Ids, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns rows scaled to length 1, a zero row unchanged, computed in `dtype` and not in the checkpoint's type."""
    selected_rows = table.index_select(0, torch.from_numpy(rows).to(table.device))
    return torch.nn.functional.normalize(selected_rows.to(dtype), dim=1, eps=1e-30)


def count_reaching_quantile(n: int, beta: float) -> int:
    """Returns how many of n similarities are at least their beta-quantile (NumPy's, linear), apart from ties.

    The product is rounded, so that 0.9 * 10 is 9.
    """
    return n - int(np.ceil(round(beta * (n - 1), 9)))


def zero_rows(table: torch.Tensor) -> NDArray[np.bool_]:
    """Returns (n,) whether each row is zero and has no cosine, such as a padding row."""
    is_zero = torch.empty(len(table), dtype=torch.bool, device="cpu")
    for block in blocks(table):
        is_zero[block] = (table[block] == 0).all(dim=1)
    return is_zero.numpy()


def embed_cluster(table: torch.Tensor, order: Ids, k: int, beta: float, progress: Progress | None = None) -> list[Ids]:
    """Clusters rows of a table by Algorithm 1.

    Of D, the matrix of cosines, only the rows of free seeds are needed. These rows are first computed approximately for
    some seeds at a time, so few that an earlier seed's cluster seldom includes a later seed. Where the error could
    change the result, cosines are measured exactly (nearest/).

    Args:
        table: (n, d) the embeddings.
        order: (m,) the rows that are clustered, in the order in which they are visited; ties go to the earlier row.
        k: the size of a cluster.
        beta: a candidate's cosine must reach this quantile of its seed's cosines.
        progress: receives the number of rows of each cluster. None: nothing is reported.

    Returns:
        The rows of each cluster, the seed first.
    """
    rank = np.full(len(table), -1, np.int64)
    rank[order] = np.arange(len(order))
    is_free = rank >= 0  # by row of the table
    quantile_index = (len(order) - 1) - beta * (len(order) - 1)  # the quantile's index, from the largest
    clusters: list[Ids] = []
    cosines = replace(Cosines.of(device.move(table), k=k if len(table) >= LARGE_TABLE_ROWS else 0), row_source=table)
    for seed_row in _seed_rows(cosines, order, is_free, rank, (6 * k, int(quantile_index) + 2), 5 * k):
        is_free[seed_row.row] = False
        members = seed_row.nearest(is_free, k - 1, quantile_index) if k > 1 else order[:0]
        is_free[members] = False
        clusters.append(np.concatenate([[seed_row.row], members]))
        if progress:
            progress(1 + len(members))
    return clusters


def _seed_rows(
    cosines: Cosines,
    order: Ids,
    is_free: NDArray[np.bool_],
    rank: Ids,
    bound_counts: tuple[int, int],
    rows_per_seed: int,
) -> Iterator[SeedRow]:
    """Yields a row of D for each seed that is free when its turn comes. The next seeds' rows are computed meanwhile.

    Args:
        cosines: measures cosines of the table's rows.
        order: (m,) the rows that may be seeds, in the order of their turns.
        is_free: (n,) whether each row is in no cluster yet; the caller changes it between two rows.
        rank: (n,) the turn of each row; -1 for a row that does not take part.
        bound_counts: how many rows must reach the higher and the lower bound of `LikelyRows`.
        rows_per_seed: the number of free rows for each seed of a wave, about.
    """
    max_seeds = max(1, min(max(MAX_WAVE_SEEDS, cosines.table.shape[1] // 4), WAVE_BYTES // (6 * len(is_free))))
    next_place = 0

    def next_seeds() -> Ids:
        """Returns the seeds of the next wave."""
        nonlocal next_place
        remaining = order[next_place:]
        remaining = remaining[is_free[remaining]]
        # A multiple, so that products have few shapes: oneDNN keeps code for each
        whole_blocks = min(max_seeds, len(remaining) // rows_per_seed) // MIN_WAVE_SEEDS * MIN_WAVE_SEEDS
        seeds = remaining[: max(min(max_seeds, MIN_WAVE_SEEDS), whole_blocks)]
        next_place = int(rank[seeds[-1]]) + 1 if len(seeds) else len(order)
        return seeds

    # Rows of long vectors take all threads to make. Others are made by two workers, which also look for likely values
    all_threads = torch.get_num_threads()
    workers = 1 if cosines.table.shape[1] >= LONG_ROW_WIDTH else min(2, all_threads)
    with limit_threads(all_threads // workers) as begin, ThreadPoolExecutor(workers, initializer=begin) as pool:

        def start_wave() -> list[Future[_SeedBatch]]:
            seeds_of_workers = [seeds for seeds in np.array_split(next_seeds(), workers) if len(seeds)]
            return [pool.submit(_SeedBatch.of, cosines, seeds, rank, bound_counts) for seeds in seeds_of_workers]

        wave = start_wave()
        while wave:
            next_wave = start_wave()
            for future in wave:
                yield from future.result().free_rows(is_free)
            wave = next_wave  # rows of a wave that was read take memory no longer


@dataclass(frozen=True)
class _SeedBatch:
    """Computes the rows of D for some seeds, in few calls, since many would slow the thread that reads the rows.

    Attributes:
        cosines: measures cosines of the table's rows.
        seeds: (b,) the rows that may begin a cluster, in order.
        rough: (b, n) the cosines of the seeds, `OUTSIDE_VALUE` for a row that does not take part.
        slack: the largest error of these cosines.
        rank: (n,) the turn of each row; -1 for a row that does not take part.
        likely: the entries of each row that reach likely thresholds.
    """

    cosines: Cosines = field(repr=False)
    seeds: Ids = field(repr=False)
    rough: NDArray[np.float32] = field(repr=False)
    slack: Slack
    rank: Ids = field(repr=False)
    likely: LikelyRows = field(repr=False)

    @classmethod
    def of(cls, cosines: Cosines, seeds: Ids, rank: Ids, bound_counts: tuple[int, int]) -> _SeedBatch:
        """Computes the rows of some seeds (b,). See `_seed_rows` for the other arguments."""
        rough, slack = cosines(cosines.table.index_select(0, torch.from_numpy(seeds).to(cosines.table.device)))
        rough[:, torch.from_numpy(np.flatnonzero(rank < 0))] = OUTSIDE_VALUE
        cosine_array = device.array(rough)
        return cls(cosines, seeds, cosine_array, slack, rank, LikelyRows.of(cosine_array, *bound_counts))

    def free_rows(self, is_free: NDArray[np.bool_]) -> Iterator[SeedRow]:
        """Yields the row of each seed that is free when its turn comes. `is_free` (n,) may change between two rows."""
        for index, seed in enumerate(self.seeds.tolist()):
            if is_free[seed]:
                yield SeedRow(self.cosines, seed, self.rough[index], self.slack, self.rank, self.likely[index])


def merge_small_clusters(table: torch.Tensor, clusters: list[Ids], k: int) -> list[Ids]:
    """Joins each cluster smaller than k, in order, to the cluster of the nearest mean direction, below 2k rows in all.

    Without this bound the mean of a grown cluster attracts every outlier, since these all become similar to their
    common mean. Only if nothing fits below 2k does the nearest cluster grow further.

    Args:
        table: (n, d) the embeddings.
        clusters: arrays of rows of the table.
        k: the least size of a cluster.
    """
    merged = list(clusters)
    means = _mean_directions(table, clusters)
    norms = np.maximum(np.linalg.norm(means, axis=1), np.float32(MIN_LENGTH))
    sizes = np.array([len(cluster) for cluster in merged], np.int64)  # 0 once it has joined another
    small_indices, block_size = np.flatnonzero(sizes < k), max(1, BLOCK_BYTES // (4 * max(1, len(merged))))
    for block in np.split(small_indices, range(block_size, len(small_indices), block_size)):
        row_of = {i: row for row, i in enumerate(block.tolist())}
        own_means, cosines = means[block], (means[block] @ means.T) / norms
        for i, row in row_of.items():
            size = int(sizes[i])
            is_other = sizes > 0
            is_other[i] = False
            if size >= k or not is_other.any():
                continue
            fits = is_other & (sizes + size < 2 * k)
            j = int(np.where(fits if fits.any() else is_other, cosines[row], -np.inf).argmax())
            means[j] += (means[i] - means[j]) * np.float32(size / (sizes[j] + size))
            norms[j] = max(np.linalg.norm(means[j]), np.float32(MIN_LENGTH))
            if j in row_of:
                own_means[row_of[j]] = means[j]
                cosines[row_of[j]] = means @ means[j] / norms
            cosines[:, j] = own_means @ means[j] / norms[j]
            merged[j] = np.concatenate([merged[j], merged[i]])
            sizes[j], sizes[i] = len(merged[j]), 0
    return [cluster for cluster, size in zip(merged, sizes.tolist(), strict=True) if size]


def _mean_directions(table: torch.Tensor, clusters: list[Ids]) -> NDArray[np.float32]:
    """Returns (c, d) the mean of each cluster's unit rows. Clusters of one size are computed together."""
    sizes = np.array([len(cluster) for cluster in clusters])
    means = np.empty((len(clusters), table.shape[1]), np.float32)
    for size in np.unique(sizes).tolist():
        same_size = np.flatnonzero(sizes == size)
        block_size = max(1, BLOCK_BYTES // (4 * size * table.shape[1]))
        for block in np.split(same_size, range(block_size, len(same_size), block_size)):
            rows = unit_rows(table, np.concatenate([clusters[c] for c in block]))
            means[block] = rows.reshape(len(block), size, -1).mean(1).cpu().numpy()
    return means


def weight_synth(
    table: torch.Tensor, clusters: list[Ids], epsilon: float, noise: LaplaceDraws
) -> list[NDArray[np.float32]]:
    """Returns (s, s) weights for each cluster of s tokens by Algorithm 2; each row sums to 1.

    The noise is drawn cluster by cluster, s * s numbers each, independently of the order of the work: clusters of one
    size are computed together. Noisy scores are rounded to SCORE_STEP. No guarantee rests on this noise: see (4) in
    `paper.deviations`.

    Args:
        table: (n, d) the embeddings.
        clusters: arrays of rows of the table.
        epsilon: the privacy parameter of the scores.
        noise: draws a given count of Laplace(1).
    """
    sizes = np.array([len(cluster) for cluster in clusters], np.int64)
    ends = np.cumsum(sizes**2)
    draws = noise(int(ends[-1])) if len(clusters) else np.empty(0)
    # In one piece: small arrays that were kept between the blocks of rows would hold these, up to 2 GB of them
    weights = np.empty(len(draws), np.float32)
    for size in np.unique(sizes).tolist():
        same_size = np.flatnonzero(sizes == size)
        block_size = max(1, BLOCK_BYTES // (8 * size * table.shape[1]))
        for block in np.split(same_size, range(block_size, len(same_size), block_size)):
            positions = (ends[block] - size**2)[:, None] + np.arange(size**2)
            z = draws[positions].reshape(-1, size, size)
            block_weights = _weights(table, np.stack([clusters[c] for c in block]), epsilon, z)
            weights[positions] = block_weights.reshape(len(block), -1)
    spans = zip((ends - sizes**2).tolist(), ends.tolist(), sizes.tolist(), strict=True)
    return [weights[begin:end].reshape(size, size) for begin, end, size in spans]


def _weights(table: torch.Tensor, members: Ids, epsilon: float, z: NDArray[np.float64]) -> NDArray[np.float32]:
    """Computes lines 5 to 9 of Algorithm 2 for c clusters of s tokens at once; members (c, s), z (c, s, s)."""
    unit = unit_rows(table, members.reshape(-1), torch.float64).reshape(*members.shape, -1)
    cosines = np.round((unit @ unit.transpose(1, 2)).numpy(), COSINE_DECIMALS)
    scale = (cosines.max(2, keepdims=True) - cosines.min(2, keepdims=True)) / 2
    u = np.round((epsilon * cosines / 2 + scale * z) / SCORE_STEP) * SCORE_STEP
    e = np.exp(u - u.max(2, keepdims=True))
    return (e / e.sum(2, keepdims=True)).astype(np.float32)
