"""Solves a substitution by an annealed mean field: every id receives messages from its neighbours, again and again.

decipherment.py has the formula. `settle` works inside groups of candidates, `settle_all` without.

All that does not change between sweeps is computed once: the public bigrams that a scrambled one could be, and their
counts over what chance would give. A sweep is then, for each direction, a logarithm and two `bincount`s (`settle`) or
two sparse products (`settle_all`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from milkglass import device
from milkglass.attacks import work
from milkglass.attacks.token_ids.decipherment.bigrams import (
    Floats,
    FrequencyFit,
    PairCounts,
    PublicPairCounts,
    sum_by_index,
)
from milkglass.attacks.token_ids.decipherment.block_assignment import (
    SINKHORN_ROUNDS,
    BigramJoin,
    BlockAssignment,
    Ratios,
)
from milkglass.sequences import Ids

AnnealedRange = tuple[float, float]  # a value in the first sweep and in the last; geometric in between
SoftAssignment = NDArray[np.float32]
SweepCallback = Callable[[float, float], bool]  # takes the share done and a sweep's work; returns whether to go on


@dataclass(frozen=True)
class Schedule:
    """Sets how the mean field is annealed.

    Attributes:
        sweeps: how often every id receives messages.
        doubt: rho, the share of neighbours that are misread.
        temperature: divides the scores when they become beliefs.
        inertia: the weight of the last sweep's belief.
    """

    sweeps: int
    doubt: AnnealedRange
    temperature: AnnealedRange
    inertia: float


def interpolate(pair: AnnealedRange, share: float) -> float:
    """Returns the value of a range after this share of the sweeps."""
    return float(pair[0] * (pair[1] / pair[0]) ** share)


class Message:
    """Computes what the neighbours at one distance and side say about each reading.

    For a slot, P(neighbour | reading) / P(neighbour) = base (floor + sum over its hits of belief * strength).

    Attributes:
        slot, neighbour, strength: for each hit its slot, the neighbour's cell, and its strength.
        cell: for each slot the cell about which it says something.
        slot_weight: for each slot how often its bigram occurs, times the weight of the distance.
        base, floor: for each slot, as in this formula.
    """

    def __init__(
        self,
        blocks: BlockAssignment,
        join: BigramJoin,
        side: int,
        public: PublicPairCounts,
        alpha: float,
        ratios: Ratios | None,
        weight: float,
    ) -> None:
        other_side = 1 - side
        self.slot, self.neighbour = join.hit_slot[side], join.hit_cell[other_side]
        self.strength = join.hit_counts / (alpha * public.share[blocks.member_of_cell[self.neighbour]])
        self.cell, self.slot_weight = join.slot_cell[side], join.counts[join.slot_edge[side]]
        self.slot_weight *= weight
        self.base = public.counts[blocks.member_of_cell[self.cell]]
        self.base += alpha
        np.divide(alpha, self.base, out=self.base)
        self.floor: NDArray[np.float32] | float = 1.0
        if ratios is not None:
            neighbour_groups = blocks.group_of_row[join.ends[other_side]][join.slot_edge[side]]
            self.floor = ratios.at(blocks.member_of_cell[self.cell], neighbour_groups)

    def evidence(self, belief: Floats, doubt: float) -> Floats:
        """Returns (cells,) the evidence of the neighbours for each reading.

        It is the sum over neighbours of count * log(rho + (1 - rho) P(neighbour | reading) / P(neighbour)).
        Works in place, since a long text has ten million slots.
        """
        if device.on_gpu():
            return self._on_gpu(belief, doubt)
        ratio = sum_by_index(self.slot, belief[self.neighbour] * self.strength, len(self.cell))
        ratio += self.floor
        ratio *= self.base
        ratio *= 1 - doubt
        ratio += doubt
        evidence = np.log(ratio, out=ratio)
        evidence *= self.slot_weight
        return sum_by_index(self.cell, evidence, len(belief))

    @cached_property
    def _device_arrays(self) -> tuple[torch.Tensor, ...]:
        arrays = (
            self.slot,
            self.neighbour,
            self.strength,
            self.cell,
            self.slot_weight,
            self.base,
            np.asarray(self.floor),
        )
        return tuple(device.tensor(array) for array in arrays)

    def _on_gpu(self, belief: Floats, doubt: float) -> Floats:
        """Returns the evidence from the GPU, where sums have no fixed order: equal up to rounding in fp64."""
        slot, neighbour, strength, cell, slot_weight, base, floor = self._device_arrays
        beliefs = device.tensor(belief)
        ratio = beliefs.new_zeros(len(cell)).index_add_(0, slot, beliefs[neighbour] * strength)
        evidence = ratio.add_(floor).mul_(base).mul_(1 - doubt).add_(doubt).log_().mul_(slot_weight)
        return device.array(torch.zeros_like(beliefs).index_add_(0, cell, evidence))


def messages_of(
    blocks: BlockAssignment,
    scrambled_pairs: Mapping[int, PairCounts],
    public: PublicPairCounts,
    alpha: float,
    weights: Mapping[int, float],
    ratios: Mapping[tuple[int, int], Ratios],
) -> list[Message]:
    """Returns two messages for each distance, one from either side.

    Args:
        blocks: the cells.
        scrambled_pairs: the counts of pairs of scrambled ids, by distance.
        public: what the attacker's text shows.
        alpha: the pseudo-counts that smooth public bigrams.
        weights: the weight of each distance. A distance with weight 0 has no message.
        ratios: from `Profiles.ratios`; empty if embeddings are not used.
    """
    messages = []
    for distance, weight in weights.items():
        if weight:
            join = BigramJoin(blocks, scrambled_pairs[distance], public.pairs[distance])
            messages += [
                Message(blocks, join, side, public, alpha, ratios.get((distance, side)), weight) for side in (0, 1)
            ]
    return messages


def settle(
    blocks: BlockAssignment,
    prior: Floats,
    messages: list[Message],
    damping: Floats,
    schedule: Schedule,
    report_sweep: SweepCallback,
) -> Floats:
    """Returns (cells,) the scores after all sweeps: log-posteriors up to a constant for each row.

    Args:
        blocks: the cells.
        prior: (cells,) log-likelihoods from other sources.
        messages: from `messages_of`.
        damping: (cells,) the factor of the evidence, from 0 to 1.
        schedule: how many sweeps there are, and how they are annealed.
        report_sweep: is called after each sweep.
    """
    scores = prior
    element_count = 3 * SINKHORN_ROUNDS * len(prior)
    element_count += sum(3 * len(message.slot) + 6 * len(message.cell) for message in messages)
    belief = blocks.balance(prior, schedule.temperature[0])
    for sweep in range(schedule.sweeps):
        share = sweep / max(schedule.sweeps - 1, 1)
        doubt = interpolate(schedule.doubt, share)
        evidence = np.zeros(len(prior))
        for message in messages:
            evidence += message.evidence(belief, doubt)
        scores = prior + damping * evidence
        new_belief = blocks.balance(scores, interpolate(schedule.temperature, share))
        belief = schedule.inertia * belief + (1 - schedule.inertia) * new_belief
        if not report_sweep((sweep + 1) / schedule.sweeps, work.elements(element_count)):
            break
    return scores


@dataclass(frozen=True)
class GrowthSchedule:
    """Sets how the matrix of `settle_all` grows, and how it is annealed.

    Attributes:
        sizes, sweeps: the number of ids at each stage, and of sweeps there.
        spare, margin: k ids are compared with `spare` k + `margin` public tokens; aliases of a token count as one id.
        tau, patience, doubt, temperature, alpha, second, inertia: as in Decipherment.
    """

    sizes: tuple[int, ...] = (60, 150, 400, 1000, 2500)
    sweeps: tuple[int, ...] = (20, 15, 12, 10, 8)
    spare: float = 1.5
    margin: int = 60
    tau: AnnealedRange = (0.3, 0.5)
    patience: AnnealedRange = (15.0, 40.0)
    doubt: AnnealedRange = (0.5, 0.2)
    temperature: AnnealedRange = (1.5, 0.7)
    alpha: float = 3.0
    second: float = 0.5
    inertia: float = 0.3


@dataclass(frozen=True)
class MeanFieldState:
    """Holds what is believed so far.

    Attributes:
        rows: (K,) the scrambled ids that were taken in.
        columns: (C,) the public ids that were taken in.
        belief: (K, C) the probability that each row is each column.
    """

    rows: Ids
    columns: Ids
    belief: SoftAssignment


@dataclass(frozen=True)
class _BigramEvidence:
    """Computes the evidence of bigrams of one distance in one direction, among K ids, C tokens and p known pairs.

    Attributes:
        edges: (K, K + p) how often each scrambled id has each neighbour.
        strengths: (C, C + p) the public counts of tokens and their neighbours, over alpha times the neighbour's share.
        weight: how much these bigrams count.
    """

    edges: sp.csr_matrix
    strengths: sp.csr_matrix
    weight: float

    def evidence(self, belief: SoftAssignment, base: SoftAssignment, doubt: float) -> SoftAssignment:
        """Returns (K, C) the evidence of the neighbours, by a belief (K + p, C + p)."""
        if device.on_gpu():
            return self._on_gpu(belief, base, doubt)
        ratio = (self.strengths @ np.ascontiguousarray(belief.T)).T  # (K + p, C)
        ratio += 1
        ratio *= (1 - doubt) * base
        ratio += doubt
        return self.edges @ np.ascontiguousarray(np.log(ratio))

    @cached_property
    def _device_arrays(self) -> tuple[torch.Tensor, torch.Tensor]:
        return device.tensor(self.edges.toarray()), device.tensor(self.strengths.toarray())

    def _on_gpu(self, belief: SoftAssignment, base: SoftAssignment, doubt: float) -> SoftAssignment:
        """Returns the evidence from the GPU, which multiplies these matrices sooner than it skips their zeros."""
        edges, strengths = self._device_arrays
        ratio = (device.tensor(belief) @ strengths.T).add_(1).mul_((1 - doubt) * device.tensor(base)).add_(doubt)
        return device.array(edges @ ratio.log_())


def settle_all(
    scrambled_counts: NDArray[np.float64],
    scrambled_pairs: dict[int, PairCounts],
    public: PublicPairCounts,
    known_pairs: Ids,
    growth: GrowthSchedule,
    report_sweep: SweepCallback,
    alias_count: int,
) -> MeanFieldState | None:
    """Returns the belief without candidates, where any frequent id may stand for any frequent token.

    Comparing all ids at once is too expensive, and too soft at first to converge. So the matrix grows: the most
    frequent ids settle first, on frequency and on each other, and then serve as context for rarer ones.

    Args:
        scrambled_counts: (n',) how often each scrambled id occurs.
        scrambled_pairs: the counts of pairs of scrambled ids, by distance.
        public: what the attacker's text shows.
        known_pairs: (p, 2) scrambled ids that are known, each with its public id.
        growth: the stages, and how they are annealed.
        report_sweep: is called after each sweep.
        alias_count: how many scrambled ids each token has.

    Returns:
        The belief, or None if every id that occurs is known.
    """
    known_tokens, known_counts = np.unique(known_pairs[:, 1], return_counts=True)
    used_up = known_tokens[known_counts >= alias_count]
    free_rows = np.setdiff1d(np.flatnonzero(scrambled_counts), known_pairs[:, 0])
    free_columns = np.setdiff1d(np.arange(len(public.share)), used_up)
    rows_by_count = free_rows[np.argsort(-scrambled_counts[free_rows], kind="stable")]
    columns_by_share = free_columns[np.argsort(-public.share[free_columns], kind="stable")]
    fit = FrequencyFit(scrambled_counts, public, free_rows, free_columns, alias_count)
    if not len(rows_by_count):
        return None
    stages = [min(k, len(rows_by_count)) for k in growth.sizes]
    stages = stages[: 1 + next((i for i, k in enumerate(stages) if k == len(rows_by_count)), len(stages))]
    total, sweeps_done = sum(growth.sweeps[: len(stages)]), 0
    context, state = _SweepContext(public, fit, growth, alias_count), None
    for k, sweeps in zip(stages, growth.sweeps, strict=False):
        rows = rows_by_count[:k]
        columns = columns_by_share[: int(k * growth.spare / alias_count) + growth.margin]
        evidence_parts = context.evidence_parts(scrambled_pairs, rows, columns, known_pairs)
        state = context.extend(state, rows, columns, sweeps_done / max(total - 1, 1))
        for _ in range(sweeps):
            state = context.sweep(state, evidence_parts, sweeps_done / max(total - 1, 1))
            sweeps_done += 1
            if not report_sweep(sweeps_done / total, context.work(state, evidence_parts)):
                return state
    return state


@dataclass(frozen=True)
class _SweepContext:
    """Makes the sweeps of `settle_all`, by what is the same in all of them.

    Attributes:
        public: what the attacker's text shows.
        fit: compares counts of scrambled and public ids.
        growth: the stages, and how they are annealed.
        alias_count: how many scrambled ids each token has.
    """

    public: PublicPairCounts
    fit: FrequencyFit
    growth: GrowthSchedule
    alias_count: int

    def evidence_parts(
        self, scrambled_pairs: dict[int, PairCounts], rows: Ids, columns: Ids, known_pairs: Ids
    ) -> list[_BigramEvidence]:
        """Returns the evidence of the bigrams of some ids and tokens: one part for each distance and direction.

        Args:
            scrambled_pairs: the counts of pairs in the scrambled text, by distance.
            rows, columns: (K,) scrambled ids and (C,) tokens.
            known_pairs: (p, 2) scrambled ids whose token is known, and the token.
        """
        all_rows, all_columns = np.concatenate([rows, known_pairs[:, 0]]), np.concatenate([columns, known_pairs[:, 1]])
        scale = sp.diags(1 / (self.growth.alpha * self.public.share[all_columns]))
        evidence_parts = []
        for distance, weight in ((1, 1.0), (2, self.growth.second)):
            scrambled = _count_matrix(scrambled_pairs[distance], len(self.fit.scrambled_counts))
            public = _count_matrix(self.public.pairs[distance], len(self.public.share))
            for edges, counts in ((scrambled, public), (scrambled.T.tocsr(), public.T.tocsr())):
                strengths = (counts[columns][:, all_columns] @ scale).tocsr().astype(np.float32)
                evidence_parts.append(_BigramEvidence(edges[rows][:, all_rows].astype(np.float32), strengths, weight))
        return evidence_parts

    def extend(self, previous: MeanFieldState | None, rows: Ids, columns: Ids, share: float) -> MeanFieldState:
        """Returns the beliefs of more rows and columns, those of `previous` unchanged.

        Args:
            previous: the beliefs so far, if there are any; their rows and columns come first.
            rows, columns: (K,) scrambled ids and (C,) tokens of the new beliefs.
            share: which share of all sweeps is done.
        """
        belief = self.balance(self.prior(rows, columns, share), self.growth.temperature[0])
        if previous is not None:  # ids are taken in by rank, so the old ones come first
            belief[: len(previous.rows)] = 0
            belief[: len(previous.rows), : len(previous.columns)] = previous.belief
        return MeanFieldState(rows, columns, belief)

    def sweep(self, state: MeanFieldState, evidence_parts: list[_BigramEvidence], share: float) -> MeanFieldState:
        """Returns the beliefs after every id weighed its neighbours once.

        Args:
            state: the beliefs so far.
            evidence_parts: what `evidence_parts` returned for these ids and tokens.
            share: which share of all sweeps is done.
        """
        growth, (row_count, column_count) = self.growth, state.belief.shape
        known_count = evidence_parts[0].edges.shape[1] - row_count
        belief = np.zeros((row_count + known_count, column_count + known_count), np.float32)
        belief[:row_count, :column_count] = state.belief
        belief[row_count:, column_count:] = np.eye(known_count, dtype=np.float32)
        doubt = interpolate(growth.doubt, share)
        base = (growth.alpha / (self.public.counts[state.columns] + growth.alpha)).astype(np.float32)
        evidence = np.zeros(state.belief.shape, np.float32)
        for part in evidence_parts:
            evidence += part.weight * part.evidence(belief, base, doubt)
        patience = interpolate(growth.patience, share)
        damping = (patience / (patience + self.fit.scrambled_counts[state.rows])).astype(np.float32)[:, None]
        scores = self.prior(state.rows, state.columns, share) + evidence * damping
        new_belief = self.balance(scores, interpolate(growth.temperature, share))
        belief = growth.inertia * state.belief + (1 - growth.inertia) * new_belief
        return MeanFieldState(state.rows, state.columns, belief)

    def work(self, state: MeanFieldState, evidence_parts: list[_BigramEvidence]) -> float:
        """Returns the work of a sweep, for the budget."""
        row_count, column_count = state.belief.shape
        sparse_count = sum(part.strengths.nnz * row_count + part.edges.nnz * column_count for part in evidence_parts)
        dense_count = row_count * column_count * (2 * len(evidence_parts) + SINKHORN_ROUNDS)
        return work.elements(sparse_count / 8 + dense_count)

    def prior(self, rows: Ids, columns: Ids, share: float) -> SoftAssignment:
        """Returns (K, C) the log-likelihoods of ids by frequency.

        Args:
            rows, columns: (K,) scrambled ids and (C,) tokens.
            share: which share of all sweeps is done.
        """
        tau = interpolate(self.growth.tau, share)
        return self.fit.scores(rows[:, None], columns[None], tau).astype(np.float32)

    def balance(self, scores: SoftAssignment, temperature: float) -> SoftAssignment:
        """Returns Sinkhorn and Knopp's assignment: rows sum to 1, columns to about `alias_count` at most."""
        belief = np.exp((scores - scores.max(1, keepdims=True)) / np.float32(temperature))
        for _ in range(SINKHORN_ROUNDS):
            belief /= belief.sum(1, keepdims=True)
            belief /= np.maximum(belief.sum(0, keepdims=True) / np.float32(self.alias_count), 1)
        belief /= belief.sum(1, keepdims=True)
        return belief


def _count_matrix(pairs: PairCounts, size: int) -> sp.csr_matrix:
    """Returns (size, size) how often each right id follows each left one."""
    return sp.csr_matrix((pairs.counts, (pairs.left, pairs.right)), shape=(size, size))
