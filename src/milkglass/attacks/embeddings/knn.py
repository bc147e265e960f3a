"""KNN: read each scrambled id as the public token whose embedding is nearest (Qu et al. 2021).

The weakest attack of all, and the one that every paper prints. A scheme that mixes an embedding with others, or adds
noise to it, leaves it nearer to where it was than to most other places.

What it does not know: anything but one token at a time. What frequencies, neighbours and repetition give away besides
is not counted here (THREATS.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from milkglass import papers
from milkglass.papers import Paper
from milkglass.threat.attack import Attack, Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Observation, Transcript, Weights

Metric = Literal["cosine", "euclidean"]
ROWS = 512  # rows compared at a time


def nearest(
    obfuscated: torch.Tensor, public: torch.Tensor, k: int, metric: Metric = "cosine", budget: Budget | None = None
) -> torch.Tensor:
    """For each row of `obfuscated` (n, d), the `k` nearest rows of `public` (m, d): (n, k), best first, k at most m; of
    as many rows as the budget allows, from the first one on.

    One matrix product: |x - y|^2 ranks as x.y - |y|^2 / 2, since |x|^2 is the same for all y.
    """
    against = public.float()
    if metric == "cosine":
        against = torch.nn.functional.normalize(against, dim=1)
    half = (against * against).sum(1) / 2 if metric == "euclidean" else torch.zeros(len(against))
    turned = against.T.contiguous()
    result, k = [], min(k, len(against))
    for block in obfuscated.float().split(ROWS):
        if budget is not None and budget.left() <= 0:
            break
        result.append((block @ turned - half).topk(k, dim=1).indices)
    return torch.cat(result) if result else torch.empty(0, k, dtype=torch.long)


def read_off(
    transcript: Transcript, seen: torch.Tensor, known: torch.Tensor, k: int, metric: Metric, budget: Budget
) -> Guess:
    """The nearest rows of `known` for every row of `seen`. Ids that were sent come first, the commonest before the
    others: of a large vocabulary, a short budget reads those that matter."""
    order = np.argsort(-transcript.tokens.counts(transcript.size), kind="stable")
    result = nearest(seen[torch.from_numpy(order)], known, k, metric, budget).numpy()
    table = np.full((transcript.size, result.shape[1]), NO_BELIEF, np.int64)
    table[order[: len(result)]] = result
    return Guess(table=table)


def same_width(transcript: Transcript, knowledge: Knowledge) -> str | None:
    assert knowledge.public_model is not None
    seen, known = transcript.width, knowledge.public_model.width
    return None if seen == known else f"the scrambled embeddings have {seen} dimensions, the public ones {known}"


@dataclass(frozen=True)
class KNN(Attack):
    """metric: what "nearest" means. k: how many ranks the guess has."""

    metric: Metric = "cosine"
    k: int = 10

    name: ClassVar[str] = "knn"
    title: ClassVar[str] = "Nearest neighbour"
    paper: ClassVar[Paper] = papers.PRIVACY_BERT
    sees: ClassVar[frozenset[type[Observation]]] = frozenset({Weights})
    assumes: ClassVar[frozenset[str]] = frozenset({"public_model"})

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return same_width(transcript, knowledge)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        assert knowledge.public_model is not None
        return read_off(transcript, transcript.table, knowledge.public_model.table, self.k, self.metric, budget)
