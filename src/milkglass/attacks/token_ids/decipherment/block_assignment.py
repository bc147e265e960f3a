"""A soft assignment inside disjoint groups of ids, as flat arrays: a block for each group, no padding, no Python loop.

A *cell* says how likely row a (a scrambled id) stands for member b (a public id) of its group. The cells of one row lie
side by side, those of one group too. Knows nothing of where its evidence comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass.attacks.token_ids.decipherment.bigrams import Bigrams, Floats, summed
from milkglass.sequences import Ids
from milkglass.threat.knowledge import Candidates

CHUNK = 2_000_000  # pairs of memberships looked at in one go
ROUNDS = 12  # of Sinkhorn's, which only have to come near


def ranges(starts: Ids, counts: Ids) -> Ids:
    """start, start + 1, ... `count` numbers for each, one after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


@dataclass(frozen=True)
class BlockAssignment:
    """The cells of all groups, as flat arrays.

    Attributes:
        rows: (R,) scrambled ids.
        starts, widths: (R,) each row's cells.
        group: (R,).
        row, column, member: (cells,), `column` numbered over all groups, `member` the public id.
        capacity: (columns,) how much of all rows' certainty one column takes.
        first_column: (groups,).
        place: (n,) a scrambled id's row, -1 outside every group.
    """

    rows: Ids
    starts: Ids
    widths: Ids
    group: Ids
    row: Ids
    column: Ids
    member: Ids
    capacity: Floats
    first_column: Ids
    column_member: Ids
    column_group: Ids
    place: Ids

    @classmethod
    def of(cls, candidates: Candidates, size: int) -> BlockAssignment:
        groups = candidates.groups
        heights = np.array([len(one.rows) for one in groups], np.int64)
        across = np.array([len(one.members) for one in groups], np.int64)
        rows = np.concatenate([np.empty(0, np.int64), *(one.rows for one in groups)])
        members = np.concatenate([np.empty(0, np.int64), *(one.members for one in groups)])
        group = np.repeat(np.arange(len(groups)), heights)
        widths = across[group]
        first_column = np.cumsum(across) - across
        column = ranges(first_column[group], widths)
        place = np.full(size, -1, np.int64)
        place[rows] = np.arange(len(rows))
        return cls(
            rows,
            np.cumsum(widths) - widths,
            widths,
            group,
            np.repeat(np.arange(len(rows)), widths),
            column,
            members[column],
            np.repeat(np.maximum(heights / np.maximum(across, 1), 1.0), across),
            first_column,
            members,
            np.repeat(np.arange(len(groups)), across),
            place,
        )

    def per_row(self, values: Floats) -> Floats:
        """(R,) the sum of each row's cells."""
        return summed(self.row, values, len(self.rows))

    def log_softmax(self, scores: Floats) -> Floats:
        shifted = scores - np.maximum.reduceat(scores, self.starts)[self.row]
        return shifted - np.log(self.per_row(np.exp(shifted)))[self.row]

    def balanced(self, scores: Floats, temperature: float) -> Floats:
        """Sinkhorn and Knopp's soft assignment: rows sum to 1, columns to no more than their capacity."""
        if not len(scores):
            return scores
        belief = np.exp(self.log_softmax(scores / temperature))
        for _ in range(ROUNDS):
            taken = np.bincount(self.column, belief, len(self.capacity))
            belief *= np.minimum(self.capacity / np.maximum(taken, 1e-300), 1.0)[self.column]
            belief /= np.maximum(self.per_row(belief), 1e-300)[self.row]
        return belief


@dataclass(frozen=True)
class BigramJoin:
    """Every public bigram that a scrambled bigram could be.

    An edge is a distinct scrambled bigram (a, a'). A slot is an edge with one reading of one of its ends: `right` slots
    ask what a' says of a's reading, `left` slots what a says of that of a'.

    Attributes:
        slot_cell: the cell about which a slot says something.
        slot_edge: its edge.
        hit_slot, hit_cell, hit_count: for each public bigram that fits, its two slots, its two cells and its count.
    """

    count: Floats  # (edges,)
    ends: tuple[Ids, Ids]  # (edges,) rows
    slot_cell: tuple[Ids, Ids]
    slot_edge: tuple[Ids, Ids]
    hit_slot: tuple[Ids, Ids]
    hit_cell: tuple[Ids, Ids]
    hit_count: Floats

    @classmethod
    def of(cls, blocks: BlockAssignment, seen: Bigrams, public: Bigrams) -> BigramJoin:
        left, right = blocks.place[seen.left], blocks.place[seen.right]
        known = (left >= 0) & (right >= 0)
        left, right, count = left[known], right[known], seen.count[known]
        key = blocks.group[left] * len(blocks.first_column) + blocks.group[right]
        order = np.argsort(key, kind="stable")
        left, right, count, key = left[order], right[order], count[order], key[order]
        edge, columns, values = _join(blocks, key, public)
        slots, cells = [], []
        first: list[Ids] = []
        for end in (left, right):
            widths = blocks.widths[end]
            first.append(np.cumsum(widths) - widths)
            cells.append(ranges(blocks.starts[end], widths))
            slots.append(np.repeat(np.arange(len(end)), widths))
        offsets = [columns[i] - blocks.first_column[blocks.group[end[edge]]] for i, end in enumerate((left, right))]
        return cls(
            count,
            (left, right),
            (cells[0], cells[1]),
            (slots[0], slots[1]),
            (first[0][edge] + offsets[0], first[1][edge] + offsets[1]),
            (blocks.starts[left[edge]] + offsets[0], blocks.starts[right[edge]] + offsets[1]),
            values,
        )


def _join(blocks: BlockAssignment, key: Ids, public: Bigrams) -> tuple[Ids, tuple[Ids, Ids], Floats]:
    """Edges (by their sorted keys of two groups) joined with public bigrams: edge numbers, columns, counts."""
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
