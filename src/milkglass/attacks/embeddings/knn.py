"""KNN: read each scrambled id as the public token whose embedding is nearest (Qu et al. 2021).

The weakest attack of all, and the one that every paper prints. A scheme that mixes an embedding with others, or adds
noise to it, leaves it nearer to where it was than to most other places.

What frequencies, neighbours and repetition give away besides is not counted here (THREATS.md).

`NearestRows` is the base of all attacks that read ids so, with other features of a row.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milkglass import papers
from milkglass.nearest.similarities import Metric
from milkglass.nearest.top_k import ExactIndex
from milkglass.threat.attack import Attack, Cost
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, required
from milkglass.threat.observations import Transcript, Weights

ROWS_AT_A_TIME = 512  # rows compared at a time


@dataclass(frozen=True)
class RowFeatures:
    """What is compared.

    Attributes:
        seen: (n', f) of the scrambled rows.
        public: (n, f) of the public rows.
        metric: what "nearest" means.
    """

    seen: Tensor
    public: Tensor
    metric: Metric


class NearestRows(Attack):
    """An attack that reads each scrambled id as the public token with the nearest features. Authors write `features`.

    Attributes:
        k: how many ranks the guess has.
    """

    sees = frozenset({Weights})
    assumes = frozenset({"public_model"})
    k: int

    @abc.abstractmethod
    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures: ...

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return same_width(transcript, knowledge)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        """Ids that were sent come first, the commonest before the others: of a large vocabulary, a short budget reads
        those that matter."""
        rows = self.features(transcript, knowledge, rng)
        order = np.argsort(-transcript.tokens.counts(transcript.size), kind="stable")
        result = nearest(rows.seen[torch.from_numpy(order)], rows.public, self.k, rows.metric, budget).numpy()
        table = np.full((transcript.size, result.shape[1]), NO_BELIEF, np.int64)
        table[order[: len(result)]] = result
        return Guess(table=table)


def nearest(seen: Tensor, public: Tensor, k: int, metric: Metric = "cosine", budget: Budget | None = None) -> Tensor:
    """For each row of `seen` (n, d), the `k` nearest rows of `public` (m, d): (n, k), best first, k at most m; of as
    many rows as the budget allows, from the first one on."""
    index = ExactIndex.of(public, metric, k)
    result = []
    for block in seen.split(ROWS_AT_A_TIME):
        if budget is not None and budget.left() <= 0:
            break
        result.append(index.top_k(block, k).rows)
    return torch.cat(result) if result else torch.empty(0, min(k, len(public)), dtype=torch.long)


def same_width(transcript: Transcript, knowledge: Knowledge) -> str | None:
    """Why rows cannot be compared; None: they can."""
    seen, public = transcript.model.width, required(knowledge.public_model).width
    return None if seen == public else f"the scrambled embeddings have {seen} dimensions, the public ones {public}"


@dataclass(frozen=True)
class KNN(NearestRows):
    """KNN: read each scrambled id as the public token whose embedding is nearest (Qu et al. 2021).

    Attributes:
        metric: what "nearest" means.
        k: how many ranks the guess has.
    """

    metric: Metric = "cosine"
    k: int = 10

    name = "knn"
    title = "Nearest neighbour"
    cost = Cost(table=30)
    baseline = True
    paper = papers.PRIVACY_BERT

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        return RowFeatures(transcript.table, required(knowledge.public_model).table, self.metric)
