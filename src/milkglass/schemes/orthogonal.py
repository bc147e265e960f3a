"""Puts the stream and each head's values into secret orthogonal coordinates, without noise: orthogonal conjugation.

ConjFormer's idea is that an orthogonal change of coordinates commutes with RMSNorm once its gains are folded away, so
the model's function is kept exactly. Queries and keys are turned pair by pair; heads, neurons and the vocabulary are
permuted.

**Broken**, like all covariant schemes (covariant.py). The lengths and products of the table's rows stay as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from milkglass.papers import Paper, unpublished_method
from milkglass.schemes.covariant import CovariantScheme
from milkglass.schemes.covariant_keys import KeyDraws, LayerShape, RotaryPairSecrets, uniform


@dataclass(frozen=True)
class Orthogonal(CovariantScheme):
    """Turns the residual stream, and each head's values, by secret orthogonal matrices."""

    name: ClassVar[str] = "orthogonal"
    broken: ClassVar[str | None] = "orthogonal conjugation is broken: anyone with the public model can read every id"
    paper: ClassVar[Paper] = unpublished_method(
        "A decoder in secret orthogonal coordinates; after the idea of ConjFormer"
    )

    def draw_mixing_matrix(self, size: int, draws: KeyDraws) -> Tensor:
        return draws.orthogonal(size)

    def draw_pair_secrets(self, shape: LayerShape, draws: KeyDraws) -> RotaryPairSecrets:
        count = shape.head_size // 2
        return replace(RotaryPairSecrets.identity(count), angles=2 * math.pi * uniform(count, draws))
