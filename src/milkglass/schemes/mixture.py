"""Mixes rows within clusters by the weight matrix W of a scheme, and reports how far its (k, epsilon) promise is met.

W @ table is the mixed table. It is computed in blocks of rows. Only the rows that a block mixes are read, BLOCK_BYTES
of them in fp32 at a time, so the table may be larger than memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Ids = NDArray[np.int64]

BLOCK_BYTES = 16 << 20  # bytes in fp32 of the rows that are mixed at a time: larger blocks take longer


class Draws(Protocol):
    """Draws secret numbers for one purpose, from a key's stream."""

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Returns (count,) draws from the uniform distribution on [0, 1)."""
        ...

    def laplace(self, count: int) -> NDArray[np.float64]:
        """Returns (count,) draws from Laplace(1)."""
        ...


class RowMap(Protocol):
    """Makes the rows that replace a table's, before they are permuted."""

    def apply(self, table: torch.Tensor, rows: Ids) -> torch.Tensor:
        """Computes rows of the new table.

        Args:
            table: (n, d), or (n,) for a bias.
            rows: (r,) the rows that are computed.

        Returns:
            (r, d) or (r,), in the dtype of the table.
        """
        ...

    def cluster_report(self, k: int) -> ClusterReport:
        """Reports how far the promise is met that each token hides among k."""
        ...


