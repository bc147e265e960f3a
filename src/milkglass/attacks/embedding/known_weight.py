"""Known weights: a scheme that transforms whole layers hides nothing, since the server knows those layers.

ObfusLM+ and its like multiply every matrix that reads the residual stream by one secret T (d, d), a mixture of the
embedding's dimensions with its permutation: Phi* = Phi T. The server has Phi from the public model and Phi* from the
upload. With at least d independent rows of any layers,

    T = argmin || Phi T - Phi* ||  = lstsq(Phi, Phi*),

exactly, and the transformed table times pinv(T) is the table before the transformation: whatever attack works on the
scheme without it works again. Rows of several layers are stacked, which averages out what training changed.

`estimate` is the algebra. `undo` gives the table back. Neither knows which tensors were transformed on which side:
the caller pairs them (architectures/ says which matrices read the residual stream).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from milkglass.errors import UsageError


@dataclass(frozen=True)
class Estimate:
    """transformation: (d, d). residual: relative error of the fit, 0 to 1. condition: of the stacked public weights."""

    transformation: torch.Tensor
    residual: float
    condition: float


def estimate(public: Sequence[torch.Tensor], transformed: Sequence[torch.Tensor]) -> Estimate:
    """T from pairs (Phi (g, d), Phi* (g, d)). Raises UsageError where they have fewer than d rows together."""
    before = torch.cat([one.double() for one in public])
    after = torch.cat([one.double() for one in transformed])
    if before.shape != after.shape:
        raise UsageError(
            f"{tuple(before.shape)} public and {tuple(after.shape)} transformed weights", "give them in pairs"
        )
    if len(before) < before.shape[1]:
        raise UsageError(
            f"{len(before)} rows do not determine a matrix of {before.shape[1]} dimensions", "give more layers"
        )
    found = torch.linalg.lstsq(before, after).solution
    spread = torch.linalg.svdvals(before)
    return Estimate(
        found,
        float((before @ found - after).norm() / after.norm()),
        float(spread[0] / spread[-1].clamp_min(torch.finfo(torch.float64).tiny)),
    )


def undo(table: torch.Tensor, transformation: torch.Tensor) -> torch.Tensor:
    """The table (n, d) before it was multiplied by the transformation; fp32."""
    return (table.double() @ torch.linalg.pinv(transformation)).float()
