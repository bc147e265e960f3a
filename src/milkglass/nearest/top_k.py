"""Finds the k nearest rows of a table for each query, exactly, in blocks, on a CPU or a GPU.

A block of queries meets the whole table in one product. Pairs that may be among the k best are measured again one by
one, so that the result does not depend on the blocks, and equal rows tie.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from milkglass.nearest.products import BLOCK_BYTES, Cosines, Slack, blocks, lengths
from milkglass.nearest.select import COLUMNS_PER_BUCKET, Metric

COSINE_BYTES = 16 << 20  # bytes of cosines at a time: larger arrays are allocated anew by the system each time


@dataclass(frozen=True)
class TopK:
    """Holds the nearest rows of some queries.

    Attributes:
        rows: (q, k) the indices of rows of the table, nearest first; ties go to the lower one.
        values: (q, k) fp32 cosines, or minus half the squared Euclidean distances.
    """

    rows: torch.Tensor = field(repr=False)
    values: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class ExactIndex:
    """Searches a table, which is prepared once, for the nearest rows of queries.

    Attributes:
        table: (n, d) its rows, on any device.
        metric: what "nearest" means. A row of zeros has a cosine of 0 with everything.
        cosines: compares queries with the rows; for distances, with the rows less their mean, which changes products
            and not distances.
        shift: (d,) that mean; zeros for cosines.
        half_squares: (n,) |t|^2 / 2 of these rows; zeros for cosines.
    """

    table: torch.Tensor = field(repr=False)
    metric: Metric
    cosines: Cosines = field(repr=False)
    shift: torch.Tensor = field(repr=False)
    half_squares: torch.Tensor = field(repr=False)

    @classmethod
    def of(cls, table: torch.Tensor, metric: Metric = "cosine", k: int = 1) -> ExactIndex:
        """Prepares a table.

        Args:
            table: (n, d) the rows, on any device.
            metric: what "nearest" means.
            k: how many neighbours will mostly be asked for. It changes the speed, not the results.
        """
        if metric == "cosine":
            cosines = Cosines.of(table, k=k)
            return cls(table, metric, cosines, table.new_zeros(table.shape[1]), torch.zeros_like(cosines.scale))
        shift = _mean(table)
        cosines = Cosines.of(table, shift)
        return cls(table, metric, cosines, shift, cosines.scale.reciprocal().square_() / 2)

    def top_k(self, queries: torch.Tensor, k: int) -> TopK:
        """Returns the k nearest rows for queries (q, d), on the table's device. A table of fewer rows gives all."""
        k = min(k, len(self.table))
        step = max(16, COSINE_BYTES // (4 * len(self.table)))
        blocks_of_queries = [block for block in queries.to(self.table.device).split(step) if len(block)]
        empty = TopK(torch.empty(0, k, dtype=torch.long), torch.empty(0, k))
        top_of_blocks = [self._top_k_of_block(block.float(), k) for block in blocks_of_queries] or [empty]
        return TopK(torch.cat([top.rows for top in top_of_blocks]), torch.cat([top.values for top in top_of_blocks]))

    def _top_k_of_block(self, queries: torch.Tensor, k: int) -> TopK:
        """Returns the k nearest rows to one block of queries."""
        values, slack = self._compare(queries)
        values.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)  # a row without numbers is near nothing
        query, row = _rows_and_columns(values >= slack.below(slack.below(_reached_values(values, k)[:, None])))
        counts = torch.bincount(query, minlength=len(queries))
        first = counts.cumsum(0) - counts
        # In order of the rows, which a stable sort keeps among equal values
        measured = self._measure(queries, query, row)
        padded = measured.new_full((len(queries), int(counts.max())), -torch.inf)
        column = torch.arange(len(query), device=query.device) - first[query]
        padded[query, column] = measured
        best, columns = padded.sort(dim=1, descending=True, stable=True)
        return TopK(row[first[:, None] + columns[:, :k]], best[:, :k].float())

    def _compare(self, queries: torch.Tensor) -> tuple[torch.Tensor, Slack]:
        """Returns (b, n) values, and their largest error."""
        if self.metric == "cosine":
            return self.cosines(queries)
        longest = float(self.cosines.scale.nan_to_num(torch.inf).min().reciprocal())
        rows = queries - self.shift
        slack = self.cosines.slack.fixed * longest * (lengths(rows) + longest)
        return self.cosines.products(rows).sub_(self.half_squares), Slack(slack.nan_to_num(0)[:, None])

    def _measure(self, queries: torch.Tensor, query: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Returns (p,) the values of pairs of a query and a row (p,) each, in fp64 for distances."""
        step = max(1, BLOCK_BYTES // (8 * self.table.shape[1]))
        is_cosine = self.metric == "cosine"
        # products of tiny rows would be zero
        scaled_queries = queries / lengths(queries)[:, None] if is_cosine else queries.double()
        values = list[torch.Tensor]()
        for query_block, row_block in zip(query.split(step), row.split(step), strict=True):
            queries_of_pairs, rows = scaled_queries[query_block], self.table[row_block]
            if is_cosine:
                values.append(torch.linalg.vecdot(queries_of_pairs, rows.float()) * self.cosines.scale[row_block])
            else:
                values.append((queries_of_pairs - rows).square().sum(1) / -2)
        return torch.cat(values).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _mean(table: torch.Tensor) -> torch.Tensor:
    """Returns (d,) the fp32 mean of the finite rows."""
    total, count = torch.zeros(table.shape[1], dtype=torch.float64, device=table.device), 0
    for block in blocks(table):
        rows = table[block].float()
        rows = rows[rows.isfinite().all(1)]
        total, count = total + rows.double().sum(0), count + len(rows)
    return (total / max(count, 1)).float()


def _reached_values(values: torch.Tensor, k: int) -> torch.Tensor:
    """Returns (b,) a value that at least k columns of each row reach, and few more if k is small (select.py)."""
    bucket_count = values.shape[1] // COLUMNS_PER_BUCKET
    if k > bucket_count // 2:
        return values.topk(k, dim=1).values[:, -1]
    maxima = (
        values[:, : bucket_count * COLUMNS_PER_BUCKET].reshape(len(values), COLUMNS_PER_BUCKET, bucket_count).amax(1)
    )
    return maxima.topk(k, dim=1).values[:, -1]


def _rows_and_columns(reached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the row and the column of each true entry, ordered by row. NumPy finds them faster than torch."""
    if reached.device.type != "cpu":
        query, row = reached.nonzero(as_tuple=True)
        return query, row
    flat_index = torch.from_numpy(np.flatnonzero(reached.numpy()))
    return flat_index // reached.shape[1], flat_index % reached.shape[1]
