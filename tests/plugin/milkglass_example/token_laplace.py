"""Token Laplace: each token's state is bounded in L1 and disturbed (the noise of Zhou et al. 2023, section 3, alone).

    sent = h min(1, C / |h|_1) + Laplace(2 C / eps)         h (d,): one token's state after `layer` layers

Two bounded states are at most 2 C apart. Out of scope: which tokens matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from milkglass import papers
from milkglass.accounting import format_epsilon
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.noise import clipping, grid
from milkglass.noise.root import NoiseStream
from milkglass.papers import Paper
from milkglass.parameters import limited_field


@dataclass(frozen=True)
class TokenLaplace(HiddenStateDefence):
    """The method and its parameters.

    Attributes:
        epsilon: of one token.
        clip: C, in L1 norm.
    """

    epsilon: float = limited_field(100.0, above=0)
    clip: float = limited_field(10.0, above=0)

    name: ClassVar[str] = "token-laplace"
    paper: ClassVar[Paper] = papers.TEXTOBFUSCATOR.with_deviations("States are not drawn to the centres of clusters.")

    @property
    def guarantee(self) -> str | None:
        return (
            "each text sent is e-DP for one text replaced by any other of the same length, with e = "
            f"{format_epsilon(self.epsilon)} x tokens; sending more adds up; texts and labels in training are not "
            "protected"
        )

    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        bounded = clipping.rows_l1(hidden, self.clip)
        return grid.straight_through(
            hidden, grid.add_laplace(bounded, 2 * self.clip / self.epsilon, draws.stream, self.clip)
        )
