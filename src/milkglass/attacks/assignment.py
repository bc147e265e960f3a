"""From likelihoods to a guess: within a group every public id is used at most once, so the best assignment as a whole
(Kuhn 1955) beats each row's own favourite. Where a token has r scrambled ids, a group has r times as many rows as
members, and each member is used r times."""

from __future__ import annotations

import abc

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Transcript


class Solver(Attack):
    """An attack that works out candidates: a later attack that is given them starts from there."""

    @abc.abstractmethod
    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates: ...

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        return ranked(self.learn(transcript, knowledge, budget, rng), transcript.size)


def ranked(candidates: Candidates, size: int, k: int = 10) -> Guess:
    """(size, k) public ids: first the jointly best assignment, then each row's others, likeliest first."""
    table = np.full((size, k), NO_BELIEF, np.int64)
    for group, likelihood in zip(candidates.groups, candidates.likelihood, strict=True):
        scores = likelihood.copy()
        rows, columns = best(scores)
        scores[rows, columns] = np.inf
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        table[group.rows, : order.shape[1]] = group.members[order]
    return Guess(table=table)


def best(likelihood: NDArray[np.float64]) -> tuple[Ids, Ids]:
    """Rows and columns of the assignment of greatest total likelihood, for any (r, m), a column taken `copies` times;
    -inf is very unlikely, not forbidden, so that there is always an answer."""
    worst = np.finfo(np.float64).min / 1e6
    members = likelihood.shape[1]
    wide = np.tile(np.maximum(likelihood, worst), copies(*likelihood.shape))
    rows, columns = linear_sum_assignment(wide, maximize=True)
    return rows.astype(np.int64), columns.astype(np.int64) % max(members, 1)


def copies(rows: int, members: int) -> int:
    """How many rows of a group each of its members has."""
    return max(1, round(rows / max(members, 1)))
