"""Finds which row of a cluster is which token, from the noise that mixed it (our own attack).

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
once, so it is not a second observation of the order; it helps only the cluster solve, if rounding blurred the table.
The same applies to biases. Some groups keep their likelihood: those without weights, those with a number of rows that
is not a multiple of their tokens, and those with a token that drew no noise. Two aliases of a token draw from one law,
so more aliases make the sizes of noise easier to distinguish.
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
from milkglass.threat.knowledge import Candidates, Group, Knowledge, require_known
from milkglass.threat.observations import Transcript, Weights

Floats = NDArray[np.float64]

BREAKPOINTS_AT_A_TIME = 2_000_000  # numbers a_j, which a batch of groups has
EPSILON_GRID = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 10.0)
SAMPLE_BREAKPOINTS = 1_200_000  # breakpoints of the groups by which eps is estimated: 1,200 groups of 10
LIKELIHOOD_EVALUATIONS = 36  # of `estimate_epsilon`, at most: 14 values of the grid, and 7 after each refinement
MIN_NOISE_SCALE = 1e-9  # with a smaller scale there was no noise: the tokens have one direction


@dataclass(frozen=True)
class Matching(Solver):
    """Finds the order inside clusters by the likelihood of the weights that mixed them.

    Attributes:
        epsilon: the scheme's parameter. If None, it is estimated.
        floor: a smaller weight is taken as this; noise may make a weight zero.

    Raises:
        UsageError: epsilon is not a number from 0.
    """

    epsilon: float | None = None
    floor: float = 1e-5

    name = "matching"
    title = "Order inside clusters from the weights"
    cost = Cost(per_1000_rows=0.07)
    recovers_ids = True
    paper = papers.unpublished_method("Matching: the noise of WeightSynth names its token")
    sees = frozenset({Weights})
    assumes = frozenset({"candidates", "public_model"})

    def __post_init__(self) -> None:
        if self.epsilon is not None and not 0 <= self.epsilon < float("inf"):
            raise UsageError(f"epsilon is {self.epsilon}, a number from 0 is needed", "None estimates it")

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return "all rows of a cluster are one: no order is left to be found" if knowledge.has_shared_ids else None

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        """Returns the attacker's candidates, with the likelihood of the groups' weights added to their own."""
        candidates, table = require_known(knowledge.candidates), require_known(knowledge.public_model).table
        groups, log_likelihoods = candidates.groups, list(candidates.log_likelihoods)
        usable = [index for index, group in enumerate(groups) if _is_usable(group)]
        epsilon = self.epsilon
        if epsilon is None and usable:
            order = rng.permutation(usable)
            breakpoints = np.cumsum([len(groups[index].rows) * len(groups[index].members) ** 2 for index in order])
            sampled = order[: 1 + int((breakpoints < SAMPLE_BREAKPOINTS).sum())].tolist()
            sample = _cluster_batches(groups, sampled, table, self.floor)
            epsilon = estimate_epsilon(sample)
            budget.spend(LIKELIHOOD_EVALUATIONS * sum(map(_work, sample)))
        for batch in _cluster_batches(groups, usable, table, self.floor):
            if budget.left() <= 0:
                break
            budget.spend(_work(batch))
            batch_likelihoods = log_likelihood(batch, require_known(epsilon))
            for index, group_likelihood in zip(batch.indices, batch_likelihoods, strict=True):
                log_likelihoods[index] = log_likelihoods[index] + group_likelihood
        return Candidates(groups, tuple(log_likelihoods))


@dataclass(frozen=True)
class ClusterBatch:
    """Holds g groups of s tokens and r rows each, whose likelihoods are computed together.

    Attributes:
        indices: the indices of the groups in the list of all groups.
        cosines: (g, s, s) the cosines of tokens i and j.
        log_weights: (g, r, s) the log weight of token j in each row; r is s, or a multiple of s with aliases.
    """

    indices: list[int]
    cosines: Floats
    log_weights: Floats


def _work(batch: ClusterBatch) -> float:
    """Returns the work of a batch's likelihood, which is some fifteen passes over all breakpoints."""
    return work.elements(15.0 * batch.log_weights.size * batch.cosines.shape[1])


