"""Clips a text's hidden states as one matrix, and adds Gaussian noise: DP-Forward (Du et al. 2023, sections 3, 4).

    X' = X min(1, C / |X|_F)         X (t, d): the hidden states of one text, padding not in it
    sent = X' + sigma Z              Z (t, d) standard normal; sigma by the analytic Gaussian mechanism

Both are computed on a grid with exact samples (noise/grid.py), so the guarantee holds for the numbers that are sent.
Sums of fp32 numbers would reveal each token (attack `float-holes`).

`where = "local"`: the client disturbs what it sends and what it trains with, and each text has a guarantee. The layers
below the noise stay the public model's, so that all that the server holds follows from disturbed states and labels.
`where = "central"`: the party that trains is trusted, and its noise protects the training texts in the weights; what is
sent later is not disturbed.

Sensitivity. Any text may replace any other, so two clipped matrices are up to 2 C apart. The public code takes 1 for
any C. `sensitivity = "paper"` calibrates like that, and the guarantee then states the epsilon that holds.

The length of a text is not hidden, and no guarantee covers it: as in the paper, neighbours are texts of one length.
(Padded to one length, they would be any two texts.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch

from milkglass import papers
from milkglass.accounting import epsilon_of, format_epsilon, sigma_of
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.noise import clipping, grid
from milkglass.noise.grid import AddedNoise
from milkglass.noise.root import NoiseStream
from milkglass.papers import Paper
from milkglass.parameters import limited_field


@dataclass(frozen=True)
class DPForward(HiddenStateDefence):
    """Clips the states of a text as one matrix, and adds Gaussian noise.

    Attributes:
        epsilon, delta: the guarantee of one text, each time that it is sent.
        clip: C, the largest Frobenius norm of a text's hidden states.
        where: "local" or "central", whether the client or the party that trains adds the noise.
        sensitivity: "replace", 2 C, which holds for any other text; or "paper", 1.
        redraw: whether noise is drawn again in every epoch, as in the paper, which spends the budget each time; else
            there is one draw for each training text.
    """

    epsilon: float = limited_field(8.0, above=0)
    delta: float = limited_field(1e-5, above=0, below=1)
    clip: float = limited_field(1.0, above=0)
    where: Literal["local", "central"] = "local"
    sensitivity: Literal["replace", "paper"] = "replace"
    redraw: bool = True

    name: ClassVar[str] = "dp-forward"
    loss_is_mean: ClassVar[bool] = True
    trains_lower: ClassVar[bool] = False
    paper: ClassVar[Paper] = papers.DP_FORWARD.with_deviations(
        "The sensitivity of a clipped input is 2 C, not 1: it holds for any other text.",
        "The noise is isotropic. The paper's matrix mechanism (aMGM) has covariances of rows and columns too.",
        "Layers below the noise are not trained: their gradients would tell of the text without noise.",
        "Labels are not disturbed, and nothing is claimed for them.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.sigma  # raises UsageError where no noise gives this guarantee

    @cached_property
    def sigma(self) -> float:
        """Returns the standard deviation of the noise, in the units of the hidden states."""
        return sigma_of(self.epsilon, self.delta, 2 * self.clip if self.sensitivity == "replace" else 1.0)

    def spent_epsilon(self, draw_count: int = 1) -> float:
        """Returns the epsilon that holds, at this delta, for a text to which noise was added `draw_count` times."""
        return epsilon_of(self.sigma, self.delta, 2 * self.clip, draw_count)

    @property
    def guarantee(self) -> str | None:
        """Returns the guarantee for one text, replaced by any other of its length."""
        draw_count = self.training.epochs if self.redraw else 1
        in_training = (
            f"({format_epsilon(self.spent_epsilon(draw_count))}, {self.delta!r})-DP, composed over {draw_count} "
            f"draw{'s' * (draw_count > 1)}"
        )
        neighbours = "one text replaced by any other of the same length"
        if self.where == "central":
            return (
                f"the server's weights are {in_training}, for {neighbours} in training; labels, and texts sent, are not"
            )
        return (
            f"each text sent is ({format_epsilon(self.spent_epsilon())}, {self.delta!r})-DP for {neighbours}, and "
            f"sending more about it adds up; a text in training is {in_training}; labels and lengths are not protected"
        )

    @property
    def disturbs_only_in_training(self) -> bool:
        return self.where == "central"

    @property
    def added_noise(self) -> AddedNoise | None:
        return None if self.disturbs_only_in_training else AddedNoise("gaussian", self.sigma, self.clip)

    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        clipped = clipping.matrix_l2(hidden, self.clip)
        return grid.straight_through(hidden, grid.add_gaussian(clipped, self.sigma, draws.stream, self.clip))

    def draw_number(self, epoch: int) -> int:
        return epoch if self.redraw else 0
