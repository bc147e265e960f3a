"""EDNN: nearest neighbour on the differences inside an embedding (Lin et al. 2024, Algorithm 1).

SentinelLMs' glide-reflection adds to every element of a row the same number, for its line and its translation are
both multiples of the vector of ones. What it does not touch is e - lshift(e), the cyclic differences. The distance is

    D[i, j] = || (x_i - lshift(x_i)) - (e_j - lshift(e_j)) ||,

which is the Euclidean distance between two tables of differences: one matrix product ranks all pairs, and no loop over
i and j is needed (tests/attacks/test_knn.py compares with the loop).

Against a mixture it is worse than cosines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from milkglass import papers
from milkglass.attacks.embeddings.knn import NearestRows, RowFeatures
from milkglass.threat.attack import Cost
from milkglass.threat.knowledge import Knowledge, required
from milkglass.threat.observations import Transcript


def differences(table: torch.Tensor) -> torch.Tensor:
    """e - lshift(e) for each row of (n, d): element i minus element i + 1, the last minus the first."""
    return table - table.roll(-1, dims=1)


@dataclass(frozen=True)
class EDNN(NearestRows):
    """EDNN: nearest neighbour on the differences inside an embedding (Lin et al. 2024, Algorithm 1).

    Attributes:
        k: how many ranks the guess has.
    """

    k: int = 10

    name = "ednn"
    title = "Element-wise differential nearest neighbour"
    cost = Cost(table=30)
    baseline = True
    paper = papers.EDNN

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        public = differences(required(knowledge.public_model).table)
        return RowFeatures(differences(transcript.table), public, "euclidean")  # Algorithm 1: D[i, j]
