"""How far the gradients of a guess are from the shared ones, as the four attacks by optimisation measure it.

    squares   sum over parameters of ||g - g*||^2                                  (DLG, equation 4; TAG adds L1)
    cosine    mean over parameters of 1 - <g, g*> / (||g|| ||g*||)                  (LAMP, section 4.1)
    norms     sum over parameters of ||g - g*||, not squared                        (GRAB, as coded)

each with l1 x sum |g - g*| where that weight is not zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from milkglass.attacks.gradients.optimisation.factors import InnerProducts

Kind = Literal["squares", "cosine", "norms"]
LEAST = 1e-12  # a norm below this is taken as this


@dataclass(frozen=True)
class Distance:
    """A distance between two lists of gradients.

    Attributes:
        kind: one of the three above.
        l1: the weight of the sum of absolute differences, unweighted by layer.
    """

    kind: Kind
    l1: float = 0.0

    def __call__(self, created: Sequence[torch.Tensor], seen: Sequence[torch.Tensor]) -> torch.Tensor:
        """() for pairs of tensors of the same shape; 0 where they are equal."""
        parts = [self._one(a, b) for a, b in zip(created, seen, strict=True)]
        total = torch.stack(parts).sum()
        return total / len(parts) if self.kind == "cosine" else total

    def _one(self, created: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        if self.kind == "cosine":
            value = 1.0 - (created * seen).sum() / (created.norm().clamp_min(LEAST) * seen.norm().clamp_min(LEAST))
        else:
            gap = created - seen
            value = gap.square().sum() if self.kind == "squares" else gap.norm()
        return value + self.l1 * (created - seen).abs().sum() if self.l1 else value

    def of(self, products: Mapping[str, InnerProducts], squares: Mapping[str, float]) -> torch.Tensor:
        """(h,) the same, without L1, from inner products and squared norms.

        Args:
            squares: of the seen, by name.
        """
        parts = [self._of(one, squares[name]) for name, one in products.items()]
        total = torch.stack(parts).sum(0)
        return total / len(parts) if self.kind == "cosine" else total

    def _of(self, one: InnerProducts, square: float) -> torch.Tensor:
        if self.kind == "cosine":
            return 1.0 - one.inner / (one.square.clamp_min(LEAST**2).sqrt() * max(square**0.5, LEAST))
        gap = one.square - 2 * one.inner + square
        return gap if self.kind == "squares" else gap.clamp_min(LEAST**2).sqrt()


def product(created: torch.Tensor, seen: torch.Tensor) -> InnerProducts:
    """Of one guess's gradient, written out."""
    return InnerProducts((created * seen).sum()[None], created.square().sum()[None])
