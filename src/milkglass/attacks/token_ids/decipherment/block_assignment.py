"""Lays out the cells of groups of ids as flat arrays, and predicts from embeddings which neighbours a token has.

A *cell* is the probability that row a (a scrambled id) stands for member b (a public id) of its group. The cells of one
row are adjacent, and so are those of one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.attacks.token_ids.decipherment.bigrams import Floats, PairCounts, PublicPairCounts, sum_by_index
from milkglass.sequences import Ids
from milkglass.threat.knowledge import Candidates

PAIRS_AT_A_TIME = 2_000_000  # pairs of members joined at a time
SINKHORN_ROUNDS = 12  # enough for an approximate balance
MAX_WEIGHT_COUNT = 50.0  # a token that occurs more often than this weighs no more in the regression
MIN_RELATIVE_SHARE = 0.05  # predicted shares are never below this part of a class' mean share
KMEANS_ROUNDS = 10  # rounds of the k-means that makes classes of groups


def ranges(starts: Ids, counts: Ids) -> Ids:
    """Returns the numbers start, start + 1, ... of each range, `count` of each, concatenated."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))


class BlockAssignment:
    """Holds the cells of all groups, as flat arrays.

    Attributes:
        rows: (R,) scrambled ids.
        first_cell, cell_count: (R,) the first cell of each row, and how many cells it has.
        group_of_row: (R,) the group of each row.
        row_of_cell, column_of_cell, member_of_cell: (cells,) the row, the column and the public id of each cell;
            columns are numbered over all groups.
        capacity: (columns,) the greatest sum of the beliefs of a column.
        column_member, column_group: (columns,) the public id and the group.
        first_column: (groups,) the first column of each group.
        row_of_id: (n',) the row of each scrambled id, -1 outside every group.
    """

    def __init__(self, candidates: Candidates, size: int) -> None:
        groups = candidates.groups
        row_counts = np.array([len(group.rows) for group in groups], np.int64)
        member_counts = np.array([len(group.members) for group in groups], np.int64)
        self.rows = np.concatenate([np.empty(0, np.int64), *(group.rows for group in groups)])
        self.group_of_row = np.repeat(np.arange(len(groups)), row_counts)
        self.cell_count = member_counts[self.group_of_row]
        self.first_cell = np.cumsum(self.cell_count) - self.cell_count
        self.column_member = np.concatenate([np.empty(0, np.int64), *(group.members for group in groups)])
        self.column_group = np.repeat(np.arange(len(groups)), member_counts)
        self.first_column = np.cumsum(member_counts) - member_counts
        self.row_of_cell = np.repeat(np.arange(len(self.rows)), self.cell_count)
        self.column_of_cell = ranges(self.first_column[self.group_of_row], self.cell_count)
        self.member_of_cell = self.column_member[self.column_of_cell]
        self.capacity = np.repeat(np.maximum(row_counts / np.maximum(member_counts, 1), 1.0), member_counts)
        self.row_of_id = np.full(size, -1, np.int64)
        self.row_of_id[self.rows] = np.arange(len(self.rows))

    def row_sums(self, values: Floats) -> Floats:
        """Returns (R,) the sum of `values` (cells,) over each row's cells."""
        return sum_by_index(self.row_of_cell, values, len(self.rows))

    def log_softmax(self, scores: Floats) -> Floats:
        """Returns (cells,) the log softmax of scores (cells,) over each row's cells."""
        shifted = scores - np.maximum.reduceat(scores, self.first_cell)[self.row_of_cell]
        return shifted - np.log(self.row_sums(np.exp(shifted)))[self.row_of_cell]

    def balance(self, scores: Floats, temperature: float) -> Floats:
        """Returns Sinkhorn and Knopp's soft assignment: rows sum to 1, columns to at most their capacity.

        Args:
            scores: (cells,) the log-likelihood of each reading, and the evidence for it.
            temperature: divides the scores.
        """
        if not len(scores):
            return scores
        belief = np.exp(self.log_softmax(scores / temperature))
        for _ in range(SINKHORN_ROUNDS):
            column_sums = np.bincount(self.column_of_cell, belief, len(self.capacity))
            belief *= np.minimum(self.capacity / np.maximum(column_sums, 1e-300), 1.0)[self.column_of_cell]
            belief /= np.maximum(self.row_sums(belief), 1e-300)[self.row_of_cell]
        return belief


