"""Holds many id sequences of different lengths as two flat arrays: no padding, no Python loop over tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Item = TypeVar("Item")
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Holds sequences of ids without padding.

    Attributes:
        ids: (ids,) the ids of all sequences, one sequence after the other.
        lengths: (sequences,) how many ids each sequence has.

    Raises:
        ValueError: an array has several dimensions, or the lengths do not add up to the number of ids.
    """

    ids: Ids
    lengths: Ids

    @classmethod
    def of(cls, sequences: Iterable[Iterable[int] | NDArray[np.integer]]) -> Sequences:
        """Joins separate sequences of ids, in their order. An empty one stays as a sequence of length 0."""
        parts = [np.asarray(sequence, np.int64).reshape(-1) for sequence in sequences]
        lengths = np.array([len(part) for part in parts], np.int64)
        return cls(np.concatenate(parts) if parts else np.empty(0, np.int64), lengths)

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.lengths.ndim != 1:
            raise ValueError(f"ids of {self.ids.ndim} and lengths of {self.lengths.ndim} dimensions, 1 each is needed")
        if len(self.lengths) and not 0 <= self.lengths.min() <= self.lengths.max() <= len(self.ids):
            raise ValueError(f"a length is not from 0 to {len(self.ids)}, the number of ids")
        if int(self.lengths.sum()) != len(self.ids):
            raise ValueError(f"lengths add up to {int(self.lengths.sum())}, there are {len(self.ids)} ids")

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Ids]:
        return iter(np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self) else [])

    @property
    def sequence_indices(self) -> Ids:
        """Returns (ids,) the index of the sequence that each id belongs to."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    def map_ids(self, table: Ids) -> Sequences:
        """Returns the sequences with `table[id]` in place of each id. `table` has an entry for every id that occurs."""
        return Sequences(table[self.ids], self.lengths)

    def keep(self, is_kept: NDArray[np.bool_]) -> Sequences:
        """Returns the ids where `is_kept` (ids,) is true. A sequence may become empty; none disappears."""
        lengths = np.bincount(self.sequence_indices[is_kept], minlength=len(self)).astype(np.int64)
        return Sequences(self.ids[is_kept], lengths)

    def select(self, indices: Ids) -> Sequences:
        """Returns the sequences with these indices, in their order."""
        ends = np.cumsum(self.lengths)
        parts = [self.ids[ends[i] - self.lengths[i] : ends[i]] for i in indices.tolist()]
        return Sequences.of(parts)

    def without(self, others: Sequences) -> Sequences:
        """Returns the sequences that are not, id for id, among the others."""
        other_bytes = {sequence.tobytes() for sequence in others}
        return Sequences.of(sequence for sequence in self if sequence.tobytes() not in other_bytes)

    def counts(self, size: int) -> Ids:
        """Returns (size,) how often each id from 0 to `size` - 1 occurs. No id may be larger."""
        return np.bincount(self.ids, minlength=size).astype(np.int64)


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yields consecutive lists of `size` items, at least 1; the last one may be shorter."""
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many ids both sequences begin with."""
    length = min(len(first), len(second))
    differs = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(differs.argmax()) if differs.any() else length


def look_up(keys: Ids, values: NDArray[Number], queries: Ids) -> NDArray[Number]:
    """Returns the value of each queried key, in the shape of `queries`, and 0 for a key that is not listed.

    Args:
        keys: (m,) the keys, ascending and each once.
        values: (m,) the value of each key.
        queries: the keys whose values are looked up, of any shape.
    """
    if not len(keys):
        return np.zeros(queries.shape, values.dtype)
    positions = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[positions] == queries, values[positions], values.dtype.type(0))
