"""KNN, EDNN and KNN+ (ObfusLM 6.1, EDNN Algorithm 1), with the control: what they must read, they read."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from milkglass.attacks.embeddings.ednn import EDNN, differences
from milkglass.attacks.embeddings.knn import KNN, ROWS_AT_A_TIME, nearest
from milkglass.attacks.embeddings.knn_plus import KNNPlus
from milkglass.schemes.sentinel import SentinelLMs
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Transcript, Weights
from milkglass.threat.truth import score
from tests.attacks.scenes import Change, model, obfuslm, plain, scene
from tests.attacks.transformed import glided


def top(attack: Attack, change: Change, measure: str = "vocabulary top-1") -> float:
    it = scene(change)
    guess = attack(it.transcript, it.knowledge, Budget(), np.random.default_rng(0))
    return score(guess, it.truth, np.random.default_rng(0))[measure].value


def glide(table: torch.Tensor, seed: int) -> torch.Tensor:
    return glided(SentinelLMs(), table, np.random.default_rng(seed + 1))  # with seed 1, the ten moves nearly cancel


@pytest.mark.parametrize("attack", [KNN(), KNN("euclidean"), EDNN(), KNNPlus()])
def test_without_defence_every_token_comes_back(attack: Attack) -> None:
    for measure in ("vocabulary top-1", "tokens top-1", "content top-1", "exact texts", "rouge-1", "meteor"):
        assert top(attack, plain, measure) > 0.99


def test_ednn_reads_the_glide_and_euclidean_knn_does_not() -> None:
    assert top(EDNN(), glide) == 1
    assert top(KNNPlus(), glide) == 1
    assert top(KNN("euclidean"), glide) < 0.2


def test_an_odd_number_of_reflections_changes_nothing_for_ednn() -> None:
    assert top(EDNN(), lambda table, seed: glided(SentinelLMs(9), table, np.random.default_rng(seed))) == 1


def test_on_a_mixture_the_better_one_is_picked_by_rehearsal() -> None:
    change = obfuslm(epsilon=3)
    assert top(KNNPlus(), change) == max(top(KNN(), change), top(EDNN(), change))


def test_nearest_agrees_with_the_definition() -> None:
    make = torch.Generator().manual_seed(3)
    x, e = torch.randn(30, 8, generator=make), torch.randn(40, 8, generator=make)
    loops = torch.tensor([[float((a - b).norm()) for b in e] for a in x])
    assert torch.equal(nearest(x, e, 4, "euclidean"), loops.topk(4, largest=False).indices)
    cosines = torch.tensor([[float(torch.dot(a, b) / a.norm() / b.norm()) for b in e] for a in x])
    assert torch.equal(nearest(x, e, 4), cosines.topk(4).indices)


def test_ednn_agrees_with_the_papers_loop() -> None:
    make = torch.Generator().manual_seed(4)
    x, e = torch.randn(25, 6, generator=make), torch.randn(25, 6, generator=make)

    def lshift(row: list[float]) -> list[float]:
        return row[1:] + row[:1]

    distance = torch.zeros(25, 25)
    for i in range(25):
        for j in range(25):
            one = [a - b for a, b in zip(x[i].tolist(), lshift(x[i].tolist()), strict=True)]
            other = [a - b for a, b in zip(e[j].tolist(), lshift(e[j].tolist()), strict=True)]
            distance[i, j] = sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
    assert torch.equal(nearest(differences(x), differences(e), 1, "euclidean")[:, 0], distance.argmin(1))


def test_why_not_gives_the_reason() -> None:
    it = scene(plain)
    assert "the public model" in str(why_not(KNN(), it.transcript, Knowledge()))
    narrow = Knowledge(public_model=model(torch.randn(300, 8)))
    assert re.search(r"\b24 .*\b8\b", str(why_not(EDNN(), it.transcript, narrow)))
    assert why_not(KNNPlus(), it.transcript, it.knowledge) is None


def test_a_short_budget_reads_what_was_sent_most_often() -> None:
    it = scene(lambda table, seed: table, n=2 * ROWS_AT_A_TIME, sentences=60)

    class Once(Budget):
        """Time for one block of rows."""

        def left(self) -> float:
            self.seconds -= 1
            return self.seconds

    for attack in (KNN(), EDNN()):
        guess = attack(it.transcript, it.knowledge, Once(2), np.random.default_rng(0))
        assert guess.by_id is not None
        read = guess.by_id[:, 0] != NO_BELIEF
        counts = it.transcript.tokens.counts(it.transcript.vocab_size)
        assert read.sum() == ROWS_AT_A_TIME
        assert counts[read].min() >= counts[~read].max()
        assert (guess.by_id[read, 0] == it.truth.inverse[read]).all()


def test_a_vocabulary_smaller_than_k_is_ranked_as_a_whole() -> None:
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    for attack in (KNN(), EDNN()):
        guess = attack(
            Transcript((Weights(model(table)),), 6),
            Knowledge(public_model=model(table)),
            Budget(),
            np.random.default_rng(0),
        )
        assert guess.by_id is not None
        assert guess.by_id.shape == (6, 6)
        assert guess.by_id[:, 0].tolist() == list(range(6))
