"""ObfusLM+ on a checkpoint: every tensor that meets the residual stream, by the key's W* and sigma* (section 4.4).

Tensor by tensor: what is held is one matrix of a layer with its product, in fp32, beside two (d, d) matrices. While W*
is drawn it is the mixed table as columns, in its own dtype: EmbedCluster compares each column with every other, and
lying in rows they would be read from all pages of the table each time. Gains of norms are folded into what reads after
them and become ones, so a head that is tied to the table gets a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from milkglass.client.key.key import Key, permutation
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import Architecture
from milkglass.models.families.residual import Residual
from milkglass.models.safetensors_file import RowBlocks
from milkglass.noise.stream import subkey
from milkglass.progress import Stage, no_stage
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


def turn_of(plus: Plus, key: Key, table: RowBlocks, count: int, width: int, stage: Stage = no_stage) -> Turn:
    """W* and sigma* of this key, from the table (count, width) as ObfusLM mixed and permuted it."""
    advance = stage("turn the table", count)
    columns = torch.empty(0)  # in the table's dtype, once that is known: fp32 would be twice as much
    for start in range(0, count, COLUMNS):
        stop = min(count, start + COLUMNS)
        rows = table.rows(start, stop)
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
    """Rows of another replacement, (n, d), times a matrix (d, D) in fp32; with a gain (d,) before that."""

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
class OneHeld:
    """The last tensor that was changed: whoever asks for another lets it go, though its last rows were never read."""

    name: str = ""
    tensor: torch.Tensor | None = None

    def get(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.tensor is None or self.name != name:
            self.tensor = None  # before the next is made
            self.name, self.tensor = name, make()
        return self.tensor


@dataclass(frozen=True)
class ReadOnce:
    """A tensor that is read and changed when its first row is asked for, and let go after its last one.

    Attributes:
        change: of the whole tensor.
        held: what all tensors of one model share, so that one of them is in memory at a time.
    """

    base: Checkpoint
    name: str
    change: Callable[[torch.Tensor], torch.Tensor]
    held: OneHeld

    def rows(self, start: int, stop: int) -> torch.Tensor:
        whole = self.held.get(self.name, lambda: self.change(self.base.read(self.name)))
        if stop == len(whole):
            self.held.tensor = None
        return whole[start:stop].clone()


def turned(
    base: Checkpoint, residual: Residual, turn: Turn, tables: Mapping[str, RowBlocks], head: str
) -> dict[str, RowBlocks]:
    """What the scrambled checkpoint has instead. tables: what ObfusLM alone would have, the head among them."""
    held = OneHeld()
    gain = {name: residual.unit + base.read(name).float() for name in residual.norms}
    result: dict[str, RowBlocks] = {}
    for name, rows in tables.items():
        if name == head:
            result[name] = TransformedRows(rows, turn.readers, gain[residual.final])
        else:
            result[name] = TransformedRows(rows, turn.tables) if len(base.tensors[name].shape) == 2 else rows
    for name, norm in residual.readers.items():
        result[name] = ReadOnce(base, name, lambda whole, norm=norm: _times(whole, turn.readers, gain[norm]), held)  # type: ignore[misc]
    for name in (*residual.writers, *residual.biases):
        result[name] = ReadOnce(base, name, lambda whole: (turn.writers @ whole.float()).to(whole.dtype), held)
    for name in residual.norms:
        result[name] = ReadOnce(base, name, lambda whole: torch.full_like(whole, 1 - residual.unit), held)
    return result
