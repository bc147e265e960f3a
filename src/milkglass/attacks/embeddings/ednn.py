"""Reads each id by the differences inside its embedding: EDNN (Lin et al. 2024, Algorithm 1).

SentinelLMs' glide-reflection adds the same number to every element of a row, since its line and its translation are
both multiples of the vector of ones. This does not change e - lshift(e), the cyclic differences. The distance is

    D[i, j] = || (x_i - lshift(x_i)) - (e_j - lshift(e_j)) ||,

the Euclidean distance between two tables of differences. One matrix product ranks all pairs, without the paper's loop
over i and j (tests/attacks/test_knn.py compares both). Against a mixture, cosines read more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from milkglass import papers
from milkglass.attacks.embeddings.knn import NearestRows, RowFeatures
from milkglass.threat.attack import Cost
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Transcript


def differences(table: torch.Tensor) -> torch.Tensor:
    """Returns e - lshift(e) for each row of (n, d): element i minus element i + 1, and the last minus the first."""
    return table - table.roll(-1, dims=1)


@dataclass(frozen=True)
class EDNN(NearestRows):
    """Reads each scrambled id as the public token with the nearest differences inside its embedding."""

    k: int = 10

    name = "ednn"
    title = "Element-wise differential nearest neighbour"
    cost = Cost(per_trillion_products=30)
    baseline = True
    paper = papers.EDNN

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        public = differences(require_known(knowledge.public_model).table)
        return RowFeatures(differences(transcript.table), public, "euclidean")  # Algorithm 1: D[i, j]
