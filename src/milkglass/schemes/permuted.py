"""Permutes the vocabulary, the stream's dimensions, heads, each head's values and neurons, and does nothing else.

This is the mildest covariant scheme: no entry of a tensor changes except by folded gains. The dimensions of queries and
keys keep their places, since rotary positions turn each pair at its own speed.

**Broken**: sorting a row's entries names its token (attacks/embeddings/sorted_rows.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from milkglass.papers import Paper, unpublished_method
from milkglass.schemes.covariant import CovariantScheme
from milkglass.schemes.covariant_keys import KeyDraws, LayerShape, RotaryPairSecrets


@dataclass(frozen=True)
class Permuted(CovariantScheme):
    """Permutes the dimensions, heads and neurons of a decoder, and its vocabulary."""

    name: ClassVar[str] = "permuted"
    broken: ClassVar[str | None] = "permuting all weights is broken: anyone with the public model can read every id"
    paper: ClassVar[Paper] = unpublished_method("A decoder whose dimensions, heads and neurons are permuted")

    def draw_mixing_matrix(self, size: int, draws: KeyDraws) -> Tensor:
        return torch.eye(size, dtype=torch.float64)[torch.from_numpy(draws.order(size))]

    def draw_pair_secrets(self, shape: LayerShape, draws: KeyDraws) -> RotaryPairSecrets:
        return RotaryPairSecrets.identity(shape.head_size // 2)
