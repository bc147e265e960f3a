"""Applies ObfusLM+ to a checkpoint: W* and sigma* of the key change every tensor of the residual stream (section 4.4).

Tensors are changed one at a time. Memory: one matrix of a layer with its product in fp32, and two (d, d) matrices.
While W* is drawn, the mixed table is held as columns in its own dtype: EmbedCluster compares each column with every
other, and from a table of rows each comparison would read all pages. Gains of norms are folded into what reads after
them and become ones, so a head that is tied to the table gets its own tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from milkglass.client.key.key import Key, permutation
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import Architecture
from milkglass.models.families.layers import ResidualStream
from milkglass.models.safetensors_file import RowBlocks
from milkglass.noise.stream import subkey
from milkglass.progress import Stage, no_stage
from milkglass.schemes.obfuslm_plus import Plus, Turn

ROWS_AT_A_TIME = 4096  # rows of the table that are transposed at a time


def with_head(base: Checkpoint, architecture: Architecture) -> tuple[Checkpoint, str]:
    """Returns the checkpoint with a place for its own output head, and the head's name.

    A tied head has no place: the new one points to the table's file, with the table's rows until they are replaced.
    """
    if architecture.heads:
        return base, architecture.heads[0]
    name = architecture.family.heads[0]
    tensors = {**base.tensors, name: replace(base.tensors[architecture.table], name=name)}
    return replace(base, tensors=tensors), name


def turn_of(plus: Plus, key: Key, table: RowBlocks, count: int, width: int, stage: Stage = no_stage) -> Turn:
    """Returns W* and sigma* of this key, computed from the mixed and permuted table (count, width)."""
    advance = stage("turn the table", count)
    columns = torch.empty(0)  # in the table's dtype, once that is known: fp32 would be twice as much
    for start in range(0, count, ROWS_AT_A_TIME):
        stop = min(count, start + ROWS_AT_A_TIME)
        rows = table.block(start, stop)
        columns = columns if start else rows.new_empty(width, count)
        columns[:, start:stop] = rows.T
        advance(stop - start)

    def drawn(label: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return permutation(subkey(key.root, key.model_digest, label), width).astype(np.int64)

    return plus.turn(
        columns,
        drawn("order/dimension"),
        key.stream("noise/dimension").laplace,
        drawn("permutation/dimension"),
        stage("cluster dimensions", width),
    )


@dataclass(frozen=True)
class TransformedRows:
    """Rows of another replacement, (n, d), times a gain (d,) if there is one, times a matrix (d, D), in fp32."""

    source: RowBlocks
    matrix: torch.Tensor
    gain: torch.Tensor | None = None

    def block(self, start: int, stop: int) -> torch.Tensor:
        return _times(self.source.block(start, stop), self.matrix, self.gain)


def _times(rows: torch.Tensor, matrix: torch.Tensor, gain: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies in fp32, and returns the dtype of the rows."""
    scaled = rows.float() if gain is None else rows.float() * gain
    return (scaled @ matrix).to(rows.dtype)


@dataclass
class OneHeld:
    """Holds the last tensor that was changed. Asking for another drops it, even if it was not read to its end."""

    name: str = ""
    tensor: torch.Tensor | None = None

    def get(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.tensor is None or self.name != name:
            self.tensor = None  # before the next is made
            self.name, self.tensor = name, make()
        return self.tensor


@dataclass(frozen=True)
class ReadOnce:
    """A tensor that is read and changed when its first row is needed, and dropped after its last.

    All tensors of a model share `held`, so that one of them is in memory at a time.
    """

    base: Checkpoint
    name: str
    change: Callable[[torch.Tensor], torch.Tensor]
    held: OneHeld

    def block(self, start: int, stop: int) -> torch.Tensor:
        tensor = self.held.get(self.name, lambda: self.change(self.base.read(self.name)))
        if stop == len(tensor):
            self.held.tensor = None
        return tensor[start:stop].clone()


def turn_tensors(
    base: Checkpoint, residual: ResidualStream, turn: Turn, tables: Mapping[str, RowBlocks], head: str
) -> dict[str, RowBlocks]:
    """Returns the replaced tensors. `tables` are as ObfusLM alone makes them, `head` among them."""
    holder = OneHeld()
    gain = {name: residual.gain_offset + base.read(name).float() for name in residual.norms}
    replaced: dict[str, RowBlocks] = {}
    for name, rows in tables.items():
        if name == head:
            replaced[name] = TransformedRows(rows, turn.readers, gain[residual.final])
        else:
            replaced[name] = TransformedRows(rows, turn.tables) if len(base.tensors[name].shape) == 2 else rows
    for name, norm in residual.readers.items():
        replaced[name] = ReadOnce(base, name, lambda whole, norm=norm: _times(whole, turn.readers, gain[norm]), holder)  # type: ignore[misc]
    for name in (*residual.writers, *residual.biases):
        replaced[name] = ReadOnce(base, name, lambda whole: (turn.writers @ whole.float()).to(whole.dtype), holder)
    for name in residual.norms:
        replaced[name] = ReadOnce(base, name, lambda whole: torch.full_like(whole, 1 - residual.gain_offset), holder)
    return replaced
