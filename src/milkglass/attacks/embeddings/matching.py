"""Matching: finds which row of a cluster is which token, from the noise that mixed it (our own attack).

**Idea.** Algorithm 2 of ObfusLM draws u'_ij = eps cos(i, j) / 2 + b_i z_j for token i of a cluster, with z_j from
Laplace(1) and b_i = (max_j cos(i, j) - min_j cos(i, j)) / 2, and mixes with w_ij = softmax_j(u'_ij). The attacker can
compute every cosine and b_i, and the cluster solve gives the weights. So the likelihood of "row r is token i" is exact.
It has two sources. A row gives slightly more weight to similar tokens, to itself most of all (eps). And, which the
paper overlooks, *the size of the noise identifies the token*: an outlier of its cluster has a larger b_i than a central
one.

**Likelihood.** Softmax loses one number, c = logsumexp(u'): log w_rj + c = u'_ij for all j. Integrated over c,

    p(w_r | i) = integral over c of prod_j exp(-|c - a_j| / b_i) / (2 b_i),    a_j = eps cos(i, j) / 2 - log w_rj.

(The change of variables from u' to c and the s - 1 ratios of weights has a constant Jacobian, so nothing is lost.)
Between two neighbouring a_j the exponent is linear in c. The integral is therefore a sum of s + 1 elementary terms, in
closed form. Groups of one size are computed together. `assignment` then takes the best joint assignment.

**Limits.** Unless eps is given (Kerckhoffs), it is estimated on a grid by the likelihood of the weights of many
clusters. At eps = 0.1 the weights hardly show it, and it hardly matters. An untied head carries the *same* W, drawn
once, so it is no second observation of the order; it helps only the cluster solve, if rounding blurred the table.
The same applies to biases. Some groups keep their likelihood: those without weights, those whose rows are no multiple
of their tokens, and those with a token that drew no noise. Two aliases of a token draw from one law, so more aliases
make the sizes of noise easier to distinguish.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import papers
from milkglass.attacks import work
from milkglass.attacks.assignment import Solver
from milkglass.errors import UsageError
from milkglass.threat.attack import Cost
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge, required
from milkglass.threat.observations import Transcript, Weights

Floats = NDArray[np.float64]

GRID = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 10.0)
BREAKPOINTS_AT_A_TIME = 2_000_000
SAMPLE_BREAKPOINTS = 1_200_000  # of which eps is estimated: 1,200 groups of 10
LIKELIHOOD_EVALUATIONS = 36  # of the likelihood, by which eps is estimated
MIN_NOISE_SCALE = 1e-9  # a smaller scale of noise is none: the tokens have one direction


@dataclass(frozen=True)
class Matching(Solver):
    """The matching attack.

    Attributes:
        epsilon: the scheme's parameter. None: it is estimated.
        floor: the least weight; noise may make a weight zero.
    """

    epsilon: float | None = None
    floor: float = 1e-5

    name = "matching"
    title = "Order inside clusters from the weights"
    cost = Cost(rows=0.07)
    paper = papers.ours("Matching: the noise of WeightSynth names its token")
    sees = frozenset({Weights})
    assumes = frozenset({"candidates", "public_model"})

    def __post_init__(self) -> None:
        if self.epsilon is not None and not 0 <= self.epsilon < float("inf"):
            raise UsageError(f"epsilon is {self.epsilon}, a number from 0 is needed", "None estimates it")

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return "all rows of a cluster are one: no order is left to be found" if knowledge.has_shared_ids else None

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        """Returns the same groups, with the likelihood of their weights added to theirs."""
        candidates, table = required(knowledge.candidates), required(knowledge.public_model).table
        groups, likelihoods = candidates.groups, list(candidates.log_likelihoods)
        usable = [number for number, group in enumerate(groups) if _usable(group)]
        epsilon = self.epsilon
        if epsilon is None and usable:
            order = rng.permutation(usable)
            cells = np.cumsum([len(groups[number].rows) * len(groups[number].members) ** 2 for number in order])
            sampled_numbers = order[: 1 + int((cells < SAMPLE_BREAKPOINTS).sum())].tolist()
            sample = _cluster_batches(groups, sampled_numbers, table, self.floor)
            epsilon = estimate(sample)
            budget.spend(LIKELIHOOD_EVALUATIONS * sum(map(_work, sample)))
        for batch in _cluster_batches(groups, usable, table, self.floor):
            if budget.left() <= 0:
                break
            budget.spend(_work(batch))
            for number, group_likelihood in zip(batch.numbers, likelihood(batch, required(epsilon)), strict=True):
                likelihoods[number] = likelihoods[number] + group_likelihood
        return Candidates(groups, tuple(likelihoods))


@dataclass(frozen=True)
class ClusterBatch:
    """g groups of s tokens.

    Attributes:
        numbers: (g,) their places in the list of groups.
        cosines: (g, s, s) of tokens i and j.
        logs: (g, r, s) the logarithm of row r's weight of token j; r is s, or a multiple of s with aliases.
    """

    numbers: list[int]
    cosines: Floats
    logs: Floats


def _work(batch: ClusterBatch) -> float:
    """Returns the work of a batch's likelihood, which is some fifteen passes over all breakpoints."""
    return work.elements(15.0 * batch.logs.size * batch.cosines.shape[1])


