"""Mixes the embedding's d dimensions too, in all that reads or writes the residual stream: ObfusLM+ (section 4.4).

Equation 2. With E~ the table that ObfusLM mixed, W* = WeightSynth(EmbedCluster(E~^T)) mixes its columns, sigma*
permutes them, P is sigma* as a matrix, and T = W* P:

    E* = E~ W* P        H* = H~ W* P        Phi* = Phi W* P  (what reads)        Theta* = P^T W* Theta  (what writes)

**No form keeps the model's function** unless W* = I:

    form        tables   readers and head   writers        defect
    paper       W* P     W* P               P^T W*         writers would need W*^T, readers the inverse transpose
    symmetrise  S P      S P                P^T S          S = (W* + W*^T) / 2 corrects the writers, not the readers
    exact       W* P     (W* P)^-T          (W* P)^T       only the norms: W* does not keep a row's length

Fine-tuning has to compensate. The condition number of W* shows how hard that is, and how much "exact" magnifies the
rounding of the checkpoint's dtype.

**It hides nothing from anyone with the public layers**: Phi* = Phi T has one unknown, and least squares finds it
(attacks/embeddings/known_weight.py). What is left is ObfusLM.

**Memory.** Clustering dimensions needs the whole of E~ as columns, a table in its own dtype. All else is (d, d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from milkglass import papers
from milkglass.errors import UsageError
from milkglass.papers import Paper
from milkglass.parameters import limited_field, require
from milkglass.progress import Progress, no_progress
from milkglass.schemes.clustering import (
    LaplaceDraws,
    Leftover,
    count_reaching_quantile,
    embed_cluster,
    merge_small_clusters,
    weight_synth,
)
from milkglass.schemes.mixture import Ids, Mixture

TransformForm = Literal["paper", "symmetrise", "exact"]
MAX_CONDITION_NUMBER = 1e6  # the condition number of W* above which its inverse in fp32 would be noise


@dataclass(frozen=True)
class DimensionMixing:
    """Makes the matrices that mix the dimensions of the residual stream (ObfusLM, section 4.4).

    Attributes:
        k: the paper's k*, 10 (appendix C.3).
        epsilon: the paper's epsilon*, 3 (appendix C.3).
        beta: a candidate's cosine must reach this quantile of its seed's cosines. The paper's 0.99 leaves few or no
            candidates among some hundred dimensions; 0.95 leaves 29 of 576.
        form: which matrices multiply readers and writers: a row of the module's table.
        leftover: clusters smaller than k join the nearest one ("merge") or are left ("paper").
    """

    k: int = limited_field(10, least=1, hint="10 is the paper's choice")
    epsilon: float = limited_field(3.0, hint="3 is the paper's choice")
    beta: float = limited_field(0.95, below=1)
    form: TransformForm = "paper"
    leftover: Leftover = "merge"

    paper: ClassVar[Paper] = papers.OBFUSLM.with_deviations(
        "1. Norm gains are folded into what reads after them, and an embedding that is tied to the head is untied: "
        "the paper is silent, and without this the gains show the permutation.",
        "2. beta is 0.95 by default: at 0.99 fewer than k* dimensions are candidates in models of at most 900.",
        "3. The paper's form does not keep the function; two others are offered.",
    )

    def __post_init__(self) -> None:
        require(self)

    def draw_transform(
        self, columns: torch.Tensor, order: Ids, noise: LaplaceDraws, sigma_star: Ids, progress: Progress = no_progress
    ) -> DimensionTransform:
        """Returns W* and sigma* as the matrices that multiply each kind of tensor.

        Args:
            columns: (d, n) E~^T, in any dtype: blocks of it are converted.
            order: (d,) the order in which dimensions are visited.
            noise: draws Laplace noise.
            sigma_star: (d,) the new place of each dimension.

        Raises:
            UsageError: too few dimensions are candidates for clusters of k, or the matrices cannot be inverted.
        """
        d = len(columns)
        max_candidates = count_reaching_quantile(d, self.beta)
        if max_candidates < self.k:
            raise UsageError(
                f"{d} dimensions at plus-beta = {self.beta} leave {max_candidates} candidates for clusters of {self.k}",
                "lower plus-beta or plus-k",
            )
        clusters = embed_cluster(columns, order, self.k, self.beta, progress)
        if self.leftover == "merge":
            clusters = merge_small_clusters(columns, clusters, self.k)
        mixture = Mixture.of(d, clusters, weight_synth(columns, clusters, self.epsilon, noise))
        return DimensionTransform.of(mixture.apply(torch.eye(d), np.arange(d)), sigma_star, self.form)


@dataclass(frozen=True)
class DimensionTransform:
    """Holds the matrices that multiply each kind of tensor, (d, d) fp32 each.

    Attributes:
        tables, readers: multiply a tensor from the right.
        writers: multiplies a tensor from the left.
        condition_number: that of W*, or of S.
    """

    tables: torch.Tensor
    readers: torch.Tensor
    writers: torch.Tensor
    condition_number: float

    @classmethod
    def of(cls, mixing: torch.Tensor, sigma_star: Ids, form: TransformForm) -> DimensionTransform:
        """Computes the matrices.

        Args:
            mixing: (d, d) W*.
            sigma_star: (d,) the new place of each dimension.
            form: which matrices multiply readers and writers.

        Raises:
            UsageError: the form is "exact", and W* is too near a singular matrix to be inverted.
        """
        w = mixing.double()
        if form == "symmetrise":
            w = (w + w.T) / 2
        condition_number = float(torch.linalg.cond(w))
        source = torch.from_numpy(np.argsort(sigma_star).astype(np.int64))  # column j comes from dimension source[j]
        tables = w[:, source]
        if form != "exact":
            return cls(tables.float(), tables.float(), w[source].float(), condition_number)
        if not condition_number < MAX_CONDITION_NUMBER:
            raise UsageError(
                f"W* has a condition number of {condition_number:.1e}, above {MAX_CONDITION_NUMBER:.0e}: its inverse "
                "would be noise",
                "raise plus-epsilon, lower plus-k, or use the paper's form",
            )
        return cls(tables.float(), torch.linalg.inv(tables).T.float(), tables.T.float(), condition_number)
