"""Applies a covariant scheme to a checkpoint: writes every tensor of a decoder in coordinates that the key draws.

Tensors are changed one at a time. Memory beyond one of them and its products in fp64: the family of key matrices, (d,
d) in fp64, and the secrets of its layer. Gains of norms and kappa are folded into what reads after them and become
ones, so a head that is tied to the table gets its own tensor. Noise is drawn in blocks of rows, so that any block can
be written again.

Shapes: d dimensions of the residual stream, D of the scrambled one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from milkglass.client.key.key import Key
from milkglass.client.key.scheme import scheme_of
from milkglass.client.obfuscate.plus import LazyTensor, TensorHolder, TransformedRows
from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import Architecture
from milkglass.models.families.layers import LayerLayout, ResidualStream
from milkglass.models.safetensors_file import RowBlocks
from milkglass.noise.root import NoiseStream
from milkglass.noise.stream import Stream
from milkglass.schemes.covariant import CovariantScheme
from milkglass.schemes.covariant_keys import LayerKeys, LayerShape, StreamKeys
from milkglass.schemes.scheme import Scheme

NOISE_BLOCK_ROWS = 512  # rows of one block of noise; changing it changes the noise
DEVIATION_BLOCK_ROWS = 1024  # rows of a table that are held in fp64 at a time


def require_layers(base: Checkpoint, architecture: Architecture, scheme: Scheme) -> None:
    """Raises UnsupportedModel, with the reason, if a scheme cannot change the layers that it must change."""
    if scheme.needs_heads and architecture.family.layers is None:
        raise UnsupportedModel(
            f"{scheme.name} is for decoders of the Llama family, and this model is of {architecture.family.name}",
            "use obfuslm for this model",
        )
    if scheme.needs_whole_layers:
        architecture.residual(base)
    if scheme.needs_heads:
        architecture.layout(base)


def new_width(base: Checkpoint, architecture: Architecture, scheme: Scheme) -> int:
    """Returns the number of dimensions of the scrambled residual stream."""
    width = base.tensors[architecture.table].shape[1]
    return scheme.stream_width(width, int(base.config["num_attention_heads"])) if scheme.needs_heads else width


@dataclass(frozen=True)
class NoisyRows:
    """Adds normal noise to the rows of a tensor. Each block of NOISE_BLOCK_ROWS rows has its own sub-stream.

    Attributes:
        source: gives the rows.
        deviation: the standard deviation of the noise.
        stream: gives the sub-streams.
    """

    source: RowBlocks
    deviation: float
    stream: Stream

    def block(self, start: int, stop: int) -> torch.Tensor:
        rows = self.source.block(start, stop)
        if not self.deviation or not len(rows):
            return rows
        first, last = start // NOISE_BLOCK_ROWS, (stop - 1) // NOISE_BLOCK_ROWS
        noise = torch.cat([self._noise_block(index, rows.shape[1]) for index in range(first, last + 1)])
        offset = start - first * NOISE_BLOCK_ROWS
        return (rows.float() + self.deviation * noise[offset : offset + len(rows)]).to(rows.dtype)

    def _noise_block(self, index: int, width: int) -> torch.Tensor:
        return NoiseStream(self.stream.derive(index.to_bytes(8, "little"))).gaussian(NOISE_BLOCK_ROWS, width)


@dataclass(frozen=True)
class CovariantKeys:
    """Draws the matrices of one model from a key.

    Attributes:
        scheme: the key's scheme.
        key: gives the streams of all draws.
        shape: the sizes of the model's layers.
        stream_keys: the family of the matrices P and Q, by which tensors write to and read the residual stream.
    """

    scheme: CovariantScheme
    key: Key
    shape: LayerShape
    stream_keys: StreamKeys

    @classmethod
    def of(cls, scheme: CovariantScheme, key: Key, layout: LayerLayout, width: int) -> CovariantKeys:
        shape = LayerShape(
            layout.head_count, layout.key_head_count, layout.head_size, layout.neuron_count, layout.rotary_base
        )
        draws = NoiseStream(key.stream("covariant/stream"))
        return cls(scheme, key, shape, scheme.draw_stream_keys(width, layout.head_count, draws))

    def noise_stream(self, purpose: str) -> NoiseStream:
        """Returns the key's stream for one purpose, such as "layer/0"."""
        return NoiseStream(self.key.stream(f"covariant/{purpose}"))

    def writing_matrix(self, name: str) -> torch.Tensor:
        """Returns P (d, D) of the tensor `name`, which writes to the stream."""
        return self.stream_keys.write_key(self.noise_stream(f"P/{name}"))

    def reading_matrix(self, name: str) -> torch.Tensor:
        """Returns Q (D, d) of the tensor `name`, which reads the stream, times kappa."""
        return self.stream_keys.kappa * self.stream_keys.read_key(self.noise_stream(f"Q/{name}"))

    def layer(self, index: int) -> LayerKeys:
        """Returns the secrets inside a layer."""
        return self.scheme.draw_layer_keys(self.shape, self.noise_stream(f"layer/{index}"))


