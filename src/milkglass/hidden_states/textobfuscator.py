"""Pulls states to the centres of clusters of tokens, then disturbs them: TextObfuscator.

Zhou et al. 2023, Findings of ACL, section 3:

    close = mean over tokens of |h - centre(token)|^2 / d          makes tokens of one cluster similar
    away  = - mean over pairs of clusters of |m_i - m_j|^2 / d     m: means of a batch; what keeps clusters apart
    loss  = cross-entropy + gamma_close * close + gamma_away * away
    sent  = h min(1, clip d / |h|_1) + scale * Laplace(1)          h (d,): one token's state after `layer` layers

The noise is drawn exactly and added on a grid (noise/grid.py). It hides which token of a cluster was meant, and not the
cluster, which the task needs. Clusters are k-means of the public table's rows of the tokens that occur. A centre is a
running mean of its tokens' states. All tokens are treated equally.

The public code does not bound h, and its epsilon is a scale, not a budget. With `clip`, two states are at most 2 clip d
apart in L1, so replacing a whole text of t tokens costs 2 clip d t / scale. At usual settings this budget is
too large to protect anything. Any protection comes from the clusters, about which nothing is proved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from milkglass import papers
from milkglass.accounting import format_epsilon
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.halves import LowerHalf
from milkglass.hidden_states.mechanism import HalvesTraining, TrainingStep
from milkglass.hidden_states.tokens import TokenizedTexts
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.noise import clipping, grid
from milkglass.noise.grid import AddedNoise
from milkglass.noise.root import NoiseRoot, NoiseStream
from milkglass.papers import Paper
from milkglass.parameters import limited_field

KMEANS_ROUNDS = 10  # rounds of k-means
CENTRE_MOMENTUM = 0.9  # share of a centre that stays when a batch has tokens of its cluster


class Centres(torch.nn.Module):
    """Keeps the running mean of the states of each cluster's tokens.

    Attributes:
        cluster: (n,) the cluster of each public id; 0 if the training texts lack it.
        centres: (m, d) the mean state of each cluster.
        seen: (m,) whether a cluster has a mean yet.
    """

    def __init__(self, cluster: torch.Tensor, count: int, width: int) -> None:
        super().__init__()
        self.register_buffer("cluster", cluster)
        self.register_buffer("centres", torch.zeros(count, width))
        self.register_buffer("seen", torch.zeros(count, dtype=torch.bool))

    def batch_means(self, states: torch.Tensor, clusters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the means (c, d) of a batch's states (r, d) by cluster, and which clusters these are (c,).

        Args:
            clusters: (r,) the cluster of each state.
        """
        present_clusters, cluster_indices, counts = clusters.unique(return_inverse=True, return_counts=True)
        sums = states.new_zeros(len(present_clusters), states.shape[1]).index_add(0, cluster_indices, states)
        return sums / counts[:, None], present_clusters

    @torch.no_grad()
    def update(self, means: torch.Tensor, present_clusters: torch.Tensor) -> None:
        """Moves the centres of some clusters (c,) toward a batch's means (c, d)."""
        moved = CENTRE_MOMENTUM * self.centres[present_clusters] + (1 - CENTRE_MOMENTUM) * means
        self.centres[present_clusters] = torch.where(self.seen[present_clusters, None], moved, means)
        self.seen[present_clusters] = True


