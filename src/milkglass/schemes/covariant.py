"""Defines covariant schemes: all weights of a decoder change under a secret, and the function that it computes stays.

The scheme decides the coordinates of the residual stream, the coordinates inside each layer, and the noise of the
tables. client/obfuscate/covariant.py writes the checkpoint for all of them.

**None of them hides which id is which.** A nonlinearity acts on each neuron separately, so neurons can only be
permuted: anyone who runs each id alone aligns them with the public model's (attacks/hidden_states/neuron_alignment.py).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from milkglass.progress import Progress
from milkglass.schemes.aliases import Slots
from milkglass.schemes.covariant_keys import (
    KeyDraws,
    LayerKeys,
    LayerShape,
    OrthogonalKeys,
    RotaryPairSecrets,
    StreamKeys,
)
from milkglass.schemes.mixture import Draws, Ids, Mixture
from milkglass.schemes.scheme import Scheme


class CovariantScheme(Scheme):
    """Changes every layer, and keeps what the model computes, exactly or approximately."""

    needs_heads: ClassVar[bool] = True

    @property
    def needs_whole_layers(self) -> bool:
        return True

    @property
    def table_noise(self) -> float:
        """Returns the noise of the input embeddings, in standard deviations of their entries."""
        return 0.0

    @property
    def head_noise(self) -> float:
        """Returns the noise of the output embeddings, in standard deviations of their entries."""
        return 0.0

    @abc.abstractmethod
    def draw_mixing_matrix(self, size: int, draws: KeyDraws) -> Tensor:
        """Draws an invertible fp64 matrix (size, size).

        It mixes the dimensions of the residual stream, or of a head's values.
        """

    def draw_stream_keys(self, width: int, head_count: int, draws: KeyDraws) -> StreamKeys:
        """Draws the matrices of the residual stream, for d = `width` dimensions and `head_count` query heads."""
        return OrthogonalKeys(self.draw_mixing_matrix(width, draws))

    @abc.abstractmethod
    def draw_pair_secrets(self, shape: LayerShape, draws: KeyDraws) -> RotaryPairSecrets:
        """Draws how each pair of rotary dimensions of one key head, and of its queries, is turned, scaled and moved."""

    def draw_neuron_scales(self, count: int, draws: KeyDraws) -> Tensor:
        """Draws nonzero fp64 numbers (count,) by which the neurons of a layer are scaled."""
        return torch.ones(count, dtype=torch.float64)

    def draw_layer_keys(self, shape: LayerShape, draws: KeyDraws) -> LayerKeys:
        """Draws the secrets of one layer of this shape."""
        heads = range(shape.key_head_count)
        pairs = [self.draw_pair_secrets(shape, draws) for _ in heads]
        mixing = [self.draw_mixing_matrix(shape.head_size, draws) for _ in heads]
        return LayerKeys(shape, pairs, mixing, self.draw_neuron_scales(shape.neuron_count, draws), draws)

    def row_map(
        self, table: Tensor, order: Ids, special: Ids, draws: Callable[[str], Draws], progress: Progress,
        slots: Slots, groups: list[Ids] | None = None,
    ) -> Mixture:  # fmt: skip
        """Returns the identity: no row is mixed with another."""
        progress(len(order))
        return Mixture.identity(len(table))
