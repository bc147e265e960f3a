"""Reads each scrambled id as the public token whose embedding is nearest (Qu et al. 2021).

This is the baseline of attacks on embeddings. A scheme that mixes an embedding with others, or adds noise to
it, mostly leaves it near its old place. The attack uses no frequencies and no neighbours in the text.

`NearestRows` is the base of all attacks that compare rows, by any features.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milkglass import device, papers
from milkglass.attacks import work
from milkglass.nearest.select import Metric
from milkglass.nearest.top_k import ExactIndex
from milkglass.threat.attack import Attack, Cost
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Transcript, Weights

ROWS_AT_A_TIME = 512  # rows compared at a time


@dataclass(frozen=True)
class RowFeatures:
    """Holds the features that are compared.

    Attributes:
        scrambled: (n', f) the features of the scrambled rows.
        public: (n, f) the features of the public rows.
        metric: compares them.
    """

    scrambled: Tensor
    public: Tensor
    metric: Metric


class NearestRows(Attack):
    """Reads each scrambled id as the public token with the nearest `features`.

    Attributes:
        k: the number of ranks of the guess.
    """

    sees = frozenset({Weights})
    recovers_ids = True
    assumes = frozenset({"public_model"})
    k: int

    @abc.abstractmethod
    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        """Returns what is compared of the scrambled and the public rows."""

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return why_other_width(transcript, knowledge)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        """Compares the most frequent ids first, so that a short budget reads those."""
        rows = self.features(transcript, knowledge, rng)
        order = np.argsort(-transcript.tokens.counts(transcript.vocab_size), kind="stable")
        nearest_rows = nearest(
            rows.scrambled[torch.from_numpy(order)], rows.public, self.k, rows.metric, budget
        ).numpy()
        table = np.full((transcript.vocab_size, nearest_rows.shape[1]), NO_BELIEF, np.int64)
        table[order[: len(nearest_rows)]] = nearest_rows
        return Guess(by_id=table)


def nearest(rows: Tensor, public: Tensor, k: int, metric: Metric = "cosine", budget: Budget | None = None) -> Tensor:
    """Returns (n, k) the indices of the public rows nearest to each row, best first, on the CPU.

    Args:
        rows: (n, d).
        public: (m, d).
        k: how many public rows are listed.
        metric: what "nearest" means.
        budget: if it ends, the last rows are left out. None: there is no limit.
    """
    index = ExactIndex.of(device.move(public), metric, k)
    nearest_rows = []
    for block in rows.split(ROWS_AT_A_TIME):
        if budget is not None:
            if budget.left() <= 0:
                break
            budget.spend(work.comparisons(block, public))
        nearest_rows.append(index.top_k(block, k).rows.cpu())
    return torch.cat(nearest_rows) if nearest_rows else torch.empty(0, min(k, len(public)), dtype=torch.long)


def why_other_width(transcript: Transcript, knowledge: Knowledge) -> str | None:
    """Returns why the rows of both sides cannot be compared, or None if they have one width."""
    scrambled, public = transcript.model.width, require_known(knowledge.public_model).width
    if scrambled == public:
        return None
    return f"the scrambled embeddings have {scrambled} dimensions, the public ones {public}"


@dataclass(frozen=True)
class KNN(NearestRows):
    """Reads each scrambled id as the public token with the nearest embedding."""

    metric: Metric = "cosine"
    k: int = 10

    name = "knn"
    title = "Nearest neighbour"
    cost = Cost(per_trillion_products=30)
    baseline = True
    paper = papers.PRIVACY_BERT

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        return RowFeatures(transcript.table, require_known(knowledge.public_model).table, self.metric)