def attraction_loss(states: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared distance per dimension of states (r, d) from their tokens' centres (r, d)."""
    return (states - centres).square().mean()


def repulsion_loss(means: torch.Tensor) -> torch.Tensor:
    """Returns minus the mean squared distance per dimension of all pairs of means (c, d); 0 for a single mean."""
    if len(means) < 2:
        return means.sum() * 0.0
    # over all ordered pairs, |a - b|^2 adds up to 2 c^2 times the variance
    c = len(means)
    return -2 * c / (c - 1) * means.var(0, correction=0).mean()


def k_means(rows: torch.Tensor, count: int, draws: NoiseStream) -> torch.Tensor:
    """Clusters rows (r, d) by Lloyd's algorithm, from random rows as centres. An empty cluster keeps its centre.

    Args:
        rows: (r, d) the vectors.
        count: the number of clusters.
        draws: draws the rows to begin with.

    Returns:
        (r,) the cluster of each row.
    """
    centres = rows[torch.from_numpy(draws.order(len(rows))[:count])]
    nearest = torch.zeros(len(rows), dtype=torch.long)
    for _ in range(KMEANS_ROUNDS):
        nearest = (rows @ centres.T - centres.square().sum(1) / 2).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
        counts = torch.bincount(nearest, minlength=len(centres))[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return nearest


@dataclass(frozen=True)
class TextObfuscator(HiddenStateDefence):
    """Pulls states to the centres of clusters of tokens in training, and adds Laplace noise.

    Attributes:
        layer: how many layers the client runs.
        gamma_close, gamma_away: the weights of the two losses that form clusters.
        clusters: the most clusters.
        clip: the bound on a state's mean absolute coordinate. None if there is no bound.
        scale: the scale of the Laplace noise on each coordinate. 0: no noise.
        training: how the halves are trained.
    """

    layer: int | None = limited_field(3)
    gamma_close: float = limited_field(0.03)
    gamma_away: float = limited_field(0.01)
    clusters: int = limited_field(100, least=1)
    clip: float | None = limited_field(1.0, above=0)
    scale: float = limited_field(0.5)
    training: HalvesTraining = field(default_factory=lambda: HalvesTraining(batch_size=128))

    name: ClassVar[str] = "textobfuscator"
    paper: ClassVar[Paper] = papers.TEXTOBFUSCATOR.with_deviations(
        "States are bounded in L1 before the noise; without a bound no guarantee is possible.",
        "Clusters are k-means of the public table alone, for every task.",
        "Both losses are per dimension; centres are running means, not parameters.",
        "The scale of the noise is ours: the paper searches it, and ObfusLM's Table 8 does not name it.",
    )

    @property
    def guarantee(self) -> str | None:
        if self.clip is None or self.scale == 0:
            return None
        return (
            f"each text sent is e-DP for one text replaced by any other of the same length, with e = "
            f"{format_epsilon(2 * self.clip / self.scale)} x dimensions x tokens, a budget too large to be relied on; "
            "sending more adds up; nothing is claimed for the texts and labels that the halves were trained with"
        )

    @property
    def added_noise(self) -> AddedNoise | None:
        return AddedNoise("laplace", self.scale, self.clip, "row") if self.scale else None

    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        bound = None if self.clip is None else self.clip * hidden.shape[1]
        bounded = hidden if bound is None else clipping.rows_l1(hidden, bound)
        if self.scale == 0:
            return bounded.to(hidden.dtype)
        return grid.straight_through(bounded, grid.add_laplace(bounded, self.scale, draws.stream, bound)).to(
            hidden.dtype
        )

    def make_auxiliary(
        self, base: Checkpoint, lower: LowerHalf, encoded: TokenizedTexts, root: NoiseRoot
    ) -> torch.nn.Module:
        table = base.read(architecture_of(base).table).float()
        occurring = torch.from_numpy(np.unique(encoded.ids.ids))
        count = min(self.clusters, len(occurring))
        cluster = torch.zeros(len(table), dtype=torch.long)
        cluster[occurring] = k_means(table[occurring], count, root.draws("clusters"))
        return Centres(cluster, count, lower.width)

    def auxiliary_loss(self, step: TrainingStep, sent: torch.Tensor, auxiliary: torch.nn.Module) -> torch.Tensor:
        assert isinstance(auxiliary, Centres)
        states, clusters = step.hidden[step.mask], auxiliary.cluster[step.ids[step.mask]]
        means, present_clusters = auxiliary.batch_means(states, clusters)
        auxiliary.update(means.detach(), present_clusters)
        close = attraction_loss(states, auxiliary.centres[clusters])
        return self.gamma_close * close + self.gamma_away * repulsion_loss(means)