class BigramJoin:
    """Finds for each scrambled bigram every public bigram that it could be.

    An edge is a distinct scrambled bigram (a, a'). A slot is an edge with one reading of one of its ends. Slots of side
    0 ask what a' says about a reading of a, slots of side 1 what a says about a reading of a'.

    Attributes:
        counts: (edges,) how often each edge occurs.
        ends: the rows of a and of a', (edges,) each.
        slot_cell: by side, the cell about which a slot says something.
        slot_edge: by side, the slot's edge.
        hit_slot, hit_cell, hit_counts: for each public bigram that fits, its two slots, its two cells and its count.
    """

    def __init__(self, blocks: BlockAssignment, scrambled: PairCounts, public: PairCounts) -> None:
        left_rows, right_rows = blocks.row_of_id[scrambled.left], blocks.row_of_id[scrambled.right]
        in_blocks = (left_rows >= 0) & (right_rows >= 0)
        key = (
            blocks.group_of_row[left_rows[in_blocks]] * len(blocks.first_column)
            + blocks.group_of_row[right_rows[in_blocks]]
        )
        order = np.argsort(key, kind="stable")
        self.counts = scrambled.counts[in_blocks][order]
        self.ends = left_rows[in_blocks][order], right_rows[in_blocks][order]
        edge, columns, self.hit_counts = _join(blocks, key[order], public)
        self.slot_cell, self.slot_edge = list[Ids](), list[Ids]()
        self.hit_slot, self.hit_cell = list[Ids](), list[Ids]()
        for end_rows, end_columns in zip(self.ends, columns, strict=True):
            widths = blocks.cell_count[end_rows]
            self.slot_cell.append(ranges(blocks.first_cell[end_rows], widths))
            self.slot_edge.append(np.repeat(np.arange(len(end_rows)), widths))
            offset = end_columns - blocks.first_column[blocks.group_of_row[end_rows[edge]]]
            self.hit_slot.append((np.cumsum(widths) - widths)[edge] + offset)
            self.hit_cell.append(blocks.first_cell[end_rows[edge]] + offset)


def _join(blocks: BlockAssignment, key: Ids, public: PairCounts) -> tuple[Ids, tuple[Ids, Ids], Floats]:
    """Joins edges, by the sorted keys of their two groups, with the public bigrams that fit them.

    Returns:
        For each hit the index of its edge, the columns of its two ends, and its public count.
    """
    order = np.argsort(blocks.column_member, kind="stable")
    member = blocks.column_member[order]
    public_ends = (public.left, public.right)
    first_members = [np.searchsorted(member, end) for end in public_ends]
    members_of_ends = [np.searchsorted(member, end, side="right") - np.searchsorted(member, end) for end in public_ends]
    match_counts = members_of_ends[0] * members_of_ends[1]
    empty = np.empty(0, np.int64)
    edges, lefts, rights, counts = [empty], [empty], [empty], [np.empty(0)]
    chunk_ends = np.arange(PAIRS_AT_A_TIME, int(match_counts.sum()), PAIRS_AT_A_TIME)
    cuts = np.searchsorted(np.cumsum(match_counts), chunk_ends)
    for chunk in np.split(np.arange(len(match_counts)), cuts):
        bigram_indices = np.repeat(chunk, match_counts[chunk])
        match_index = ranges(np.zeros(len(chunk), np.int64), match_counts[chunk])
        left_index, right_index = np.divmod(match_index, members_of_ends[1][bigram_indices])
        left_hit = order[first_members[0][bigram_indices] + left_index]
        right_hit = order[first_members[1][bigram_indices] + right_index]
        wanted_keys = blocks.column_group[left_hit] * len(blocks.first_column) + blocks.column_group[right_hit]
        start, stop = np.searchsorted(key, wanted_keys), np.searchsorted(key, wanted_keys, side="right")
        edge_counts = stop - start
        edges.append(ranges(start, edge_counts))
        lefts.append(np.repeat(left_hit, edge_counts))
        rights.append(np.repeat(right_hit, edge_counts))
        counts.append(np.repeat(public.counts[bigram_indices], edge_counts))
    return np.concatenate(edges), (np.concatenate(lefts), np.concatenate(rights)), np.concatenate(counts)


