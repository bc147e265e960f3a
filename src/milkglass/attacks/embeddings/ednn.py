"""EDNN: nearest neighbour on the differences inside an embedding (Lin et al. 2024, Algorithm 1).

SentinelLMs' glide-reflection adds to every element of a row the same number, for its line and its translation are
both multiples of the vector of ones. What it does not touch is e - lshift(e), the cyclic differences. The distance is

    D[i, j] = || (x_i - lshift(x_i)) - (e_j - lshift(e_j)) ||,

which is the Euclidean distance between two tables of differences: one matrix product ranks all pairs, and no loop over
i and j is needed (tests/attacks/test_knn.py compares with the loop).

What this attack does not know: anything but one row at a time. Against a mixture it is worse than cosines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from milkglass import papers
from milkglass.attacks.embeddings.knn import read_off, same_width
from milkglass.papers import Paper
from milkglass.threat.attack import Attack, Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Observation, Transcript, Weights


def differences(table: torch.Tensor) -> torch.Tensor:
    """e - lshift(e) for each row of (n, d): element i minus element i + 1, the last minus the first."""
    return table - table.roll(-1, dims=1)


@dataclass(frozen=True)
class EDNN(Attack):
    """k: how many ranks the guess has."""

    k: int = 10

    name: ClassVar[str] = "ednn"
    title: ClassVar[str] = "Element-wise differential nearest neighbour"
    paper: ClassVar[Paper] = papers.EDNN
    sees: ClassVar[frozenset[type[Observation]]] = frozenset({Weights})
    assumes: ClassVar[frozenset[str]] = frozenset({"public_model"})

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return same_width(transcript, knowledge)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        assert knowledge.public_model is not None
        seen, known = differences(transcript.table), differences(knowledge.public_model.table)
        return read_off(transcript, seen, known, self.k, "euclidean", budget)
