"""Finds which tokens the private texts contain, and roughly how often, from the embedding rows that fine-tuning moved.

An embedding row gets a gradient only if its token is in a batch. The row of a token that never occurs only shrinks with
the weight decay. Adam's steps have about one size, so a row moves further the more batches contain its token. The table
before and after tuning, without any private id, therefore gives approximate token counts, unless the head is tied.

**Membership.** Weight decay multiplies every number by a factor below 1. Rounding, at each step and when the model is
stored, keeps the order of numbers. So without a gradient |x| never grows and x never changes its sign. A gradient makes
some numbers of a row grow and others shrink. The rows in which a number grew are those that occurred:

    occurred[a] = some j: |tuned[a, j]| > |uploaded[a, j]|, or they differ in sign

This needs no tolerance, whatever the decay, and names no row that stood still. In fp32 the test finds every token that
occurred, unless decay took more from each of a row's numbers than training added; a padding row gets no gradient. A
table in half precision loses small movements to rounding: it misses a token whose row moved by less than the last
digit, or whose few changed numbers all shrank. Decay that is not decoupled (Adam with an L2 penalty) moves every row by
Adam's steps, past zero if a number is small; then rows are named that did not occur.

**Counts.** A common factor takes the decay out,

    moved[a] = || tuned[a] - c uploaded[a] ||,     c the factor that fits the rows that moved least

With a tied output head every row gets a gradient from the softmax at every step. The rows that occur still move most,
but all rows are named as members, which says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import papers
from milkglass.attacks.assignment import Solver
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Knowledge, require_known
from milkglass.threat.observations import Transcript, Weights

MAX_QUANTILE_ROWS = 1_000_000  # rows of which torch computes a quantile
LEAST_MOVED_SHARE = 0.2  # the common factor is fitted to this share of the rows, those that moved least


def movement(uploaded: torch.Tensor, tuned: torch.Tensor) -> NDArray[np.float64]:
    """Returns (n,) how far each row moved between two tables (n, d), apart from a common shrinking by decay."""
    old, new = uploaded.double(), tuned.double()
    square = (old * old).sum(1)
    factors = ((old * new).sum(1) / square.clamp_min(1e-30))[square > 0]
    distances = (new - old).norm(dim=1)[square > 0]
    moved_least = distances <= torch.quantile(distances[:MAX_QUANTILE_ROWS], LEAST_MOVED_SHARE)
    factor = float(factors[moved_least].median()) if bool(moved_least.any()) else 1.0
    return np.asarray((new - factor * old).norm(dim=1).numpy(), np.float64)


def occurring_rows(uploaded: torch.Tensor, tuned: torch.Tensor) -> NDArray[np.bool_]:
    """Returns (n,) whether each scrambled id occurred in training, by the table (n, d) before and after it."""
    grew = (tuned.abs() > uploaded.abs()) | (tuned * uploaded < 0)
    return np.asarray(grew.any(dim=1).numpy(), np.bool_)


@dataclass(frozen=True)
class TunedRows(Solver):
    """Matches how far rows moved in training with how often public text has their candidates.

    Attributes:
        spread: the standard deviation of the difference between a row's normal score of movement and its candidate's
            normal score of frequency.
    """

    spread: float = 0.7

    name = "tuned-rows"
    title = "Rows that training moved"
    paper = papers.UPDATE_LEAKAGE.with_deviations(
        "They compare two models' outputs; we compare two tables, since the server has both."
    )
    sees = frozenset({Weights})
    assumes = frozenset({"candidates", "corpus"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        tables = _tables(transcript)
        if isinstance(tables, str):
            return tables
        return None if movement(*tables).any() else "fine-tuning left the table unchanged"

    @staticmethod
    def occurring_ids(transcript: Transcript) -> NDArray[np.bool_] | None:
        """Returns (n,) whether the private texts contain each scrambled id, or None without two tables of one shape."""
        tables = _tables(transcript)
        return None if isinstance(tables, str) else occurring_rows(*tables)

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        candidates = require_known(knowledge.candidates)
        tables = _tables(transcript)
        assert not isinstance(tables, str)
        movement_scores = normal_scores(movement(*tables))
        count_scores = normal_scores(
            require_known(knowledge.corpus).counts(knowledge.token_count(transcript.vocab_size))
        )
        log_likelihoods = tuple(
            prior
            - (movement_scores[group.rows][:, None] - count_scores[group.members][None]) ** 2 / (2 * self.spread**2)
            for group, prior in zip(candidates.groups, candidates.log_likelihoods, strict=True)
        )
        return Candidates(candidates.groups, log_likelihoods)


def _tables(transcript: Transcript) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Returns the table before and after fine-tuning, or why they cannot be compared."""
    uploaded_model, tuned_model = transcript.last_model(tuned=False), transcript.last_model(tuned=True)
    if uploaded_model is None or tuned_model is None:
        return "the server is not known to have the model both before and after fine-tuning"
    uploaded, tuned = uploaded_model.table, tuned_model.table
    if uploaded.shape != tuned.shape:
        return f"the table is {_shape_text(tuned)} after fine-tuning, and was {_shape_text(uploaded)}"
    return uploaded, tuned


def _shape_text(table: torch.Tensor) -> str:
    """Returns the shape of a table in words."""
    return f"{len(table)} x {table.shape[1]}"


def normal_scores(values: NDArray[Any]) -> NDArray[np.float64]:
    """Returns each value's rank as a standard normal quantile. Two scales that grow together become comparable."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    return np.asarray(ndtri((rankdata(values) - 0.5) / len(values)), np.float64)