def _is_usable(group: Group) -> bool:
    """Returns whether a group has weights, several tokens, and equally many rows for each of them."""
    return group.weights is not None and len(group.members) > 1 and len(group.rows) % len(group.members) == 0


def _cluster_batches(
    groups: tuple[Group, ...], indices: list[int], table: torch.Tensor, floor: float
) -> list[ClusterBatch]:
    """Returns the groups with these indices in batches of one size, as many as fit in memory at a time."""
    batches = []
    sizes = np.array([(len(groups[index].rows), len(groups[index].members)) for index in indices]).reshape(-1, 2)
    for row_count, size in np.unique(sizes, axis=0).tolist():
        same_size = np.array(indices)[(sizes == (row_count, size)).all(1)]
        step = max(1, BREAKPOINTS_AT_A_TIME // (row_count * size**2))
        for batch_indices in (same_size[start : start + step].tolist() for start in range(0, len(same_size), step)):
            members = np.stack([groups[index].members for index in batch_indices])
            unit = torch.nn.functional.normalize(table[torch.from_numpy(members)].double(), dim=2, eps=1e-30)
            weights = np.stack([np.asarray(groups[index].weights) for index in batch_indices])
            batches.append(
                ClusterBatch(batch_indices, (unit @ unit.transpose(1, 2)).numpy(), np.log(np.maximum(weights, floor)))
            )
    return batches


def log_likelihood(batch: ClusterBatch, epsilon: float) -> Floats:
    """Returns (g, r, s) log p(weights of row r | row r is token i), up to one constant."""
    cosines = batch.cosines
    scale = (cosines.max(2) - cosines.min(2)) / 2  # (g, i)
    a = epsilon * cosines[:, None, :, :] / 2 - batch.log_weights[:, :, None, :]  # (g, r, i, j)
    values = _log_integral(a, np.maximum(scale, MIN_NOISE_SCALE)[:, None, :])
    values[(scale <= MIN_NOISE_SCALE).any(1)] = 0.0  # a token drew no noise: nothing can be said
    return values


def _log_integral(a: Floats, b: Floats) -> Floats:
    """Returns the log of the integral over c of prod_j exp(-|c - a_j| / b) / (2 b), for a (..., s) and b (...)."""
    size = a.shape[-1]
    a = np.sort(a, axis=-1) / b[..., None]  # in units of b; dc = b dx
    total = a.sum(-1, keepdims=True)
    running_sums = np.cumsum(a, axis=-1)
    count = np.arange(1, size + 1)
    # at the breakpoint a_q: minus the sum of |a_q - a_j|
    height = -((2 * count - size) * a + total - 2 * running_sums)
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
    log_sum = largest + np.log(np.exp(log_terms - largest[..., None]).sum(-1))
    return log_sum + np.log(b) - size * np.log(2 * b)


def estimate_epsilon(batches: list[ClusterBatch]) -> float:
    """Returns the eps of greatest likelihood if each row is any token of its group, by a grid refined three times.

    At either end of the first grid nothing is refined.
    """

    def total_log_likelihood(epsilon: float) -> float:
        total = 0.0
        for batch in batches:
            values = log_likelihood(batch, epsilon)
            largest = values.max(2)
            total += float((largest + np.log(np.exp(values - largest[..., None]).mean(2))).sum())
        return total

    grid = np.array(EPSILON_GRID)
    for _ in range(3):
        scores = [total_log_likelihood(float(value)) for value in grid]
        best = int(np.argmax(scores))
        low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
        if best in (0, len(grid) - 1) and len(grid) == len(EPSILON_GRID):
            return float(grid[best])
        grid = np.geomspace(low, high, 7)
    return float(grid[int(np.argmax([total_log_likelihood(float(value)) for value in grid]))])
