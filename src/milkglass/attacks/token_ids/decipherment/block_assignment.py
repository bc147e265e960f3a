"""A soft assignment inside disjoint groups of ids, as flat arrays without padding or Python loops.

A *cell* is the probability that row a (a scrambled id) stands for member b (a public id) of its group. The cells of one
row are adjacent, and so are those of one group.
"""

from __future__ import annotations

import numpy as np

from milkglass.attacks.token_ids.decipherment.bigrams import Bigrams, Floats, summed
from milkglass.sequences import Ids
from milkglass.threat.knowledge import Candidates

CHUNK = 2_000_000  # pairs of memberships looked at in one go
ROUNDS = 12  # of Sinkhorn's, which only have to come near


def ranges(starts: Ids, counts: Ids) -> Ids:
    """Returns start, start + 1, ... for each range, `count` numbers each, concatenated."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


class BlockAssignment:
    """The cells of all groups, as flat arrays.

    Attributes:
        rows: (R,) scrambled ids.
        starts, widths: (R,) the first cell of each row and how many it has.
        group: (R,) the group of each row.
        row, column, member: (cells,); columns are numbered over all groups, `member` is the public id.
        capacity: (columns,) the greatest sum of a column.
        column_member, column_group: (columns,) the public id and the group.
        first_column: (groups,)
        place: (n,) a scrambled id's row, -1 outside every group.
    """

    def __init__(self, candidates: Candidates, size: int) -> None:
        groups = candidates.groups
        heights = np.array([len(one.rows) for one in groups], np.int64)
        across = np.array([len(one.members) for one in groups], np.int64)
        self.rows = np.concatenate([np.empty(0, np.int64), *(one.rows for one in groups)])
        self.group = np.repeat(np.arange(len(groups)), heights)
        self.widths = across[self.group]
        self.starts = np.cumsum(self.widths) - self.widths
        self.column_member = np.concatenate([np.empty(0, np.int64), *(one.members for one in groups)])
        self.column_group = np.repeat(np.arange(len(groups)), across)
        self.first_column = np.cumsum(across) - across
        self.row = np.repeat(np.arange(len(self.rows)), self.widths)
        self.column = ranges(self.first_column[self.group], self.widths)
        self.member = self.column_member[self.column]
        self.capacity = np.repeat(np.maximum(heights / np.maximum(across, 1), 1.0), across)
        self.place = np.full(size, -1, np.int64)
        self.place[self.rows] = np.arange(len(self.rows))

    def per_row(self, values: Floats) -> Floats:
        """Returns (R,) the sum of each row's cells."""
        return summed(self.row, values, len(self.rows))

    def log_softmax(self, scores: Floats) -> Floats:
        shifted = scores - np.maximum.reduceat(scores, self.starts)[self.row]
        return shifted - np.log(self.per_row(np.exp(shifted)))[self.row]

    def balanced(self, scores: Floats, temperature: float) -> Floats:
        """Returns Sinkhorn and Knopp's soft assignment: rows sum to 1, columns to at most their capacity."""
        if not len(scores):
            return scores
        belief = np.exp(self.log_softmax(scores / temperature))
        for _ in range(ROUNDS):
            taken = np.bincount(self.column, belief, len(self.capacity))
            belief *= np.minimum(self.capacity / np.maximum(taken, 1e-300), 1.0)[self.column]
            belief /= np.maximum(self.per_row(belief), 1e-300)[self.row]
        return belief


class BigramJoin:
    """Every public bigram that a scrambled bigram could be.

    An edge is a distinct scrambled bigram (a, a'). A slot is an edge with one reading of one of its ends. Slots of side
    0 ask what a' says about a reading of a, slots of side 1 what a says about a reading of a'.

    Attributes:
        count: (edges,) how often each occurs.
        ends: the rows of a and of a', (edges,) each.
        slot_cell: by side, the cell about which a slot says something.
        slot_edge: by side, the slot's edge.
        hit_slot, hit_cell, hit_count: for each public bigram that fits, its two slots, its two cells and its count.
    """

    def __init__(self, blocks: BlockAssignment, seen: Bigrams, public: Bigrams) -> None:
        left, right = blocks.place[seen.left], blocks.place[seen.right]
        known = (left >= 0) & (right >= 0)
        key = blocks.group[left[known]] * len(blocks.first_column) + blocks.group[right[known]]
        order = np.argsort(key, kind="stable")
        self.count, self.ends = seen.count[known][order], (left[known][order], right[known][order])
        edge, columns, self.hit_count = _join(blocks, key[order], public)
        self.slot_cell, self.slot_edge = list[Ids](), list[Ids]()
        self.hit_slot, self.hit_cell = list[Ids](), list[Ids]()
        for end, column in zip(self.ends, columns, strict=True):
            widths = blocks.widths[end]
            self.slot_cell.append(ranges(blocks.starts[end], widths))
            self.slot_edge.append(np.repeat(np.arange(len(end)), widths))
            offset = column - blocks.first_column[blocks.group[end[edge]]]
            self.hit_slot.append((np.cumsum(widths) - widths)[edge] + offset)
            self.hit_cell.append(blocks.starts[end[edge]] + offset)


def _join(blocks: BlockAssignment, key: Ids, public: Bigrams) -> tuple[Ids, tuple[Ids, Ids], Floats]:
    """Joins edges, by the sorted keys of their two groups, with public bigrams.

    Returns edge numbers, columns, counts.
    """
    order = np.argsort(blocks.column_member, kind="stable")
    member = blocks.column_member[order]
    ends = (public.left, public.right)
    low = [np.searchsorted(member, end) for end in ends]
    many = [np.searchsorted(member, end, side="right") - np.searchsorted(member, end) for end in ends]
    fan = many[0] * many[1]
    nothing = np.empty(0, np.int64)
    edges, lefts, rights, values = [nothing], [nothing], [nothing], [np.empty(0)]
    total = np.cumsum(fan)
    cuts = np.searchsorted(total, np.arange(CHUNK, int(total[-1]) if len(total) else 0, CHUNK))
    for chunk in np.split(np.arange(len(fan)), cuts):
        which = np.repeat(chunk, fan[chunk])
        inner = ranges(np.zeros(len(chunk), np.int64), fan[chunk])
        one = order[low[0][which] + inner // many[1][which]]
        two = order[low[1][which] + inner % many[1][which]]
        expected = blocks.column_group[one] * len(blocks.first_column) + blocks.column_group[two]
        start, stop = np.searchsorted(key, expected), np.searchsorted(key, expected, side="right")
        times = stop - start
        edges.append(ranges(start, times))
        lefts.append(np.repeat(one, times))
        rights.append(np.repeat(two, times))
        values.append(np.repeat(public.count[which], times))
    return np.concatenate(edges), (np.concatenate(lefts), np.concatenate(rights)), np.concatenate(values)