@dataclass(frozen=True)
class _Changes:
    """Computes the uploaded form of each tensor. A layer's tensors follow each other, so few secrets are in memory."""

    base: Checkpoint
    residual: ResidualStream
    layout: LayerLayout
    keys: CovariantKeys
    layer_keys: Callable[[int], LayerKeys]

    def gain(self, norm: str) -> torch.Tensor:
        """Returns (d,) the factors by which the norm of this name multiplies, in fp64."""
        return self.residual.gain_offset + self.base.read(norm).double()

    def inner(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor (fp64) with its rows changed by the secrets of its layer."""
        number, part = self.layout.part_of[name]
        return self.layer_keys(number).rows(part, tensor.double())

    def reader(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that reads the stream, with the gain of its norm in it."""
        folded = tensor.double() * self.gain(self.residual.readers[name])
        return (self.inner(name, folded) @ self.keys.reading_matrix(name).T).to(tensor.dtype)

    def writer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that writes to the stream."""
        number, part = self.layout.part_of[name]
        inner = self.layer_keys(number).columns(part, tensor.double())
        return (self.keys.writing_matrix(name).T @ inner).to(tensor.dtype)

    def bias(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a bias that is added to the stream. Like every writer it can have its own P."""
        return (tensor.double() @ self.keys.writing_matrix(name)).to(tensor.dtype)

    def inner_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that neither reads the stream nor writes to it."""
        return self.inner(name, tensor).to(tensor.dtype)


def transform_tensors(
    base: Checkpoint,
    architecture: Architecture,
    residual: ResidualStream,
    key: Key,
    tables: Mapping[str, RowBlocks],
    head: str,
) -> tuple[dict[str, RowBlocks], dict[str, tuple[int, ...]]]:
    """Returns the replaced tensors of the scrambled checkpoint, and the new shapes.

    Args:
        base: the original checkpoint, with an entry for each of `tables`.
        residual: the tensors of the original checkpoint by what they do to the residual stream.
        tables: the permuted tables that are indexed by token id, `head` among them.
        head: the name of the output head.
    """
    scheme, layout = scheme_of(key), architecture.layout(base)
    assert isinstance(scheme, CovariantScheme)
    keys = CovariantKeys.of(scheme, key, layout, residual.width)
    changes = _Changes(base, residual, layout, keys, lru_cache(maxsize=2)(keys.layer))
    width = new_width(base, architecture, scheme)
    replaced: dict[str, RowBlocks] = {}
    for name in tables:
        share = scheme.head_noise if name == head else scheme.table_noise
        noisy = NoisyRows(tables[name], _deviation(base, name, share), key.stream(f"covariant/noise/{name}"))
        matrix = keys.writing_matrix(name)
        if name == head:
            matrix = changes.gain(residual.final_norm)[:, None] * keys.reading_matrix(name).T
        replaced[name] = TransformedRows(noisy, matrix.float())
    changes_by_kind = (
        (residual.readers, changes.reader),
        (residual.writers, changes.writer),
        (residual.biases, changes.bias),
        (sorted(set(layout.part_of) - {*residual.readers, *residual.writers, *residual.biases}), changes.inner_tensor),
    )
    holder = TensorHolder()
    for names, change in changes_by_kind:
        replaced |= {name: LazyTensor(base, name, partial(change, name), holder) for name in names}
    for name in residual.norms:
        replaced[name] = LazyTensor(
            base, name, lambda norm: torch.full((width,), 1 - residual.gain_offset, dtype=norm.dtype), holder
        )
    return replaced, _shapes(base, residual, tables, width)


def _deviation(base: Checkpoint, name: str, share: float) -> float:
    """Returns `share` standard deviations of a table's entries, rounded to fp32. The sums are in fp64, in blocks."""
    if not share:
        return 0.0
    table = base.map_tensor(name)
    mean = sum(float(block.double().sum()) for block in table.split(DEVIATION_BLOCK_ROWS)) / table.numel()
    squares = sum(float((block.double() - mean).square().sum()) for block in table.split(DEVIATION_BLOCK_ROWS))
    return share * float(np.float32((squares / (table.numel() - 1)) ** 0.5))


def _shapes(
    base: Checkpoint, residual: ResidualStream, tables: Mapping[str, RowBlocks], width: int
) -> dict[str, tuple[int, ...]]:
    """Returns the new shapes: writers have `width` rows, and all else that meets the stream has `width` columns."""
    widened_columns = (*tables, *residual.readers, *residual.norms, *residual.biases)
    shapes = {name: (*base.tensors[name].shape[:-1], width) for name in widened_columns}
    return shapes | {name: (width, *base.tensors[name].shape[1:]) for name in residual.writers}