@dataclass(frozen=True)
class Profiles:
    """Predicts from a token's embedding which neighbours it has.

    The attacker's text contains a rare token a few times or never. But the public model knows it: tokens with similar
    embeddings have similar neighbours. Inside a group of near neighbours, the direction in which two tokens differ
    still separates a plural from a singular or a name from a noun. So all neighbours are put into classes, and for
    every token of the public text it is counted how often each class comes next. The square roots of the shares (for
    which Hellinger's distance is Euclid's, so that rare classes count as much as common ones) are regressed on the
    embeddings, by ridge regression in closed form. The predicted shares serve as `weight` pseudo-counts.

    A class is a union of groups of candidates, so the class of a scrambled neighbour is certain. The groups with most
    running tokens are classes of their own; the others are merged by their mean embeddings (k-means). Only public text
    and the public table are used.

    Attributes:
        alone, together: how many classes have one group each, and how many share the other groups.
        weight: pseudo-counts of a predicted profile.
        ridge: the penalty of the regression, relative to the mean variance of the embeddings.
        distances: the distances at which neighbours are predicted.
    """

    alone: int = 200
    together: int = 50
    weight: float = 100.0
    ridge: float = 0.3
    distances: tuple[int, ...] = (1, 2)

    def ratios(
        self, table: torch.Tensor, blocks: BlockAssignment, public: PublicPairCounts
    ) -> dict[tuple[int, int], Ratios]:
        """Returns the ratios by distance and side (0: what follows, 1: what precedes).

        Args:
            table: (n, d) the public embeddings.
            blocks: the groups of candidates.
            public: the bigrams of the public text.
        """
        unit = torch.nn.functional.normalize(table.float(), dim=1).numpy().astype(np.float64)
        classes = self._classes(unit, blocks, public)
        ratios = {}
        for distance in self.distances:
            for side in (0, 1):
                counts = _class_counts(public.pairs[distance], side, blocks, classes, len(unit))
                ratios[distance, side] = Ratios(self._combined_shares(unit, counts), classes)
        return ratios

    def _classes(self, unit: Floats, blocks: BlockAssignment, public: PublicPairCounts) -> Ids:
        """Returns (groups,) the class of each group."""
        group_count = len(blocks.first_column)
        mass = sum_by_index(blocks.column_group, public.share[blocks.column_member], group_count)
        order = np.argsort(-mass, kind="stable")
        classes = np.empty(group_count, np.int64)
        largest, smaller = order[: self.alone], order[self.alone :]
        classes[largest] = np.arange(len(largest))
        sums = np.zeros((group_count, unit.shape[1]))
        np.add.at(sums, blocks.column_group, unit[blocks.column_member])
        classes[smaller] = len(largest) + _k_means(sums[smaller], self.together)
        return classes

    def _combined_shares(self, unit: Floats, counts: Floats) -> NDArray[np.float32]:
        """Returns (n, classes) counted and predicted shares combined, over each class's share of all."""
        total = counts.sum(1)
        common = (counts.sum(0) + 0.5) / (counts.sum() + 0.5 * counts.shape[1])
        occurring = np.flatnonzero(total)
        if not len(occurring):
            return np.ones(counts.shape, np.float32)
        sample_weights = np.minimum(total[occurring], MAX_WEIGHT_COUNT)[:, None]
        roots = np.sqrt(counts[occurring] / total[occurring][:, None])
        x_mean = (sample_weights * unit[occurring]).sum(0) / sample_weights.sum()
        y_mean = (sample_weights * roots).sum(0) / sample_weights.sum()
        x = unit[occurring] - x_mean
        square = x.T @ (x * sample_weights)
        square[np.diag_indices(len(square))] += self.ridge * max(np.trace(square) / len(square), 1e-12)
        slopes = np.linalg.solve(square, x.T @ ((roots - y_mean) * sample_weights))
        predicted = np.maximum((unit - x_mean) @ slopes + y_mean, 0) ** 2
        predicted = np.maximum(predicted, MIN_RELATIVE_SHARE * common)
        return ((counts + self.weight * predicted) / (total[:, None] + self.weight) / common).astype(np.float32)


@dataclass(frozen=True)
class Ratios:
    """Says how much likelier each class of neighbours is next to a token than anywhere, on one side.

    Attributes:
        ratios: (n, classes) the ratios by public id.
        classes: (groups,) the class of each group.
    """

    ratios: NDArray[np.float32]
    classes: Ids

    def at(self, members: Ids, groups: Ids) -> NDArray[np.float32]:
        """Returns the ratio of each member next to its group."""
        return self.ratios[members, self.classes[groups]]


def _class_counts(bigrams: PairCounts, side: int, blocks: BlockAssignment, classes: Ids, size: int) -> Floats:
    """Returns (n, classes) how often each class is next to each token."""
    class_of_token = np.full(size, -1, np.int64)
    class_of_token[blocks.column_member] = classes[blocks.column_group]  # in several groups: the last one's
    token, neighbour = (bigrams.left, bigrams.right) if side == 0 else (bigrams.right, bigrams.left)
    in_classes = class_of_token[neighbour] >= 0
    width = int(classes.max()) + 1
    keys = token[in_classes] * width + class_of_token[neighbour[in_classes]]
    return sum_by_index(keys, bigrams.counts[in_classes], size * width).reshape(size, width)


def _k_means(vectors: Floats, k: int) -> Ids:
    """Returns the classes by spherical k-means from evenly spaced seeds. It is deterministic."""
    if len(vectors) <= k:
        return np.arange(len(vectors))
    x = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    centres = x[np.linspace(0, len(x) - 1, k).astype(np.int64)]
    for _ in range(KMEANS_ROUNDS):
        nearest = (x @ centres.T).argmax(1)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, x)
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        centres = np.where(norms > 0, sums / np.maximum(norms, 1e-30), centres)
    return (x @ centres.T).argmax(1).astype(np.int64)
