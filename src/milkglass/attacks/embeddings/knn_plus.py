"""KNN+: the better of KNN and EDNN (Lin et al. 2025, section 6.1).

The paper prints the better of the two results, which only somebody who knows the truth can pick. An attacker picks
otherwise: it obfuscates the public model itself under a key of its own (Kerckhoffs: the scheme and its parameters are
public), tries both there, and uses what did better. The choice is the same unless the two are nearly equal.

What it does not know: how to use both at once, id by id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from milkglass import papers
from milkglass.attacks.embeddings.ednn import EDNN, differences
from milkglass.attacks.embeddings.knn import KNN, nearest, same_width
from milkglass.papers import Paper
from milkglass.threat.attack import Attack, Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Observation, Transcript, Weights


@dataclass(frozen=True)
class KNNPlus(Attack):
    """sample: how many ids of the rehearsal are compared."""

    sample: int = 1000
    k: int = 10

    name: ClassVar[str] = "knn+"
    title: ClassVar[str] = "The better of KNN and EDNN"
    paper: ClassVar[Paper] = papers.OBFUSLM.but(
        "The better one is picked under the attacker's own key, not by the result."
    )
    sees: ClassVar[frozenset[type[Observation]]] = frozenset({Weights})
    assumes: ClassVar[frozenset[str]] = frozenset({"public_model", "simulate"})

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return same_width(transcript, knowledge)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        by_cosine, by_differences = self._rehearse(knowledge, rng)
        selected: Attack = KNN(k=self.k) if by_cosine >= by_differences else EDNN(k=self.k)
        return selected.run(transcript, knowledge, budget, rng)

    def _rehearse(self, knowledge: Knowledge, rng: np.random.Generator) -> tuple[float, float]:
        """Top-1 of both over a sample of the vocabulary, under a key of the attacker's own."""
        assert knowledge.public_model is not None
        assert knowledge.simulate is not None
        public = knowledge.public_model.table
        model, sigma = knowledge.simulate(int(rng.integers(2**31)))
        tried = rng.choice(len(public), min(self.sample, len(public)), replace=False)
        rows, expected = model.table[torch.from_numpy(sigma[tried].astype(np.int64))], torch.from_numpy(tried)
        cosine = nearest(rows, public, 1)[:, 0]
        differential = nearest(differences(rows), differences(public), 1, "euclidean")[:, 0]
        return float((cosine == expected).float().mean()), float((differential == expected).float().mean())