def _usable(group: Group) -> bool:
    return group.weights is not None and len(group.members) > 1 and len(group.rows) % len(group.members) == 0


def _cluster_batches(
    groups: tuple[Group, ...], usable: list[int], table: torch.Tensor, floor: float
) -> list[ClusterBatch]:
    """Returns the clusters of these groups in batches of one size, as many as fit in memory at a time."""
    batches = []
    sizes = np.array([(len(groups[number].rows), len(groups[number].members)) for number in usable]).reshape(-1, 2)
    for rows, size in np.unique(sizes, axis=0).tolist():
        same_size = np.array(usable)[(sizes == (rows, size)).all(1)]
        step = max(1, BREAKPOINTS_AT_A_TIME // (rows * size**2))
        for group_numbers in (same_size[at : at + step].tolist() for at in range(0, len(same_size), step)):
            members = np.stack([groups[number].members for number in group_numbers])
            unit = torch.nn.functional.normalize(table[torch.from_numpy(members)].double(), dim=2, eps=1e-30)
            weights = np.stack([np.asarray(groups[number].weights) for number in group_numbers])
            batches.append(
                ClusterBatch(group_numbers, (unit @ unit.transpose(1, 2)).numpy(), np.log(np.maximum(weights, floor)))
            )
    return batches


def likelihood(batch: ClusterBatch, epsilon: float) -> Floats:
    """Returns (g, r, s) log p(weights of row r | row r is token i), up to one constant."""
    cosines = batch.cosines
    scale = (cosines.max(2) - cosines.min(2)) / 2  # (g, i)
    a = epsilon * cosines[:, None, :, :] / 2 - batch.logs[:, :, None, :]  # (g, r, i, j)
    log_likelihood = _integral(a, np.maximum(scale, MIN_NOISE_SCALE)[:, None, :])
    log_likelihood[(scale <= MIN_NOISE_SCALE).any(1)] = 0.0  # no noise was drawn for some token: nothing can be said
    return log_likelihood


def _integral(a: Floats, b: Floats) -> Floats:
    """Returns the log of the integral over c of prod_j exp(-|c - a_j| / b) / (2 b), for a (..., s) and b (...)."""
    size = a.shape[-1]
    a = np.sort(a, axis=-1) / b[..., None]  # in units of b; dc = b dx
    total = a.sum(-1, keepdims=True)
    sums_before = np.cumsum(a, axis=-1)
    count = np.arange(1, size + 1)
    # at the breakpoint a_q: minus the sum of |a_q - a_j|
    height = -((2 * count - size) * a + total - 2 * sums_before)
    tails = np.stack([height[..., 0], height[..., -1]], -1) - np.log(size)  # the two tails fall with slope s
    width = np.diff(a, axis=-1)
    slope = np.abs(size - 2 * count[:-1])
    top = np.maximum(height[..., :-1], height[..., 1:])
    fall = slope * width
    with np.errstate(divide="ignore"):
        # the area under exp(top - slope x) for 0 <= x <= width: width (1 - exp(-fall)) / fall
        share = np.where(fall > 1e-12, -np.expm1(-fall) / np.where(fall > 1e-12, fall, 1.0), 1.0)
        between = top + np.log(width * share)
    log_terms = np.concatenate([tails, between], -1)
    largest = log_terms.max(-1)
    summed = largest + np.log(np.exp(log_terms - largest[..., None]).sum(-1))
    return summed + np.log(b) - size * np.log(2 * b)


def estimate(batches: list[ClusterBatch]) -> float:
    """Returns the eps of greatest likelihood if each row is any token of its group, by a grid refined twice."""

    def fit(epsilon: float) -> float:
        total = 0.0
        for batch in batches:
            log_likelihood = likelihood(batch, epsilon)
            largest = log_likelihood.max(2)
            total += float((largest + np.log(np.exp(log_likelihood - largest[..., None]).mean(2))).sum())
        return total

    grid = np.array(GRID)
    for _ in range(3):
        scores = [fit(float(one)) for one in grid]
        best = int(np.argmax(scores))
        low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
        if best in (0, len(grid) - 1) and len(grid) == len(GRID):
            return float(grid[best])
        grid = np.geomspace(low, high, 7)
    return float(grid[int(np.argmax([fit(float(one)) for one in grid]))])
