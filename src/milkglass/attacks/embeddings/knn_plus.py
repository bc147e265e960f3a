"""Reads each id by the better of KNN and EDNN: KNN+ (Lin et al. 2025, section 6.1).

The paper prints the better of the two results, which an attacker cannot pick without the truth. This attack scrambles
the public model under a key of its own (Kerckhoffs: the scheme and its parameters are public), tries both there, and
uses the one that reads more. The choice differs from the paper's only if both are nearly equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from milkglass import papers
from milkglass.attacks.embeddings.ednn import EDNN, differences
from milkglass.attacks.embeddings.knn import KNN, NearestRows, RowFeatures, nearest
from milkglass.threat.attack import Cost
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Transcript


@dataclass(frozen=True)
class KNNPlus(NearestRows):
    """Reads each scrambled id by KNN or EDNN, whichever reads more under a key of the attacker's own.

    Attributes:
        sample: how many ids of the rehearsal are compared.
    """

    sample: int = 1000
    k: int = 10

    name = "knn+"
    title = "The better of KNN and EDNN"
    cost = Cost(2, per_trillion_products=35)
    baseline = True
    paper = papers.OBFUSLM.with_deviations("The better one is picked under the attacker's own key, not by the result.")
    assumes = frozenset({"public_model", "simulate"})

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        by_cosine, by_differences = self._rehearse(knowledge, rng)
        better: NearestRows = KNN() if by_cosine >= by_differences else EDNN()
        return better.features(transcript, knowledge, rng)

    def _rehearse(self, knowledge: Knowledge, rng: np.random.Generator) -> tuple[float, float]:
        """Returns the top-1 accuracies of KNN and EDNN on a sample of tokens, under a key of the attacker's own."""
        public = require_known(knowledge.public_model).table
        model, sigma = require_known(knowledge.simulate)(int(rng.integers(2**31)))
        tokens = rng.choice(len(public), min(self.sample, len(public)), replace=False)
        rows, expected = model.table[torch.from_numpy(sigma[tokens].astype(np.int64))], torch.from_numpy(tokens)
        cosine = nearest(rows, public, 1)[:, 0]
        differential = nearest(differences(rows), differences(public), 1, "euclidean")[:, 0]
        return float((cosine == expected).float().mean()), float((differential == expected).float().mean())
