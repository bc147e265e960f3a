"""Defines AloePri: secret coordinates of d + 2h dimensions, noise on both tables, secret layers (Lin et al. 2026).

    E~ = Pi (E + alpha_e sigma_E N) P          H~ = Pi (H + alpha_h sigma_H N') Q^T       N, N' standard normal

Pi permutes the vocabulary, and sigma is the standard deviation of a table's entries. covariant_keys.py makes P and Q,
and the secrets inside the layers. RMSNorm divides by the length of x P, which is kappa times that of x on average and
not for each x. So the function is kept approximately, and exactly with lambda = 0, h = 0, beta = 1 and no noise.

**Broken**: neuron alignment names the ids from the uploaded model alone (docs/log.md, 2026-11-23).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from milkglass import papers
from milkglass.errors import UsageError
from milkglass.papers import Paper
from milkglass.parameters import limited_field
from milkglass.schemes.covariant import CovariantScheme
from milkglass.schemes.covariant_keys import (
    KeyDraws,
    KeyMatrices,
    LayerShape,
    RotaryPairSecrets,
    StreamKeys,
    permute_windows,
    uniform,
)


@dataclass(frozen=True)
class AloePri(CovariantScheme):
    """Changes all weights under secret coordinates, with noise on both tables. The defaults are the paper's.

    Attributes:
        alpha_e, alpha_h: noise of the input and of the output embeddings, in standard deviations of the table's
            entries.
        spread: lambda, how far B and each U are from orthogonal.
        expansion: h; the stream gets 2h more dimensions, and a few more so that the heads divide their number.
        window: beta, the most pairs of a head's dimensions that are permuted among each other; 1 permutes none.
        sharpness: gamma, how strongly windows keep to pairs of similar frequency.
        largest_scale: s; scales of pairs and of neurons are between 1/s and s, uniform in their logarithm.
    """

    alpha_e: float = limited_field(1.0)
    alpha_h: float = limited_field(0.2)
    spread: float = limited_field(0.3, most=3)
    expansion: int = limited_field(128, most=4096)
    window: int = limited_field(8, least=1)
    sharpness: float = limited_field(1000.0)
    largest_scale: float = limited_field(2.0, least=1, most=100)

    name: ClassVar[str] = "aloepri"
    broken: ClassVar[str | None] = "AloePri is broken: anyone with the public model can read nearly every id"
    paper: ClassVar[Paper] = papers.ALOEPRI.with_deviations(
        "The full text was not at hand: Algorithms 1 and 2, the forms of the tables and the defaults are taken from "
        "public transcriptions of version 2 and their lists of errata; no code of theirs is used.",
        "Keys are multiplied by R H^-1 Z, where Algorithm 2 prints Z transposed: only so does Z cancel.",
        "BlockPerm moves on by each window and reaches the last pair, and gamma, which the printed loop does not use, "
        "multiplies the differences of frequencies; frequencies are the model's own.",
        "Kappa has the factor sqrt(d / (d + 2h)), since RMSNorm divides by a root mean square; it is the mean over "
        "directions of x, and is folded into what reads, with the norms' gains.",
        "The scale of C and D is not known: their coefficients have variance 1/d, as all other blocks have.",
        "The distributions of the secret scales and of U are not known: scales are log-uniform between 1/2 and 2, U is "
        "drawn as B is.",
        "h is raised until the number of heads divides d + 2h, which an ordinary config demands.",
        "Noise of the output embeddings is added before the last norm's gain is folded in.",
        "Mixtures of experts and latent attention are left out.",
    )

    @property
    def table_noise(self) -> float:
        return self.alpha_e

    @property
    def head_noise(self) -> float:
        return self.alpha_h

    def stream_width(self, width: int, head_count: int) -> int:
        return width + 2 * self._expansion(width, head_count)

    def _expansion(self, width: int, head_count: int) -> int:
        """Returns the smallest h from `expansion` on for which the heads divide d + 2h.

        Raises UsageError if there is none.
        """
        candidates = range(self.expansion, self.expansion + head_count)
        expansion = next((h for h in candidates if (width + 2 * h) % head_count == 0), None)
        if expansion is None:
            raise UsageError(
                f"a stream of {width} dimensions cannot be widened by an even number so that {head_count} heads "
                "divide it",
                "use orthogonal for this model",
            )
        return expansion

    def draw_mixing_matrix(self, size: int, draws: KeyDraws) -> Tensor:
        """Draws B of Algorithm 1: orthogonal, plus `spread` times a Gaussian matrix."""
        return draws.orthogonal(size) + self.spread * draws.gaussian(size, size).double() / size**0.5

    def draw_stream_keys(self, width: int, head_count: int, draws: KeyDraws) -> StreamKeys:
        return KeyMatrices(self.draw_mixing_matrix(width, draws), self._expansion(width, head_count), draws)

    def draw_pair_secrets(self, shape: LayerShape, draws: KeyDraws) -> RotaryPairSecrets:
        count = shape.head_size // 2
        angles = 2 * math.pi * uniform(count, draws)
        order = permute_windows(shape.frequencies, self.window, self.sharpness, draws)
        return RotaryPairSecrets(angles, self.draw_neuron_scales(count, draws), order)

    def draw_neuron_scales(self, count: int, draws: KeyDraws) -> Tensor:
        return torch.as_tensor(self.largest_scale, dtype=torch.float64) ** (2 * uniform(count, draws) - 1)
