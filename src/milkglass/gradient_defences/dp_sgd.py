"""Clips each text's gradient separately, and adds noise to their sum: DP-SGD (Abadi et al. 2016, algorithm 1).

    g = (sum over i of g_i min(1, C / |g_i|) + N(0, (noise C)^2 I)) / b

g_i is the gradient of text i, C the clip (max_grad_norm in other libraries), and b the number of texts of the batch.

Clipped gradients and noise lie on a grid, and the noise is drawn exactly (noise/grid.py), so the guarantee holds for
the numbers that are shared.

Texts' gradients are taken one after another. That is exact for every family, and needs memory for one more gradient.
If the next token is predicted, each text's loss is the mean over its own tokens, so that texts have equal weight;
without DP-SGD, a batch's loss is the mean over all its tokens.

The guarantee is accounted with dp-accounting: exactly without sampling (k Gaussian mechanisms are one), and with it by
privacy loss distributions, which err upward. The sentence that `guarantee` returns is for batches in which one text, or
its label, is exchanged for another. b crosses beside the gradient and batches have a fixed size, so a text more or less
would be seen. Two clipped gradients are up to 2 C apart: a noise multiplier of 1 gives (10.0, 1e-5)-DP for one gradient
and (46.3, 1e-5)-DP after 10 rounds (`guarantee_after`). `epsilon_after_steps` is for batches that differ by one text
more or less, and takes the sampling rate with which each text joins a batch (Poisson sampling).

Opacus is not used. It separates examples inside the model, but not at a layer that all examples share, such as a table
of positions, whose gradient it leaves whole, and it does not support tied tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from milkglass import papers
from milkglass.accounting import epsilon_of, epsilon_warning, format_epsilon
from milkglass.gradient_defences.defence import GradientDefence, Tensors
from milkglass.noise import clipping, grid
from milkglass.noise.grid import AddedNoise
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.parameters import Limit, limited_field
from milkglass.threat.training_step import SharedStep

DELTA = 1e-5  # the delta of the stated guarantee
EXCHANGE_SENSITIVITY = 2  # in clips: the largest distance of two sums if one text is exchanged for another
PRIVACY_LOSS_INTERVAL = 1e-3  # ten times dp-accounting's default: a sixth of the time, under 0.1 % more epsilon


@dataclass(frozen=True)
class DPSGD(GradientDefence):
    """Clips each text's gradient, and adds Gaussian noise to their sum.

    Attributes:
        noise: the noise multiplier: the standard deviation of the noise on the sum, divided by the clip.
        clip: the largest L2 norm of a text's gradient, over all tensors.
    """

    noise: float = limited_field(1.0, above=0, hint="1 is common")
    clip: float = limited_field(1.0, above=0, hint="1 is common")

    name: ClassVar[str] = "dp-sgd"
    paper: ClassVar[Paper | None] = papers.DP_SGD.with_deviations(
        "Accounted by privacy loss distributions, which are tighter than their moments accountant.",
        "The sum is divided by the texts of the batch, not by the expected number; batches are not drawn here.",
    )

    @property
    def deviation(self) -> float:
        """Returns the standard deviation of the noise on the sum."""
        return self.noise * self.clip

    @property
    def guarantee(self) -> str | None:
        epsilon = epsilon_after_steps(self.noise / EXCHANGE_SENSITIVITY, DELTA, 1)
        warning = epsilon_warning(epsilon)
        return f"({format_epsilon(epsilon)}, {DELTA:g})-DP for each gradient, one text or label exchanged{warning}"

    def guarantee_after(self, rounds: int) -> str | None:
        """Returns the guarantee after so many rounds, as this many Gaussian mechanisms.

        A text is in at most one batch of a round, in FedSGD and in FedAvg. Which texts are in a batch is not assumed to
        be secret, so no amplification by sampling is claimed.
        """
        epsilon = epsilon_after_steps(self.noise / EXCHANGE_SENSITIVITY, DELTA, rounds)
        rounds_in_words = "1 round" if rounds == 1 else f"{rounds:,} rounds"
        return (
            f"({format_epsilon(epsilon)}, {DELTA:g})-DP after {rounds_in_words}, one text or label exchanged, in one "
            f"batch a round{epsilon_warning(epsilon)}"
        )

    def added_noise(self, text_count: int) -> AddedNoise | None:
        return AddedNoise("gaussian", self.deviation / text_count, self.clip)

    def compute_gradient(
        self, step: SharedStep, ids: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor | None
    ) -> Tensors:
        """Returns the sum of the texts' gradients, each clipped to an L2 norm of at most C, in fp64 on the grid."""
        sums: Tensors = {}
        for i in range(len(ids)):
            length = int(mask[i].sum())
            target = None if targets is None else targets[i : i + 1]
            if target is not None and step.task == "next-token":
                target = target[:, :length]
            text_gradient = step.gradient(ids[i : i + 1, :length], mask[i : i + 1, :length], target)
            factor = clipping.l2_factor(text_gradient.values(), self.clip)
            for name, tensor in text_gradient.items():
                steps = grid.whole_steps(tensor, self.deviation, self.clip, factor)
                sums[name] = sums[name].add_(steps) if name in sums else steps
        size = grid.step_size(self.deviation, self.clip)
        return {name: tensor.mul_(size) for name, tensor in sums.items()}

    def protect_gradient(self, tensors: Mapping[str, torch.Tensor], text_count: int, stream: Stream) -> Tensors:
        return {
            name: (grid.add_gaussian(tensor, self.deviation, stream, self.clip) / text_count).float()
            for name, tensor in tensors.items()
        }


def epsilon_after_steps(noise_multiplier: float, delta: float, step_count: int, sampling_rate: float = 1.0) -> float:
    """Returns an upper bound on the epsilon that all steps spend together, for neighbours with one text more or less.

    Args:
        noise_multiplier: the standard deviation of the noise on the sum, divided by the clip.
        delta: between 0 and 1.
        step_count: how many steps are taken, at least 1.
        sampling_rate: the probability with which each text joins each batch, independently (Poisson sampling), above 0;
            1 is no sampling.

    Raises:
        UsageError: a value is outside its range.
    """
    Limit(0, excludes_low=True).require(noise_multiplier, "the noise multiplier", "1 is common")
    Limit(0, excludes_low=True, below=1).require(delta, "delta", "1e-5 is common")
    Limit(1).require(step_count, "the number of steps", "count from 1")
    Limit(0, excludes_low=True, high=1).require(sampling_rate, "the sampling rate", "1 for none")
    if sampling_rate == 1:
        return epsilon_of(noise_multiplier, delta, 1.0, step_count)
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    event = SelfComposedDpEvent(PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise_multiplier)), step_count)
    accountant = PLDAccountant(value_discretization_interval=PRIVACY_LOSS_INTERVAL)
    return float(accountant.compose(event).get_epsilon(delta))
