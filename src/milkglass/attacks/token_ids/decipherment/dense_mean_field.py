"""The annealed mean field without candidates: any frequent id may stand for any frequent token.

Comparing all ids at once is too expensive, and too soft at first to converge. So the matrix grows: the most frequent
ids settle first, on frequency and on each other, and then serve as context for rarer ones. decipherment.py has the
formula, block_assignment.py the form with groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from milkglass.attacks.token_ids.decipherment.bigrams import Bigrams, FrequencyFit, PublicBigrams
from milkglass.attacks.token_ids.decipherment.mean_field import Between, between
from milkglass.sequences import Ids

Soft = NDArray[np.float32]
Step = Callable[[float], bool]  # receives the share that is done, returns whether to go on

ROUNDS = 12


@dataclass(frozen=True)
class GrowthSchedule:
    """The schedule of the growth.

    Attributes:
        sizes, sweeps: the number of ids at each stage, and of sweeps.
        spare, margin: ids are compared with `spare` times as many public tokens and `margin` more.
        tau, patience, doubt, temperature, alpha, second, inertia: as in Decipherment.
    """

    sizes: tuple[int, ...] = (60, 150, 400, 1000, 2500)
    sweeps: tuple[int, ...] = (20, 15, 12, 10, 8)
    spare: float = 1.5
    margin: int = 60
    tau: Between = (0.3, 0.5)
    patience: Between = (15.0, 40.0)
    doubt: Between = (0.5, 0.2)
    temperature: Between = (1.5, 0.7)
    alpha: float = 3.0
    second: float = 0.5
    inertia: float = 0.3


@dataclass(frozen=True)
class MeanFieldState:
    """The belief so far.

    Attributes:
        rows: (K,) scrambled ids.
        columns: (C,) public ids.
        belief: (K, C).
    """

    rows: Ids
    columns: Ids
    belief: Soft


@dataclass(frozen=True)
class _Channel:
    """The bigrams of one distance in one direction.

    Attributes:
        edges: (K, K + p) scrambled counts.
        votes: (C, C + p) what each neighbour says.
        weight: how much they count.
    """

    edges: sp.csr_matrix
    votes: sp.csr_matrix
    weight: float


def settle(
    seen: NDArray[np.float64],
    texts: dict[int, Bigrams],
    public: PublicBigrams,
    pins: Ids,
    growth: GrowthSchedule,
    step: Step,
    aliases: int = 1,
) -> MeanFieldState | None:
    """Returns the belief after all stages of growth.

    Args:
        seen: (n',) counts of scrambled ids.
        texts: their bigrams by distance.
        pins: (p, 2) known pairs.
        aliases: the number of scrambled ids of a token.

    Returns:
        None if every id that occurs is among the pins.
    """
    tokens, (known, times) = np.arange(len(public.share)), np.unique(pins[:, 1], return_counts=True)
    known = known[times >= aliases]
    free_rows, free_columns = np.setdiff1d(np.flatnonzero(seen), pins[:, 0]), np.setdiff1d(tokens, known)
    by_count = free_rows[np.argsort(-seen[free_rows], kind="stable")]
    by_share = free_columns[np.argsort(-public.share[free_columns], kind="stable")]
    fit = FrequencyFit(seen, public, free_rows, free_columns, aliases)
    if not len(by_count):
        return None
    stages = [min(k, len(by_count)) for k in growth.sizes]
    stages = stages[: 1 + next((i for i, k in enumerate(stages) if k == len(by_count)), len(stages))]
    total, done = sum(growth.sweeps[: len(stages)]), 0
    field, state = _Field(public, fit, growth, aliases), None
    for k, sweeps in zip(stages, growth.sweeps, strict=False):
        rows = by_count[:k]
        columns = by_share[: int(k * growth.spare / aliases) + growth.margin]
        channels = field.channels(texts, rows, columns, pins)
        state = field.taken_in(state, rows, columns, done / max(total - 1, 1))
        for _ in range(sweeps):
            state = field.sweep(state, channels, done / max(total - 1, 1))
            done += 1
            if not step(done / total):
                return state
    return state


@dataclass(frozen=True)
class _Field:
    """The constants of all sweeps, see `settle`."""

    public: PublicBigrams
    fit: FrequencyFit
    growth: GrowthSchedule
    aliases: int

    def channels(self, texts: dict[int, Bigrams], rows: Ids, columns: Ids, pins: Ids) -> list[_Channel]:
        all_rows, all_columns = np.concatenate([rows, pins[:, 0]]), np.concatenate([columns, pins[:, 1]])
        loud = sp.diags(1 / (self.growth.alpha * self.public.share[all_columns]))
        out = []
        for distance, weight in ((1, 1.0), (2, self.growth.second)):
            seen = _matrix(texts[distance], len(self.fit.seen))
            words = _matrix(self.public.bigrams[distance], len(self.public.share))
            for edges, votes in ((seen, words), (seen.T.tocsr(), words.T.tocsr())):
                part = (votes[columns][:, all_columns] @ loud).tocsr().astype(np.float32)
                out.append(_Channel(edges[rows][:, all_rows].astype(np.float32), part, weight))
        return out

    def taken_in(self, old: MeanFieldState | None, rows: Ids, columns: Ids, share: float) -> MeanFieldState:
        belief = self.balanced(self.prior(rows, columns, share), self.growth.temperature[0])
        if old is not None:  # ids are taken in by rank, so the old ones come first
            belief[: len(old.rows)] = 0
            belief[: len(old.rows), : len(old.columns)] = old.belief
        return MeanFieldState(rows, columns, belief)

    def sweep(self, state: MeanFieldState, channels: list[_Channel], share: float) -> MeanFieldState:
        growth, (rows, columns) = self.growth, state.belief.shape
        known = channels[0].edges.shape[1] - rows
        belief = np.zeros((rows + known, columns + known), np.float32)
        belief[:rows, :columns] = state.belief
        belief[rows:, columns:] = np.eye(known, dtype=np.float32)
        doubt = between(growth.doubt, share)
        base = (growth.alpha / (self.public.counts[state.columns] + growth.alpha)).astype(np.float32)
        evidence = np.zeros(state.belief.shape, np.float32)
        for one in channels:
            ratio = (one.votes @ np.ascontiguousarray(belief.T)).T  # (K + p, C)
            ratio += 1
            ratio *= (1 - doubt) * base
            ratio += doubt
            evidence += one.weight * (one.edges @ np.ascontiguousarray(np.log(ratio)))
        patience = between(growth.patience, share)
        weight = (patience / (patience + self.fit.seen[state.rows])).astype(np.float32)[:, None]
        scores = self.prior(state.rows, state.columns, share) + evidence * weight
        fresh = self.balanced(scores, between(growth.temperature, share))
        belief = growth.inertia * state.belief + (1 - growth.inertia) * fresh
        return MeanFieldState(state.rows, state.columns, belief)

    def prior(self, rows: Ids, columns: Ids, share: float) -> Soft:
        tau = between(self.growth.tau, share)
        return self.fit.scores(rows[:, None], columns[None], tau).astype(np.float32)

    def balanced(self, scores: Soft, temperature: float) -> Soft:
        """Returns Sinkhorn and Knopp's assignment: rows sum to 1, columns to at most `aliases`."""
        belief = np.exp((scores - scores.max(1, keepdims=True)) / np.float32(temperature))
        for _ in range(ROUNDS):
            belief /= belief.sum(1, keepdims=True)
            belief /= np.maximum(belief.sum(0, keepdims=True) / np.float32(self.aliases), 1)
        belief /= belief.sum(1, keepdims=True)
        return belief


def _matrix(pairs: Bigrams, size: int) -> sp.csr_matrix:
    return sp.csr_matrix((pairs.count, (pairs.left, pairs.right)), shape=(size, size))
