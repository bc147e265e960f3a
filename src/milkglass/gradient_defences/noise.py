"""Adds noise to the gradient, after it is clipped (Zhu et al. 2019, section 5.1; GHOST, section 5.1; Wei et al. 2020).

    g' = g min(1, C / |g|) + z,     every entry of z with mean 0 and standard deviation level C

The gradient of a batch is clipped as one vector, not for each text: that is dp_sgd.py. GHOST's "noise level 0.05" does
not say of what. Here it is a share of the clip C. The default C is 1, so that it is also the absolute standard
deviation, as in LAMP's code. With `clip=None`, as in that code, nothing is clipped and the level is absolute. Zhu et
al. name the variance: their 0.01 is a level of 0.1. Laplacian noise has the same standard deviation, a scale of level C
/ sqrt(2), so that both laws disturb equally at one level. The noise is drawn exactly and added on a grid
(noise/grid.py). A guarantee is for one gradient; several gradients spend more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from milkglass import papers
from milkglass.accounting import epsilon_of, epsilon_warning, format_epsilon
from milkglass.gradient_defences.defence import GradientDefence, Tensors
from milkglass.noise import clipping, grid
from milkglass.noise.grid import AddedNoise
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.parameters import limited_field

DELTA = 1e-5  # the delta of the stated guarantee


@dataclass(frozen=True)
class AdditiveNoise(GradientDefence):
    """Clips the gradient of a batch, and adds noise to it. The base of noise defences.

    Attributes:
        level: the standard deviation of the noise, in units of the clip, or absolute if there is no clip.
        clip: the largest L2 norm of the gradient of a batch. None if it is not clipped.
    """

    level: float = limited_field(0.05, above=0, hint="GHOST's comparison uses 0.05")
    clip: float | None = limited_field(1.0, above=0, hint="1 is common; leave it out for none")

    law: ClassVar[Literal["gaussian", "laplace"]]
    paper: ClassVar[Paper | None] = papers.DLG.with_deviations(
        "The gradient is clipped first, as GHOST's comparison does.",
        "The level is a standard deviation, not a variance; a Laplacian has it too, instead of its scale.",
    )

    @property
    def deviation(self) -> float:
        """Returns the standard deviation of each entry's noise."""
        return self.level * (1.0 if self.clip is None else self.clip)

    @property
    def scale(self) -> float:
        """Returns the parameter of the distribution: a standard deviation, or the scale of a Laplacian."""
        return self.deviation if self.law == "gaussian" else self.deviation / math.sqrt(2)

    def added_noise(self, text_count: int) -> AddedNoise | None:
        return AddedNoise(self.law, self.scale, self.clip)

    def protect_gradient(self, tensors: Mapping[str, torch.Tensor], text_count: int, stream: Stream) -> Tensors:
        bounded = tensors if self.clip is None else clipping.l2(tensors, self.clip)
        draw, scale = {"gaussian": grid.add_gaussian, "laplace": grid.add_laplace}[self.law], self.scale
        return {
            name: draw(tensor, scale, stream, self.clip).to(tensors[name].dtype) for name, tensor in bounded.items()
        }


@dataclass(frozen=True)
class GaussianNoise(AdditiveNoise):
    """Adds Gaussian noise, with the guarantee of the analytic Gaussian mechanism if the gradient is clipped."""

    name: ClassVar[str] = "gaussian"
    law: ClassVar[Literal["gaussian", "laplace"]] = "gaussian"

    @property
    def guarantee(self) -> str | None:
        """Returns the guarantee of the analytic Gaussian mechanism with sensitivity 2 C: any batch for any other."""
        if self.clip is None:
            return None
        epsilon = epsilon_of(self.deviation, DELTA, 2 * self.clip)
        warning = epsilon_warning(epsilon)
        return (
            f"({format_epsilon(epsilon)}, {DELTA:g})-DP for each gradient, one batch in the place of another{warning}"
        )


@dataclass(frozen=True)
class LaplaceNoise(AdditiveNoise):
    """Adds Laplacian noise, without a guarantee.

    A clip in L2 bounds the L1 norm only by the clip times the square root of the number of parameters, which leaves an
    epsilon of hundreds of thousands at the usual levels and numbers of parameters.
    """

    name: ClassVar[str] = "laplace"
    law: ClassVar[Literal["gaussian", "laplace"]] = "laplace"
