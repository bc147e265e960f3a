"""Computes the gradients of many batches lazily: at most one is in memory.

A gradient is as large as the model. Each is computed when it is read, from the same draws every time, and replaces the
one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from milkglass.experiments.procedures.private_rows import PrivateRows
from milkglass.gradient_defences.defence import GradientDefence, Tensors, share_gradient
from milkglass.noise.stream import KEY_BYTES, Stream
from milkglass.threat.observations import Gradients
from milkglass.threat.training_step import SharedStep

STREAM_BYTES_PER_BATCH = 2 * KEY_BYTES  # bytes that each batch takes of the recipe's stream, as `share_gradient` does


@dataclass(eq=False)
class SharedGradients:
    """Computes the gradients that one client shares, one for each batch, when they are read.

    Attributes:
        step: the training step that computes the gradients.
        rows: the rows; batch i has the `batch_size` rows from i * batch_size.
        defence: changes a gradient before it is shared.
        batch_size: how many texts each batch has.
        seed: decides all draws; a batch's draws follow from the seed and the batch's index.
        pad_id: the id with which texts are padded.
    """

    step: SharedStep
    rows: PrivateRows
    defence: GradientDefence
    batch_size: int
    seed: int
    pad_id: int
    _last: tuple[int, Tensors] | None = field(default=None, repr=False)

    def observations(self) -> tuple[Gradients, ...]:
        """Returns one observation for each full batch. Its gradient is computed when it is read."""
        return tuple(
            Gradients(_LazyGradient(self, index), self.batch_size, 0)
            for index in range(len(self.rows) // self.batch_size)
        )

    def gradient(self, index: int) -> Tensors:
        """Returns the gradient of one batch by parameter name, and drops the previous one from memory."""
        if self._last is None or self._last[0] != index:
            self._last = None
            stream = Stream.of_seed(self.seed)
            stream.bytes(STREAM_BYTES_PER_BATCH * index)
            part = self.rows.select(np.arange(self.batch_size * index, self.batch_size * (index + 1)))
            shared = share_gradient(self.step, *part.batch(self.pad_id), self.defence, 0, stream)
            self._last = index, dict(shared.tensors)
        return self._last[1]


@dataclass(frozen=True, eq=False)
class _LazyGradient(Mapping[str, torch.Tensor]):
    """Gives one batch's gradient by parameter name, computed when it is read."""

    source: SharedGradients
    index: int

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.source.gradient(self.index)[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source.gradient(self.index))

    def __len__(self) -> int:
        return len(self.source.gradient(self.index))
