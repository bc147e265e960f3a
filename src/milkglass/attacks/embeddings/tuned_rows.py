"""Fine-tuned weights: rows that moved show which tokens the private texts hold, and roughly how often.

An embedding row gets a gradient only when its token is in a batch; a row that occurred nowhere only shrinks, with the
weight decay. With Adam, whose steps have about one size, a row moves further the more batches it was in. So the tuned
model alone, without a single id of the private texts, is a table of their token counts.

**Membership.** Decay multiplies every number by something below 1, and rounding, at each step and when the model is
stored, keeps the order of numbers: |x| never becomes larger and x never changes its sign. A gradient makes some numbers
of a row grow and others shrink. So the rows in which a number grew are those that occurred:

    occurred[a] = some j: |tuned[a, j]| > |uploaded[a, j]|, or they differ in sign

No tolerance is needed, whatever the decay, and no row that stood still is named. In fp32 those that occurred are found,
unless decay took more from each of a row's numbers than training gave them; a padding row gets no gradient. A table
stored in half precision misses what rounding took away: a token that moved by less than the last digit, or in a few
numbers only, all of which happened to shrink. Decay that is not decoupled (Adam with an L2 penalty) moves every row by
Adam's steps, past zero where a number is small, and then rows are named that did not occur.

**Counts.** The decay is taken out by a common factor,

    moved[a] = || tuned[a] - c uploaded[a] ||,     c the factor that fits the rows that moved least

With a tied output head every row gets a gradient from the softmax at every step; then the rows that occur still move
most, but no row stands still: all are named as members, which says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import papers
from milkglass.attacks.assignment import Solver
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Knowledge, required
from milkglass.threat.observations import Transcript, Weights


def movement(uploaded: torch.Tensor, tuned: torch.Tensor) -> NDArray[np.float64]:
    """(n,) how far each row moved, apart from a common shrinking."""
    before, after = uploaded.double(), tuned.double()
    length = (before * before).sum(1)
    factors = ((before * after).sum(1) / length.clamp_min(1e-30))[length > 0]
    apart = (after - before).norm(dim=1)
    calm = (after - before).norm(dim=1)[length > 0] <= torch.quantile(apart[length > 0][:1_000_000], 0.2)
    factor = float(factors[calm].median()) if bool(calm.any()) else 1.0
    return np.asarray((after - factor * before).norm(dim=1).numpy(), np.float64)


def members(uploaded: torch.Tensor, tuned: torch.Tensor) -> NDArray[np.bool_]:
    """(n,) which scrambled ids occurred in the training texts, from the tables (n, d) before and after: see above."""
    grew = (tuned.abs() > uploaded.abs()) | (tuned * uploaded < 0)
    return np.asarray(grew.any(dim=1).numpy(), np.bool_)


@dataclass(frozen=True)
class TunedRows(Solver):
    """Fine-tuned weights: rows that moved show which tokens the private texts hold, and roughly how often.

    Attributes:
        spread: how far movements of one count scatter, as a standard deviation of their logarithm.
    """

    spread: float = 0.7

    name = "tuned-rows"
    title = "Rows that training moved"
    paper = papers.UPDATE_LEAKAGE.but(
        "They compare two models' outputs; we compare two tables, since the server has both."
    )
    sees = frozenset({Weights})
    assumes = frozenset({"candidates", "corpus"})

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        result = _tables(transcript)
        if isinstance(result, str):
            return result
        return None if movement(*result).any() else "fine-tuning left the table unchanged"

    @staticmethod
    def members_of(transcript: Transcript) -> NDArray[np.bool_] | None:
        """(n,) which scrambled ids the private texts hold, without any other knowledge; None where the transcript does
        not hold both tables."""
        result = _tables(transcript)
        return None if isinstance(result, str) else members(*result)

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        candidates = required(knowledge.candidates)
        result = _tables(transcript)
        assert not isinstance(result, str)
        seen = standard(movement(*result))
        known = standard(required(knowledge.corpus).counts(knowledge.tokens(transcript.size)).astype(np.float64))
        likelihood = tuple(
            prior - (seen[group.rows][:, None] - known[group.members][None]) ** 2 / (2 * self.spread**2)
            for group, prior in zip(candidates.groups, candidates.likelihood, strict=True)
        )
        return Candidates(candidates.groups, likelihood)


def _tables(transcript: Transcript) -> tuple[torch.Tensor, torch.Tensor] | str:
    """The table before and after fine-tuning, or why they can't be compared."""
    before, after = transcript.weights(tuned=False), transcript.weights(tuned=True)
    if before is None or after is None:
        return "the server is not known to have the model both before and after fine-tuning"
    uploaded, tuned = before.table, after.table
    if uploaded.shape != tuned.shape:
        return f"the table is {_size(tuned)} after fine-tuning, and was {_size(uploaded)}"
    return uploaded, tuned


def _size(table: torch.Tensor) -> str:
    return f"{len(table)} x {table.shape[1]}"


def standard(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each value's rank among all as a standard normal quantile: two scales that grow together become comparable."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    return np.asarray(ndtri((rankdata(values) - 0.5) / len(values)), np.float64)
