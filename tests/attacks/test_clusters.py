"""Cluster solve: exact on mixtures, honest on everything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.attacks import work
from milkglass.attacks.embeddings import cluster_solve, sparse
from milkglass.attacks.embeddings.cluster_solve import ClusterSolve
from milkglass.models.view import Model
from milkglass.schemes.mixture import Mixture
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.sequences import Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from tests.attacks.scenes import SPECIAL, clumped, model

Ids = np.ndarray
N, D = 400, 96


class Case:
    """A table, mixed and permuted, and what it takes to grade the groups."""

    def __init__(self, table: torch.Tensor, scheme: ObfusLM, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.table = table
        self.sigma = rng.permutation(len(table)).astype(np.int64)
        order = rng.permutation(np.arange(SPECIAL, len(table)))
        self.mixture: Mixture = scheme.mixture(table, order, lambda count: rng.laplace(size=count))
        self.seen = torch.empty_like(table)
        self.seen[torch.from_numpy(self.sigma)] = self.mixture.apply(table, np.arange(len(table)))

    def learn(self, seen: torch.Tensor | None = None, budget: Budget | None = None) -> Candidates:
        return learn(self.seen if seen is None else seen, self.table, budget)

    def members(self, token: int) -> tuple[Ids, Ids]:
        part = slice(self.mixture.indptr[token], self.mixture.indptr[token + 1])
        return self.mixture.members[part], self.mixture.weights[part]

    def exact(self, found: Candidates) -> float:
        """The share of clusters of which a group has exactly the rows and the members."""
        truth = {frozenset(self.members(token)[0].tolist()) for token in range(len(self.table))}
        mine = {
            frozenset(group.members.tolist())
            for group in found.groups
            if set(group.rows.tolist()) == set(self.sigma[group.members].tolist())
        }
        return len(truth & mine) / len(truth)

    def weights(self, group: Group) -> Ids:
        """(r, m) the true weights, as the group lists its rows and members."""
        inverse = np.argsort(self.sigma)
        expected = np.zeros((len(group.rows), len(group.members)))
        for number, row in enumerate(group.rows):
            members, weights = self.members(int(inverse[row]))
            for token, weight in zip(members, weights, strict=True):
                expected[number, group.members == token] = weight
        return expected


def learn(seen: torch.Tensor, table: torch.Tensor, budget: Budget | None = None) -> Candidates:
    transcript = Transcript((Weights(model(seen)),), len(seen))
    knowledge = Knowledge(public_model=model(table))
    assert why_not(ClusterSolve(), transcript, knowledge) is None
    return ClusterSolve().learn(transcript, knowledge, budget or Budget(), np.random.default_rng(0))


def covered(found: Candidates, size: int) -> None:
    """Every row is in one group and has candidates."""
    rows = np.concatenate([group.rows for group in found.groups])
    assert sorted(rows.tolist()) == list(range(size))
    assert all(len(group.members) for group in found.groups)
    assert all(np.isfinite(values).all() for values in found.log_likelihoods)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_all_clusters_and_weights_are_exact(epsilon: float) -> None:
    case = Case(clumped(N, D, 1), ObfusLM(5, epsilon, 0.9))
    found = case.learn()
    covered(found, N)
    assert case.exact(found) == 1.0
    solved = [group for group in found.groups if group.weights is not None]
    assert sum(len(group.rows) for group in solved) == N - SPECIAL
    for group in solved:
        assert np.abs(group.weights - case.weights(group)).max() < 1e-6
    assert all((values == 0).all() for values in found.log_likelihoods)


def test_special_rows_are_read_off() -> None:
    case = Case(clumped(N, D, 1), ObfusLM(5, 1.0, 0.9))
    by_row = {int(row): group for group in case.learn().groups for row in group.rows}
    for token in range(SPECIAL):
        assert by_row[int(case.sigma[token])].members.tolist() == [token]


def test_clusters_as_in_the_paper_with_singletons() -> None:
    case = Case(clumped(N, D, 2), ObfusLM(7, 1.0, 0.9, leftover="paper"))
    assert (case.mixture.sizes == 1).any()
    assert case.exact(case.learn()) == 1.0


def test_equal_public_rows_are_right_up_to_these() -> None:
    table = clumped(N, D, 4)
    table[10] = table[0]  # an ordinary token with the row of a special one
    table[12] = table[11]
    case = Case(table, ObfusLM(5, 1.0, 0.9))
    found = case.learn()
    covered(found, N)
    inverse = np.argsort(case.sigma)
    first = {11: 11, 12: 11, 0: 0, 10: 0}
    for group in found.groups:
        kinds = {first.get(token, token) for token in group.members.tolist()}
        assert {first.get(token, token) for token in inverse[group.rows].tolist()} <= kinds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_table_rounded_after_mixing(dtype: torch.dtype) -> None:
    case = Case(clumped(N, D, 5), ObfusLM(5, 1.0, 0.9))
    found = case.learn(case.seen.to(dtype).float())
    covered(found, N)
    assert case.exact(found) > 0.9


def test_a_table_that_training_moved() -> None:
    case = Case(clumped(N, D, 6), ObfusLM(5, 1.0, 0.9))
    make = torch.Generator().manual_seed(1)
    moved = case.seen + 0.01 * case.seen.norm(dim=1, keepdim=True) * torch.randn(N, D, generator=make) / D**0.5
    found = case.learn(moved)
    covered(found, N)
    assert case.exact(found) > 0.8


@pytest.mark.parametrize("cells", [N * N, 100])
def test_a_table_that_is_no_mixture(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are the rest, by cosine: one group, or lists where that would be too large. Nothing is claimed."""
    monkeypatch.setattr(cluster_solve, "MAX_UNSOLVED_CELLS", cells)
    found = learn(clumped(N, D, 8), clumped(N, D, 7))
    covered(found, N)
    assert all(group.weights is None for group in found.groups)
    assert len(found.groups) == (1 if cells == N * N else N)


