"""Matching: the likelihood is the right one, and it orders clusters better than chance."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad

from milkglass.attacks.embeddings import matching
from milkglass.attacks.embeddings.cluster_solve import ClusterSolve
from milkglass.attacks.embeddings.matching import Matching
from milkglass.errors import UsageError
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from tests.attacks.scenes import SPECIAL, Scene, obfuslm, scene

N = 1000


def candidates(it: Scene) -> Candidates:
    return ClusterSolve().learn(it.transcript, it.knowledge, Budget(), np.random.default_rng(0))


def knowing(it: Scene, found: Candidates) -> Knowledge:
    return Knowledge(public_model=it.knowledge.public_model, candidates=found)


def correct(it: Scene, attack: Matching) -> float:
    guess = attack(it.transcript, knowing(it, candidates(it)), Budget(), np.random.default_rng(0))
    assert guess.by_id is not None
    inverse = it.truth.inverse
    return float((guess.by_id[:, 0] == inverse)[inverse >= SPECIAL].mean())


@pytest.mark.parametrize("count", [2, 3, 5, 10])
@pytest.mark.parametrize("scale", [0.05, 0.4, 3.0])
def test_the_integral_is_exact(count: int, scale: float) -> None:
    a = np.random.default_rng(count).normal(size=count)
    a[0] = a[1]  # breakpoints that coincide
    ends = np.concatenate([[a.min() - 40 * scale], np.sort(a), [a.max() + 40 * scale]])

    def density(c: float) -> float:
        return float(np.prod(np.exp(-np.abs(c - a) / scale) / (2 * scale)))

    slow = sum(
        quad(density, low, high, epsabs=0)[0] for low, high in zip(ends[:-1], ends[1:], strict=True) if low < high
    )
    assert matching._log_integral(a, np.array(scale)) == pytest.approx(np.log(slow), abs=1e-6)


@pytest.mark.parametrize(("epsilon", "least"), [(0.1, 1.1 / 5.5), (1.0, 1.3 / 5.5), (3.0, 0.45)])
def test_better_than_chance_and_more_so_with_epsilon(epsilon: float, least: float) -> None:
    """Clusters have 5 to 9 tokens, so chance is at most one in 5."""
    assert correct(scene(obfuslm(5, epsilon), n=N, d=64), Matching(epsilon)) > least


def test_the_true_order_is_likelier_than_others() -> None:
    it = scene(obfuslm(5, 1.0), n=N, d=64)
    found = Matching(1.0).learn(it.transcript, knowing(it, candidates(it)), Budget(), np.random.default_rng(0))
    rng = np.random.default_rng(4)
    gains = []
    for group, values in zip(found.groups, found.log_likelihoods, strict=True):
        if group.weights is None:
            continue
        places = np.array([np.flatnonzero(group.members == it.truth.inverse[row])[0] for row in group.rows])
        rows = np.arange(len(places))
        gains.append(values[rows, places].sum() - values[rows, rng.permutation(places)].sum())
    assert np.mean(gains) > 3 * np.std(gains) / len(gains) ** 0.5


def test_the_likelihood_is_calibrated() -> None:
    """Of the tokens to which a row gives a chance of p, about a share of p is right."""
    it = scene(obfuslm(5, 2.0), n=N, d=64)
    found = Matching(2.0).learn(it.transcript, knowing(it, candidates(it)), Budget(), np.random.default_rng(0))
    chances, true = [], []
    for group, values in zip(found.groups, found.log_likelihoods, strict=True):
        if group.weights is None:
            continue
        chance = np.exp(values - values.max(1, keepdims=True))
        chances.append((chance / chance.sum(1, keepdims=True)).reshape(-1))
        true.append((group.members == it.truth.inverse[group.rows][:, None]).reshape(-1))
    p, hit = np.concatenate(chances), np.concatenate(true)
    for low, high in ((0.05, 0.2), (0.2, 0.4), (0.4, 0.7), (0.7, 1.0)):
        inside = (p >= low) & (p < high)
        assert inside.sum() > 50
        assert abs(p[inside].mean() - hit[inside].mean()) < 0.08


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_epsilon_is_estimated(epsilon: float) -> None:
    it = scene(obfuslm(5, epsilon), n=N, d=64)
    groups = candidates(it).groups
    usable = [number for number, group in enumerate(groups) if group.weights is not None]
    assert it.knowledge.public_model is not None
    batches = matching._cluster_batches(groups, usable, it.knowledge.public_model.table, 1e-5)
    assert matching.estimate_epsilon(batches) == pytest.approx(epsilon, rel=0.3)


def test_groups_without_weights_keep_what_they_came_with() -> None:
    it = scene(obfuslm(5, 1.0), n=100, d=64)
    ids = np.arange(100)
    values = np.random.default_rng(0).normal(size=(100, 100))
    given = Candidates((Group(ids, ids),), (values,))
    found = Matching().learn(it.transcript, knowing(it, given), Budget(), np.random.default_rng(0))
    assert (found.log_likelihoods[0] == values).all()


def test_a_spent_budget_changes_nothing() -> None:
    it = scene(obfuslm(5, 1.0), n=200, d=64)
    given = candidates(it)
    found = Matching(1.0).learn(it.transcript, knowing(it, given), Budget(1e-9), np.random.default_rng(0))
    assert all((a == b).all() for a, b in zip(found.log_likelihoods, given.log_likelihoods, strict=True))


def test_it_needs_candidates() -> None:
    it = scene(obfuslm(5, 1.0), n=100, d=64)
    assert "candidates" in str(why_not(Matching(), it.transcript, it.knowledge))
    with pytest.raises(UsageError, match="epsilon is -1"):
        Matching(epsilon=-1)
