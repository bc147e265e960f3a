"""Applies ObfusLM+ to a checkpoint: W* and sigma* of the key change every tensor of the residual stream (section 4.4).

Tensors are changed one at a time. Memory: one matrix of a layer with its product in fp32, and two (d, d) matrices.
While W* is drawn, the mixed table is held as columns in its own dtype: EmbedCluster compares each column with every
other, and from a table of rows each comparison would read all pages. Gains of norms are folded into the matrices that
read after them and become ones, so a head that is tied to the table gets its own tensor.
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
from milkglass.schemes.obfuslm_plus import DimensionMixing, DimensionTransform

ROWS_PER_BATCH = 4096  # rows of the table that are transposed at a time


def with_head(base: Checkpoint, architecture: Architecture) -> tuple[Checkpoint, str]:
    """Returns the checkpoint with an entry for its own output head, and the head's name.

    A tied head has no entry: the new one points to the table's file, and has the table's rows until they are replaced.
    """
    if architecture.heads:
        return base, architecture.heads[0]
    name = architecture.family.heads[0]
    tensors = {**base.tensors, name: replace(base.tensors[architecture.table], name=name)}
    return replace(base, tensors=tensors), name


def dimension_transform(
    plus: DimensionMixing, key: Key, table: RowBlocks, count: int, width: int, stage: Stage = no_stage
) -> DimensionTransform:
    """Computes the dimension transform (W* and sigma*) of a key.

    Args:
        plus: the settings of the transform.
        key: the key.
        table: the mixed and permuted embedding table, (count, width).
        count: the number of the table's rows.
        width: the number of the table's columns.
        stage: reports the progress.
    """
    advance = stage("read the table for the dimension transform", count)
    columns = torch.empty(0)  # replaced by one in the table's dtype: fp32 would take twice the memory
    for start in range(0, count, ROWS_PER_BATCH):
        stop = min(count, start + ROWS_PER_BATCH)
        rows = table.block(start, stop)
        columns = columns if start else rows.new_empty(width, count)
        columns[:, start:stop] = rows.T
        advance(stop - start)

    def draw_order(label: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return permutation(subkey(key.root, key.model_digest, label), width).astype(np.int64)

    return plus.draw_transform(
        columns,
        draw_order("order/dimension"),
        key.stream("noise/dimension").laplace,
        draw_order("permutation/dimension"),
        stage("cluster dimensions", width),
    )


@dataclass(frozen=True)
class TransformedRows:
    """Multiplies rows by a gain and a matrix, in fp32, when they are read.

    Attributes:
        source: the rows (n, d).
        matrix: (d, D) the matrix.
        gain: (d,) the gain. None: there is none.
    """

    source: RowBlocks
    matrix: torch.Tensor
    gain: torch.Tensor | None = None

    def block(self, start: int, stop: int) -> torch.Tensor:
        """Returns (stop - start, D) some of the changed rows."""
        return _multiply(self.source.block(start, stop), self.matrix, self.gain)


def _multiply(rows: torch.Tensor, matrix: torch.Tensor, gain: torch.Tensor | None = None) -> torch.Tensor:
    """Returns (n, D) rows (n, d) times the gain (d,), if there is one, times the matrix (d, D).

    The product is computed in fp32, and has the dtype of the rows.
    """
    scaled = rows.float() if gain is None else rows.float() * gain
    return (scaled @ matrix).to(rows.dtype)


@dataclass
class TensorHolder:
    """Holds the last tensor that was changed, and drops it when another is requested.

    Attributes:
        name: the name of the tensor; "" before the first.
        tensor: the tensor. None: it was dropped.
    """

    name: str = ""
    tensor: torch.Tensor | None = None

    def get(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the tensor of a name, which `make` computes unless it is held."""
        if self.tensor is None or self.name != name:
            self.tensor = None  # frees its memory before the next one is made
            self.name, self.tensor = name, make()
        return self.tensor


@dataclass(frozen=True)
class LazyTensor:
    """Reads and changes a tensor when its first row is needed, and drops it after its last.

    All tensors of a model share one holder, so that only one of them is in memory.

    Attributes:
        base: the checkpoint that has the tensor.
        name: the tensor's name.
        change: returns the changed tensor.
        holder: the shared holder.
    """

    base: Checkpoint
    name: str
    change: Callable[[torch.Tensor], torch.Tensor]
    holder: TensorHolder

    def block(self, start: int, stop: int) -> torch.Tensor:
        """Returns some rows of the changed tensor."""
        tensor = self.holder.get(self.name, lambda: self.change(self.base.read(self.name)))
        if stop == len(tensor):
            self.holder.tensor = None
        return tensor[start:stop].clone()


def transform_dimensions(
    base: Checkpoint,
    residual: ResidualStream,
    transform: DimensionTransform,
    tables: Mapping[str, RowBlocks],
    head: str,
) -> dict[str, RowBlocks]:
    """Returns the tensors that ObfusLM+ changes, as rows that are computed when they are read, by name.

    Args:
        base: the original checkpoint, with an entry for each of `tables`.
        residual: the tensors of the original checkpoint by what they do to the residual stream.
        transform: the dimension transform of the key.
        tables: the tables as ObfusLM alone makes them, `head` among them.
        head: the name of the output head.
    """
    holder = TensorHolder()
    gain_of_norm = {name: residual.gain_offset + base.read(name).float() for name in residual.norms}
    replaced: dict[str, RowBlocks] = {}
    for name, rows in tables.items():
        if name == head:
            replaced[name] = TransformedRows(rows, transform.readers, gain_of_norm[residual.final_norm])
        else:
            replaced[name] = TransformedRows(rows, transform.tables) if len(base.tensors[name].shape) == 2 else rows
    for name, norm in residual.readers.items():
        replaced[name] = LazyTensor(
            base,
            name,
            lambda tensor, norm=norm: _multiply(tensor, transform.readers, gain_of_norm[norm]),  # type: ignore[misc]
            holder,
        )
    for name in (*residual.writers, *residual.biases):
        replaced[name] = LazyTensor(
            base, name, lambda tensor: (transform.writers @ tensor.float()).to(tensor.dtype), holder
        )
    for name in residual.norms:
        replaced[name] = LazyTensor(
            base, name, lambda tensor: torch.full_like(tensor, 1 - residual.gain_offset), holder
        )
    return replaced