@dataclass(frozen=True)
class Mixture:
    """Holds the weight matrix W (n, n) as compressed rows. Only the blocks of the clusters are stored.

    Row i mixes `members[indptr[i]:indptr[i + 1]]` with the same slice of `weights`. A row outside every cluster is its
    own and only member.

    Attributes:
        indptr: (n + 1,) where each row's members begin.
        members: (entries,) the rows of the table that are mixed: column indices of W, as SciPy's `indices`.
        weights: (entries,) the weight of each of them.
        sizes: (n,) the size of each row's cluster, 0 outside every cluster.
        shared: whether all rows of a cluster are equal.
    """

    indptr: NDArray[np.int64]
    members: NDArray[np.int64]
    weights: NDArray[np.float32]
    sizes: NDArray[np.int64]
    shared: bool = False

    @classmethod
    def of(cls, n: int, clusters: list[Ids], weights: list[NDArray[np.float32]]) -> Mixture:
        """Returns W of n rows, in which weights[c] (s, s) mixes the s rows of clusters[c]."""
        sizes = np.zeros(n, np.int64)
        for cluster in clusters:
            sizes[cluster] = len(cluster)
        indptr = np.concatenate([[0], np.cumsum(np.maximum(sizes, 1))])
        members = np.empty(indptr[-1], np.int64)
        flat_weights = np.empty(indptr[-1], np.float32)
        unclustered = np.flatnonzero(sizes == 0)
        members[indptr[unclustered]], flat_weights[indptr[unclustered]] = unclustered, 1
        for cluster, block in zip(clusters, weights, strict=True):
            positions = indptr[cluster][:, None] + np.arange(len(cluster))
            members[positions], flat_weights[positions] = cluster[None, :], block
        return cls(indptr, members, flat_weights, sizes)

    @classmethod
    def identity(cls, n: int) -> Mixture:
        """Returns W = I, for the permutation alone."""
        return cls.of(n, [], [])

    def apply(self, table: torch.Tensor, rows: Ids) -> torch.Tensor:
        """Returns these rows of W @ table in the table's dtype, with sums in fp32.

        Blocks are chosen so that the rows they mix stay small in fp32: a few thousand rows mix most of the table.
        """
        import torch  # not for the commands that open a key and no table

        counts = self.indptr[rows + 1] - self.indptr[rows]
        max_mixed_rows = max(1, BLOCK_BYTES // (4 * max(1, table[0].numel())))
        mixed_rows = table.new_empty((len(rows), *table.shape[1:]))
        for block in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(np.cumsum(counts) // max_mixed_rows)) + 1):
            # Long is, for example, the row of a symbol that stands for half of the vocabulary
            is_long = counts[block] > max_mixed_rows
            for mixed_indices in (block[~is_long], *np.split(block[is_long], range(1, int(is_long.sum())))):
                if len(mixed_indices):
                    mixed_rows[torch.from_numpy(mixed_indices)] = self._mix(table, rows[mixed_indices], max_mixed_rows)
        return mixed_rows

    def _mix(self, table: torch.Tensor, rows: Ids, max_mixed_rows: int) -> torch.Tensor:
        """Computes one row of W @ table, or several that together mix few rows of the table.

        A row that mixes more than `max_mixed_rows` rows is summed in parts, each starting from the sum before, so that
        the sum equals the unsplit one to the last bit.
        """
        counts = self.indptr[rows + 1] - self.indptr[rows]
        positions = np.repeat(self.indptr[rows] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        positions += np.arange(len(positions))
        if len(rows) > 1:
            return _weighted_sums(table, self.members[positions], self.weights[positions], counts, None).to(table.dtype)
        total = None
        for start in range(0, len(positions), max_mixed_rows):
            part_positions = positions[start : start + max_mixed_rows]
            total = _weighted_sums(
                table,
                self.members[part_positions],
                self.weights[part_positions],
                np.array([len(part_positions)]),
                total,
            )
        assert total is not None
        return total.to(table.dtype)

    @classmethod
    def means(cls, n: int, clusters: list[Ids]) -> Mixture:
        """Returns a mixture in which every row of a cluster is the mean of its members."""
        sizes = [len(cluster) for cluster in clusters]
        uniform = cls.of(n, clusters, [np.full((size, size), 1 / size, np.float32) for size in sizes])
        return replace(uniform, shared=True)

    def cluster_report(self, k: int) -> ClusterReport:
        """Reports how far the promise is met that each token hides among k."""
        cluster_size_of_row = self.sizes[self.sizes > 0]
        distinct_sizes, counts = np.unique(cluster_size_of_row, return_counts=True)
        histogram = {int(s): int(c // s) for s, c in zip(distinct_sizes, counts, strict=True)}
        return ClusterReport(
            k=k,
            clusters=sum(histogram.values()),
            sizes=histogram,
            below_k=int((cluster_size_of_row < k).sum()),
            singletons=int((cluster_size_of_row == 1).sum()),
            verbatim=int((self.sizes == 0).sum()),
            shared=self.shared,
        )


def _weighted_sums(
    table: torch.Tensor, members: Ids, weights: NDArray[np.float32], counts: Ids, previous: torch.Tensor | None
) -> torch.Tensor:
    """Computes weighted sums of rows of a table.

    Args:
        table: (n, ...) the table.
        members: (total,) the rows of the first sum, of the second, and so on.
        weights: (total,) the weight of each of them.
        counts: (r,) how many rows each sum has.
        previous: (1, ...) fp32: the partial sum that the single sum continues. None: there is none.

    Returns:
        (r, ...) the sums in fp32.
    """
    import torch

    local_indices = members
    if previous is None and table.dtype == torch.float32 and table.dim() == 2:
        vectors = table
    else:
        used_rows, local_indices = np.unique(members, return_inverse=True)
        vectors = torch.empty(len(used_rows) + (previous is not None), table[0].numel())
        vectors[: len(used_rows)] = table[torch.from_numpy(used_rows)].reshape(len(used_rows), -1)
    if previous is not None:
        vectors[-1] = previous.flatten()
        local_indices, weights = np.append(len(used_rows), local_indices), np.append(np.float32(1), weights)
        counts = counts + 1
    sums = torch.nn.functional.embedding_bag(
        torch.from_numpy(local_indices),
        vectors,
        torch.from_numpy(np.concatenate([[0], np.cumsum(counts)[:-1]])),
        mode="sum",
        per_sample_weights=torch.from_numpy(weights),
    )
    return sums.reshape(len(counts), *table.shape[1:])


@dataclass(frozen=True)
class ClusterReport:
    """Reports how far the (k, epsilon) promise is met.

    Attributes:
        k: the number of tokens among which each is meant to hide.
        clusters: the number of clusters.
        sizes: how many clusters there are of each size.
        below_k: tokens in clusters smaller than k.
        singletons: tokens alone in their cluster, whose embedding is sent unchanged.
        verbatim: rows outside every cluster (special tokens, zero rows), which are only permuted; in a report of a
            symbol map, tokens with a symbol of their own.
        condition_number: that of W*, if the dimensions are mixed too (obfuslm_plus.py). None: they are not.
        aliases: how many ids each ordinary token has.
        shared: whether all rows of a cluster are equal.
    """

    k: int
    clusters: int
    sizes: dict[int, int]
    below_k: int
    singletons: int
    verbatim: int
    condition_number: float | None = None
    aliases: int = 1
    shared: bool = False

    def document(self) -> dict[str, Any]:
        """Returns the report as a JSON object, in which the condition number has its first name."""
        return {"condition" if name == "condition_number" else name: value for name, value in asdict(self).items()}
