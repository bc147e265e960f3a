"""Fine-tuned weights: rows that moved tell which tokens the private texts hold, and roughly how often.

An embedding row gets a gradient only when its token is in a batch. With Adam, whose steps have about one size, a row
moves further the more batches it was in; a row that occurred nowhere does not move at all (weight decay moves every row
by one common factor, which is taken out). So the tuned model alone, without a single id of the private texts, is a
table of their token counts: whoever is given the fine-tuned weights has membership exactly, and frequencies well enough
to match them with public ones.

    moved[a] = || tuned[a] - c uploaded[a] ||,     c the factor that fits the rows that moved least

With a tied output head every row gets a gradient from the softmax at every step; then the rows that occur still move
most, but no row stands still, and `members` says less.

What it does not know: order, texts, and the tokens themselves: it matches ranks inside the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.attacks.assignment import Solver
from milkglass.paper import Paper
from milkglass.threat import Budget, Candidates, Knowledge, Observation, Transcript, Weights


def movement(uploaded: torch.Tensor, tuned: torch.Tensor) -> NDArray[np.float64]:
    """(n,) how far each row moved, apart from a common shrinking."""
    before, after = uploaded.double(), tuned.double()
    length = (before * before).sum(1)
    factors = ((before * after).sum(1) / length.clamp_min(1e-30))[length > 0]
    apart = (after - before).norm(dim=1)
    calm = (after - before).norm(dim=1)[length > 0] <= torch.quantile(apart[length > 0][:1_000_000], 0.2)
    factor = float(factors[calm].median()) if bool(calm.any()) else 1.0
    return np.asarray((after - factor * before).norm(dim=1).numpy(), np.float64)


def members(moved: NDArray[np.float64], tolerance: float = 1e-6) -> NDArray[np.bool_]:
    """(n,) which ids occurred in the training texts: those that moved at all, where some did not.

    tolerance: of the largest movement; what lies below is rounding.
    """
    return moved > tolerance * float(moved.max(initial=0.0))


@dataclass(frozen=True)
class TunedRows(Solver):
    """spread: how far movements of one count scatter, as a standard deviation of their logarithm."""

    spread: float = 0.7

    name: ClassVar[str] = "tuned-rows"
    title: ClassVar[str] = "Rows that training moved"
    paper: ClassVar[Paper] = Paper(
        "Analyzing Information Leakage of Updates to Natural Language Models",
        "Zanella-Béguelin, Wutschitz, Tople, Rühle, Paverd, Ohrenko, Köpf, Brockschmidt",
        2020,
        "CCS",
        ("They compare two models' outputs; we compare two tables, since the server has both.",),
    )
    sees: ClassVar[frozenset[type[Observation]]] = frozenset({Weights})
    assumes: ClassVar[frozenset[str]] = frozenset({"candidates", "corpus"})

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        before, after = transcript.weights(tuned=False), transcript.weights(tuned=True)
        if before is None or after is None:
            return "the transcript holds no model both before and after fine-tuning"
        if not movement(before.table, after.table).any():
            return "fine-tuning left the table as it was"
        return None

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        assert knowledge.candidates is not None
        assert knowledge.corpus is not None
        before, after = transcript.weights(tuned=False), transcript.weights(tuned=True)
        assert before is not None
        assert after is not None
        seen = standard(movement(before.table, after.table))
        known = standard(knowledge.corpus.counts(transcript.size).astype(np.float64))
        likelihood = tuple(
            prior - (seen[group.rows][:, None] - known[group.members][None]) ** 2 / (2 * self.spread**2)
            for group, prior in zip(knowledge.candidates.groups, knowledge.candidates.likelihood, strict=True)
        )
        return Candidates(knowledge.candidates.groups, likelihood)


def standard(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each value's rank among all as a standard normal quantile: two scales that grow together become comparable."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    return np.asarray(ndtri((rankdata(values) - 0.5) / len(values)), np.float64)
