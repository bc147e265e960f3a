"""Adds noise on a grid: the additive mechanisms, Gaussian and Laplace, and what of their noise is public.

    released = g (trunc(x / g) + round(Z / g)),     g a power of two, Z a real Gaussian or Laplacian

x is cut toward zero, so that no coordinate grows: a bound on x in any norm, and so the sensitivity, holds for the cut x
as well. round(Z / g) is an exact sample (rounded.py). The result is a function of the real mechanism's output on the
cut x and has its guarantee. Every multiple of g can be released, whatever x is. A later conversion to fp32 is a
function of the released number alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.noise import rounded
from milkglass.noise.stream import Stream

NOISE_STEP_BITS = 24  # the noise is 2^24 to 2^25 steps wide: fp32 shows no more
MAX_BOUND_BITS = 44  # bits of a bound counted in steps, so that fp64 holds sums of them and noise
MAX_STEPS = 2**52  # the most steps of a number, so that fp64 holds it exactly

Sampler = Callable[[Stream, int, float], NDArray[np.int64]]


def step_size(width: float, bound: float | None = None) -> float:
    """Returns the size g of the grid's steps.

    Args:
        width: the standard deviation or scale of the noise.
        bound: the largest coordinate of the data. None: it is not bounded.
    """
    exponent = math.floor(math.log2(width)) - NOISE_STEP_BITS
    if bound is not None:
        exponent = max(exponent, math.ceil(math.log2(bound)) - MAX_BOUND_BITS)
    return 2.0**exponent


def add_gaussian(x: torch.Tensor, deviation: float, stream: Stream, bound: float | None = None) -> torch.Tensor:
    """Returns x of any shape plus Gaussian noise, fp64, on the grid. No coordinate of x may exceed `bound`."""
    return _release(x, deviation, stream, bound, rounded.gaussian)


def add_laplace(x: torch.Tensor, scale: float, stream: Stream, bound: float | None = None) -> torch.Tensor:
    """Returns x of any shape plus Laplacian noise, fp64, on the grid. No coordinate of x may exceed `bound`."""
    return _release(x, scale, stream, bound, rounded.laplace)


def whole_steps(x: torch.Tensor, width: float, bound: float | None = None, factor: float = 1.0) -> torch.Tensor:
    """Returns x times the factor in whole steps of the grid, cut toward zero, in fp64.

    Sums of such tensors are whole numbers, too. Multiplied by `step_size`, they are numbers on the grid.

    Args:
        x: any numbers.
        width: the standard deviation or scale of the noise.
        bound: the largest coordinate of x times the factor. None: it is not bounded.
        factor: what x is multiplied by.

    Raises:
        UsageError: a number is not finite, or has more than MAX_STEPS steps, so that sums would not be exact.
    """
    steps = x.detach().to(torch.float64, copy=True).mul_(factor / step_size(width, bound)).trunc_()
    largest = float(steps.abs().max()) if steps.numel() else 0.0
    if math.isnan(largest):
        raise UsageError("a number that gets noise is not finite", "check the model that computed it")
    if largest > MAX_STEPS:
        raise UsageError(
            f"a number is more than {MAX_STEPS:.0e} times as large as the steps of its noise",
            "clip it, or add more noise",
        )
    return steps


def _release(x: torch.Tensor, width: float, stream: Stream, bound: float | None, sample: Sampler) -> torch.Tensor:
    """Returns x plus the sampled noise, on the grid, in fp64 and on the device of x."""
    step = step_size(width, bound)
    noise = torch.from_numpy(sample(stream, x.numel(), width / step)).reshape(x.shape)
    steps = whole_steps(x.cpu(), width, bound)
    return steps.add_(noise).mul_(step).to(x.device)


class _StraightThrough(torch.autograd.Function):
    """Replaces x by the released numbers. The gradient of these goes to x, as with added noise."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, released: torch.Tensor) -> torch.Tensor:
        return released

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def straight_through(x: torch.Tensor, released: torch.Tensor) -> torch.Tensor:
    """Returns the released numbers in the dtype of x; their gradient goes to x (a straight-through estimator)."""
    result: torch.Tensor = _StraightThrough.apply(x, released.to(x.dtype))
    return result


@dataclass(frozen=True)
class AddedNoise:
    """Describes what is public about the noise of a mechanism. An attacker has it (Kerckhoffs).

    Attributes:
        law: the distribution of the noise.
        width: the standard deviation (gaussian) or scale (laplace), in units of what is sent.
        clip: the bound that was applied to the data. None if there was none.
        clip_scope: what the clip bounds: "text" is the L2 norm of all numbers of a text, "row" the mean absolute
            coordinate of each row.
    """

    law: Literal["gaussian", "laplace"]
    width: float
    clip: float | None = None
    clip_scope: Literal["text", "row"] = "text"
