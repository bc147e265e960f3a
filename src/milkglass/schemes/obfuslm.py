"""Clusters the embeddings, then replaces each by a noisy mixture of its cluster: ObfusLM (Lin et al. 2025).

EmbedCluster is Algorithm 1, WeightSynth Algorithm 2, both in appendix B (clustering.py).
`reference/obfuslm.py` transcribes them literally and is the oracle: the same clusters for the same order, the same
weights for the same noise.

The sensitivity in Algorithm 2 depends on the data, and the noise does not depend on epsilon at all (deviation 4).
`ClusterReport` (mixture.py) reports what actually holds, and only attacks show what that is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import papers
from milkglass.errors import UsageError
from milkglass.papers import Paper
from milkglass.parameters import limited_field
from milkglass.progress import Progress
from milkglass.schemes.aliases import AliasedMixture, Slots
from milkglass.schemes.bands import Bands
from milkglass.schemes.clustering import (
    LaplaceDraws,
    Leftover,
    count_reaching_quantile,
    embed_cluster,
    merge_small_clusters,
    weight_synth,
    zero_rows,
)
from milkglass.schemes.mixture import Draws, Ids, Mixture, RowMap
from milkglass.schemes.obfuslm_plus import DimensionMixing
from milkglass.schemes.scheme import Scheme

MAX_ALIASES = 16  # tables grow by this factor, and beyond it nothing was measured


@dataclass(frozen=True)
class ObfusLM(Scheme):
    """Mixes each embedding with those of its cluster. `bands`, `aliases` and `rows` are not the paper's.

    Attributes:
        k: the cluster size.
        epsilon: how strongly similarity decides the weights; 0: not at all.
        beta: a candidate's cosine must reach this quantile of its row.
        leftover: clusters smaller than k join the nearest one ("merge") or are left ("paper").
        cluster_special: whether special tokens are clustered too, or keep their own rows.
        plus: how the dimensions are mixed as well (ObfusLM+). None: they are not.
        bands: which tokens may share a cluster. None: any.
        aliases: the number of scrambled ids of each ordinary token (aliases.py). None: one.
        rows: "shared" if all rows of a cluster are its mean. Ids are then drawn at each occurrence, and name a cluster,
            not a token.

    Raises:
        UsageError: a parameter is out of its range, or an option is set that cannot be used with shared rows.
    """

    k: int = limited_field(10, least=1, hint="10 is the paper's choice")
    epsilon: float = limited_field(0.1, hint="0.1 and 1 are the paper's")
    beta: float = limited_field(0.99, below=1, hint="0.99 is the paper's choice")
    leftover: Leftover = "merge"
    cluster_special: bool = False
    plus: DimensionMixing | None = None
    bands: Bands | None = None
    aliases: int | None = limited_field(None, least=2, most=MAX_ALIASES, hint="leave it out for one id a token")
    rows: Literal["shared"] | None = None

    name: ClassVar[str] = "obfuslm"
    paper: ClassVar[Paper] = papers.OBFUSLM.with_deviations(
        "1. Algorithm 1's inner loop never tests B[j]; read literally, most tokens fall into several clusters. "
        "Assigned tokens are skipped, before the stop test, as the prose says (one cluster per embedding).",
        "2. The seed counts toward k and is marked assigned; ties fall to the token visited first.",
        "3. Clusters smaller than k are merged by default, below 2k in all: the paper ships singletons verbatim.",
        "4. In Algorithm 2 the log-sum-exp cancels: u' = eps cos / 2 + Lap((max cos - min cos) / 2), independently "
        "for each weight. Equal cosines give no noise.",
        "5. Special tokens and all-zero rows keep a row of their own unless cluster_special: the paper is silent.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows is None:
            return
        for option in ("aliases", "plus"):
            if getattr(self, option) is not None:
                hint = "ids are drawn within a cluster already, and an id does not name a token"
                raise UsageError(f"{option} and rows = shared do not go together", hint if option == "aliases" else "")
        if self.cluster_special:
            raise UsageError("cluster_special and rows = shared do not go together", "a model needs its special tokens")

    @property
    def ids_per_token(self) -> int:
        return self.aliases or 1

    @property
    def shares(self) -> bool:
        return self.rows == "shared"

    def suggested_parameters(self, kind: str) -> dict[str, Any]:
        return {"epsilon": 0.1 if kind == "encoder" else 1.0}

    def require_tokens(self, token_count: int, special_count: int) -> None:
        self.require_candidates(token_count if self.cluster_special else token_count - special_count)

    def with_counts(self, counts: NDArray[np.int64], factor: float) -> ObfusLM:
        return replace(self, bands=Bands.from_counts(counts, factor))

    def mixture(self, table: torch.Tensor, order: Ids, noise: LaplaceDraws) -> Mixture:
        """Returns the mixture of the rows of `table` (n, d) that `order` lists, clustered in that order."""
        clusters = self.cluster(table, order)
        return Mixture.of(len(table), clusters, weight_synth(table, clusters, self.epsilon, noise))

    def document(self) -> dict[str, Any]:
        return super().document() | {"name": "obfuslm+" if self.plus else "obfuslm"}

    def row_map(
        self, table: torch.Tensor, order: Ids, special: Ids, draws: Callable[[str], Draws], progress: Progress,
        slots: Slots, groups: list[Ids] | None = None,
    ) -> RowMap:  # fmt: skip
        """Returns the clusters' mixtures by WeightSynth, one for each alias; with shared rows the clusters' means."""
        clusters = self.groups(table, order, special, progress) if groups is None else groups
        if self.shares:
            return Mixture.means(len(table), clusters)
        mixtures = [
            Mixture.of(len(table), clusters, weight_synth(table, clusters, self.epsilon, draws(label).laplace))
            for label in noise_labels(self.ids_per_token)
        ]
        return mixtures[0] if self.ids_per_token == 1 else AliasedMixture(tuple(mixtures), slots)

    def groups(self, table: torch.Tensor, order: Ids, special: Ids, progress: Progress) -> list[Ids]:
        """Returns the clusters that EmbedCluster makes of the tokens that take part."""
        is_excluded = zero_rows(table)
        if not self.cluster_special:
            is_excluded[special] = True
        return self.cluster(table, order[~is_excluded[order]], progress)

    def cluster(self, table: torch.Tensor, order: Ids, progress: Progress | None = None) -> list[Ids]:
        """Returns the clusters as arrays of rows, seed first.

        Each band is clustered separately, with a beta that leaves 2k candidates if the band is small.
        """
        self.require_candidates(len(order))
        bands_and_betas, all_clusters = [(order, self.beta)], list[Ids]()
        if self.bands is not None:
            bands = self.bands.split(order, len(table), self.k)
            bands_and_betas = [(band, max(0.0, min(self.beta, 1 - 2 * self.k / len(band)))) for band in bands]
        for band, beta in bands_and_betas:
            clusters = embed_cluster(table, band, self.k, beta, progress)
            all_clusters += merge_small_clusters(table, clusters, self.k) if self.leftover == "merge" else clusters
        return all_clusters

    def require_candidates(self, token_count: int) -> None:
        """Raises UsageError if so few tokens take part that no cluster can have k."""
        max_candidates = count_reaching_quantile(token_count, self.beta)
        if self.bands is None and max_candidates < self.k:
            # the greatest beta, in thousandths, that leaves k candidates
            max_beta = np.floor(1000 * (token_count - self.k) / max(1, token_count - 1)) / 1000
            beta_hint = f", or a beta of {max_beta:g} or less (--set beta={max_beta:g})" if max_beta >= 0 else ""
            raise UsageError(
                f"{token_count} tokens at beta = {self.beta} leave {max_candidates} candidates for clusters of "
                f"{self.k}",
                f"take --k {max_candidates} or less{beta_hint}",
            )


def noise_labels(aliases_per_token: int) -> list[str]:
    """Returns the labels of the noise streams, one for each alias, so that no two rows are mixed with one draw."""
    return ["noise/embedding", *(f"noise/embedding/{alias}" for alias in range(1, aliases_per_token))]
