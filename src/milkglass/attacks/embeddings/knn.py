"""KNN: read each scrambled id as the public token whose embedding is nearest (Qu et al. 2021).

The weakest attack of all, and the one that every paper prints. A scheme that mixes an embedding with others, or adds
noise to it, leaves it nearer to where it was than to most other places.

What it does not know: anything but one token at a time. What frequencies, neighbours and repetition give away besides
is not counted here (THREATS.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.attacks.embeddings.nearest_rows import Metric, NearestRows, RowFeatures
from milkglass.threat.knowledge import Knowledge, required
from milkglass.threat.observations import Transcript


@dataclass(frozen=True)
class KNN(NearestRows):
    """The attack that this module describes.

    Attributes:
        metric: what "nearest" means.
        k: how many ranks the guess has.
    """

    metric: Metric = "cosine"
    k: int = 10

    name = "knn"
    title = "Nearest neighbour"
    paper = papers.PRIVACY_BERT

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        return RowFeatures(transcript.table, required(knowledge.public_model).table, self.metric)
