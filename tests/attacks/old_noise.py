"""The noise as it was until 2026-11-22, kept as a fixture: what `float-holes` and `seed-search` read.

fp32 throughout, and for gradients PyTorch's generator, which keeps 32 bits of a seed. Never to be used.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from scipy.special import ndtri

from milkglass.noise.stream import Stream


def dp_forward(hidden: torch.Tensor, clip: float, sigma: float, stream: Stream) -> torch.Tensor:
    """(t, d): scaled to a Frobenius norm of `clip`, plus sigma times fp32 normal numbers."""
    scale = (clip / hidden.norm().clamp_min(1e-30)).clamp_max(1.0)
    normal = ndtri(stream.uniform(hidden.numel())).astype(np.float32)
    return hidden * scale + sigma * torch.from_numpy(normal).reshape(hidden.shape)


def textobfuscator(hidden: torch.Tensor, clip: float, scale: float, stream: Stream) -> torch.Tensor:
    size = hidden.abs().mean(1, keepdim=True).clamp_min(1e-30)
    bounded = hidden * (clip / size).clamp_max(1.0)
    drawn = torch.from_numpy(stream.laplace(hidden.numel()).astype(np.float32)).reshape(hidden.shape)
    return bounded + scale * drawn


def clipped(tensors: Mapping[str, torch.Tensor], most: float) -> dict[str, torch.Tensor]:
    length = sum(float(one.double().square().sum()) for one in tensors.values()) ** 0.5
    factor = min(1.0, most / max(length, 1e-30))
    return {name: one.clone() if factor == 1 else one * factor for name, one in tensors.items()}


def gaussian(tensors: Mapping[str, torch.Tensor], deviation: float, seed: int) -> dict[str, torch.Tensor]:
    """Of dp-sgd and of gaussian: `seed` was drawn with 62 bits, of which 32 are kept."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: one + torch.randn(one.shape, generator=generator, dtype=torch.float32) * deviation
        for name, one in tensors.items()
    }


def laplace(tensors: Mapping[str, torch.Tensor], deviation: float, seed: int) -> dict[str, torch.Tensor]:
    generator, scale, result = torch.Generator().manual_seed(seed), deviation / 2**0.5, {}
    for name, one in tensors.items():
        uniform = torch.rand(one.shape, generator=generator, dtype=torch.float64) - 0.5
        noise = -scale * uniform.sign() * torch.log1p((-2 * uniform.abs()).clamp_min(-1 + 2.0**-53))
        result[name] = one + noise.to(one.dtype)
    return result
