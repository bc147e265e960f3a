"""Turns log-likelihoods into a guess, by the best joint assignment.

Each public id of a group is used at most once. The best joint assignment (Kuhn 1955) is therefore better than the most
likely id of each row. If a token has several scrambled ids (aliases), a group has that many times as many rows as
members, and each member is used as often.
"""

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
    """Finds candidates, from which a later attack can start, and guesses by them. The base of all such attacks."""

    @abc.abstractmethod
    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        """Returns the public ids for which each scrambled id can stand, and how likely each is."""

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        return guess_by_rank(self.learn(transcript, knowledge, budget, rng), transcript.vocab_size)


def guess_by_rank(candidates: Candidates, size: int, k: int = 10) -> Guess:
    """Returns a guess (size, k): first the best joint assignment, then the row's other members, most likely first."""
    table = np.full((size, k), NO_BELIEF, np.int64)
    for group, log_likelihood in zip(candidates.groups, candidates.log_likelihoods, strict=True):
        scores = log_likelihood.copy()
        rows, columns = best_assignment(scores)
        scores[rows, columns] = np.inf
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        table[group.rows, : order.shape[1]] = group.members[order]
    return Guess(by_id=table)


def best_assignment(log_likelihood: NDArray[np.float64]) -> tuple[Ids, Ids]:
    """Returns the rows and columns of the assignment with the greatest total log-likelihood.

    Each column is taken up to `rows_per_member` times. A log-likelihood of -inf counts as very unlikely, not as
    forbidden, so that there is always an assignment.

    Args:
        log_likelihood: (r, m), for r rows and m members.
    """
    lowest = np.finfo(np.float64).min / 1e6
    member_count = log_likelihood.shape[1]
    gains = np.tile(np.maximum(log_likelihood, lowest), rows_per_member(*log_likelihood.shape))
    rows, columns = linear_sum_assignment(gains, maximize=True)
    return rows.astype(np.int64), columns.astype(np.int64) % max(member_count, 1)


def rows_per_member(row_count: int, member_count: int) -> int:
    """Returns how many rows of a group stand for each of its members."""
    return max(1, round(row_count / max(member_count, 1)))