def test_the_rest_is_ranked_by_cosine() -> None:
    """Noise so loud that nothing can be solved still leaves each row nearest to its own token."""
    table = clumped(N, D, 7)
    blurred = table + 0.8 * table.norm(dim=1, keepdim=True) * torch.randn(N, D, generator=torch.manual_seed(0)) / D**0.5
    found = learn(blurred, table)
    covered(found, N)
    best = np.concatenate([group.members[values.argmax(1)] for group, values in zip(*_both(found), strict=True)])
    rows = np.concatenate([group.rows for group in found.groups])
    assert (best == rows).mean() > 0.9


def _both(found: Candidates) -> tuple[tuple[Group, ...], tuple[Ids, ...]]:
    return found.groups, found.log_likelihoods


def test_a_spent_budget_returns_what_there_is() -> None:
    case = Case(clumped(N, D, 1), ObfusLM(5, 1.0, 0.9))
    found = case.learn(budget=Budget(1e-9))
    covered(found, N)
    assert sum(len(group.rows) for group in found.groups if group.weights is None) > N / 2


def test_a_short_budget_solves_the_rows_that_were_sent_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_solve, "MAX_UNSOLVED_CELLS", 100)
    case = Case(clumped(N, D, 1), ObfusLM(5, 1.0, 0.9))
    clusters = {frozenset(case.members(token)[0].tolist()) for token in range(SPECIAL, N)}
    often, once = sorted(clusters, key=sorted)[7], sorted(clusters, key=sorted)[50]
    sent = Sequences.of([case.sigma[sorted(often)], case.sigma[sorted(often)], case.sigma[sorted(once)]])
    transcript = Transcript((Weights(model(case.seen)), Tokens(sent)), N)
    knowledge, settings, rng = Knowledge(public_model=model(case.table)), ClusterSolve(batch=1), np.random.default_rng
    measuring = work.elements(5.0 * 2 * case.table.numel())
    found = settings.learn(transcript, knowledge, Budget.of_work(1.001 * measuring), rng(0))  # one seed
    solved = [group for group in found.groups if group.weights is not None]
    assert [frozenset(group.members.tolist()) for group in solved] == [often]
    ranked = np.concatenate([group.rows for group in found.groups if len(group.members) > 1])
    assert {*case.sigma[sorted(once)].tolist()} <= {*ranked.tolist()}, "rows that were sent have candidates in any case"
    monkeypatch.setattr(cluster_solve, "UNSOLVED_BLOCK_ROWS", 1)
    late = settings.learn(transcript, knowledge, Budget.of_work(1.001 * measuring), rng(0))
    rows_of_late = {row for group in late.groups for row in group.rows.tolist()}
    crossed = {*case.sigma[sorted(once)].tolist(), *case.sigma[sorted(often)].tolist()}
    assert crossed <= rows_of_late and len(rows_of_late) <= len(crossed) + SPECIAL, "no time for rows that nobody sent"
    covered(settings.learn(transcript, knowledge, Budget(), rng(0)), N)


def test_a_plain_table_is_read_off_whole() -> None:
    table = clumped(N, D, 1)
    guess = ClusterSolve()(
        Transcript((Weights(model(table)),), N),
        Knowledge(public_model=model(table)),
        Budget(),
        np.random.default_rng(0),
    )
    assert guess.by_id is not None
    assert (guess.by_id[:, 0] == np.arange(N)).all()


def test_another_public_model_is_refused() -> None:
    transcript = Transcript((Weights(model(clumped(N, D, 1))),), N)
    reason = why_not(ClusterSolve(), transcript, Knowledge(public_model=model(clumped(N, 2 * D, 1))))
    assert f"({N}, {2 * D})" in str(reason) and f"({N}, {D})" in str(reason)


@pytest.mark.parametrize("name", ["bert", "llama-untied"])
def test_through_the_scrambler(name: str, tmp_path: Path) -> None:
    """What the product writes; an untied head is solved together with the table."""
    from milkglass.client.key.generate import new_key
    from milkglass.client.key.scheme import scheme_for
    from milkglass.client.obfuscate.scramble import scramble
    from milkglass.models.checkpoint import Checkpoint
    from tests.tiny import save

    folder = save(name, tmp_path / "model")
    base = Checkpoint.open(folder)
    key = new_key(base, name, scheme_for(base, k=3, beta=0.9), base.digest())
    scramble(base, key, tmp_path / "out")
    public, seen = Model.open(folder), Model.open(tmp_path / "out")
    found = ClusterSolve().learn(
        Transcript((Weights(seen),), len(public.table)),
        Knowledge(public_model=public),
        Budget(),
        np.random.default_rng(0),
    )
    covered(found, len(public.table))
    right = [set(key.sigma[group.members].tolist()) == set(group.rows.tolist()) for group in found.groups]
    assert np.mean(right) > 0.95


def test_elimination_keeps_only_the_members() -> None:
    make = torch.Generator().manual_seed(2)
    tokens = sparse.unit_rows(torch.randn(3, 20, 64, generator=make))
    weights = torch.zeros(3, 20)
    weights[:, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    on, found = sparse.eliminate(tokens, (weights[:, None] @ tokens)[:, 0], 1e-6)
    assert (on == (weights > 0)).all()
    assert torch.allclose(found.float(), weights, atol=1e-6)
