"""Clips data to bounds that hold exactly for the stored numbers, and not only up to rounding.

    x' = x min(1, C (1 - s) / |x|),     |x| in fp64,   s = 2^-20

A sum of n squares in fp64 is off by less than n 2^-53 of itself, and a product by 2^-53, so s covers vectors of up to
2^32 coordinates: |x'| <= C holds exactly for the fp64 numbers x'. A clipped x is shorter by about a millionth for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

ROUNDING_SLACK = 2.0**-20  # s


def l2(tensors: Mapping[str, torch.Tensor], bound: float) -> dict[str, torch.Tensor]:
    """Returns the tensors in fp64, with a joint L2 norm of at most `bound` (Abadi et al. 2016, algorithm 1)."""
    factor = l2_factor(tensors.values(), bound)
    return {name: tensor.double() * factor for name, tensor in tensors.items()}


def l2_factor(tensors: Iterable[torch.Tensor], bound: float) -> float:
    """Returns the fp64 factor, at most 1, that brings the L2 norm of all tensors together to at most `bound`."""
    norms = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors]
    norm = math.hypot(*norms)
    return min(1.0, bound * (1 - ROUNDING_SLACK) / norm) if norm > 0 else 1.0


def matrix_l2(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Returns x (t, d) in fp64, scaled to a Frobenius norm of at most `bound`.

    The gradient passes through the factor too.
    """
    x64 = x.double()
    norm = x64.norm().clamp_min(1e-300)
    return x64 * (bound * (1 - ROUNDING_SLACK) / norm).clamp_max(1.0)


def rows_l1(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Returns x (t, d) in fp64, each row scaled to an L1 norm of at most `bound`."""
    x64 = x.double()
    norms = x64.abs().sum(1, keepdim=True).clamp_min(1e-300)
    return x64 * (bound * (1 - ROUNDING_SLACK) / norms).clamp_max(1.0)
