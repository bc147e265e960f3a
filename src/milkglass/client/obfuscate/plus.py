"""ObfusLM+ on a checkpoint: every tensor that meets the residual stream, by the key's W* and sigma* (section 4.4).

Tensor by tensor: what is held beside one of them is two (d, d) matrices and, while W* is drawn, the mixed table and its
transpose. Gains of norms are folded into what reads after them and become ones, so a head that is tied to the table
gets a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from milkglass.client.key.key import Key, permutation
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import Architecture
from milkglass.models.families.residual import Residual
from milkglass.models.safetensors_file import RowBlocks
from milkglass.noise.stream import subkey
from milkglass.schemes.obfuslm_plus import Plus, Turn

COLUMNS = 4096  # rows of the table that are transposed at a time


def with_head(base: Checkpoint, architecture: Architecture) -> tuple[Checkpoint, str]:
    """The checkpoint with a place for an output head of its own, and the head's name. A tied one has none, and is its
    table: the new one lies in the table's file, and has what the table has until its rows are replaced."""
    if architecture.heads:
        return base, architecture.heads[0]
    name = architecture.family.heads[0]
    tensors = {**base.tensors, name: replace(base.tensors[architecture.table], name=name)}
    return replace(base, tensors=tensors), name


def turn_of(plus: Plus, key: Key, table: RowBlocks, count: int, width: int) -> Turn:
    """W* and sigma* of this key, from the table (count, width) as ObfusLM mixed and permuted it."""
    columns = torch.empty(width, count)
    for start in range(0, count, COLUMNS):
        stop = min(count, start + COLUMNS)
        columns[:, start:stop] = table.rows(start, stop).float().T

    def drawn(label: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return permutation(subkey(key.root, key.model_digest, label), width).astype(np.int64)

    return plus.turn(
        columns, drawn("order/dimension"), key.stream("noise/dimension").laplace, drawn("permutation/dimension")
    )


@dataclass(frozen=True)
class TransformedRows:
    """Rows of another replacement, (n, d), times a matrix (d, d); with a gain (d,) before that."""

    source: RowBlocks
    matrix: torch.Tensor
    gain: torch.Tensor | None = None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return _times(self.source.rows(start, stop), self.matrix, self.gain)


def _times(rows: torch.Tensor, matrix: torch.Tensor, gain: torch.Tensor | None = None) -> torch.Tensor:
    """fp32, back in the dtype of the rows."""
    scaled = rows.float() if gain is None else rows.float() * gain
    return (scaled @ matrix).to(rows.dtype)


@dataclass
class ReadOnce:
    """A tensor that is read and changed when its first row is asked for, and let go after its last one."""

    base: Checkpoint
    name: str
    change: Callable[[torch.Tensor], torch.Tensor]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        result = self._whole[start:stop].clone()
        if stop == len(self._whole):
            del self._whole
        return result

    @cached_property
    def _whole(self) -> torch.Tensor:
        return self.change(self.base.read(self.name))


def turned(
    base: Checkpoint, residual: Residual, turn: Turn, tables: Mapping[str, RowBlocks], head: str
) -> dict[str, RowBlocks]:
    """What the scrambled checkpoint has instead. tables: what ObfusLM alone would have, the head among them."""
    gain = {name: residual.unit + base.read(name).float() for name in residual.norms}
    result: dict[str, RowBlocks] = {}
    for name, rows in tables.items():
        if name == head:
            result[name] = TransformedRows(rows, turn.readers, gain[residual.final])
        else:
            result[name] = TransformedRows(rows, turn.tables) if len(base.tensors[name].shape) == 2 else rows
    for name, norm in residual.readers.items():
        result[name] = ReadOnce(base, name, lambda whole, norm=norm: _times(whole, turn.readers, gain[norm]))  # type: ignore[misc]
    for name in (*residual.writers, *residual.biases):
        result[name] = ReadOnce(base, name, lambda whole: (turn.writers @ whole.float()).to(whole.dtype))
    for name in residual.norms:
        result[name] = ReadOnce(base, name, lambda whole: torch.full_like(whole, 1 - residual.unit))
    return result
