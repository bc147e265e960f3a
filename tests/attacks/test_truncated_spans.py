"""Truncated spans: whole texts where nothing is pruned, more than chance where entries are, and a control of noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from milkglass.attacks.gradients.dager import DAGER
from milkglass.attacks.gradients.truncated_spans import TruncatedSpans, leading_right_singular_vectors
from milkglass.errors import UsageError
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.training_step import Task
from tests.attacks.gradient_kit import Shared, shared, step
from tests.attacks.test_dager import CASES, changed

ONE = [[1, 17, 203, 44, 44, 9, 2]]


def read(scene: Shared, attack: TruncatedSpans | DAGER | None = None) -> list[int]:
    guess = (attack or TruncatedSpans())(scene.transcript, scene.knowledge, Budget(60), np.random.default_rng(0))
    assert guess.texts is not None
    return next(iter(guess.texts)).tolist()


@pytest.mark.parametrize(("name", "task"), CASES)
def test_an_exact_gradient_gives_the_text(name: str, task: Task) -> None:
    found = read(shared(step(name, task), [ONE]))
    expected = ONE[0] if task == "classification" else ONE[0][:-1]
    assert found == expected


@pytest.mark.parametrize("name", ["bert", "llama-untied"])
def test_pruned_gradients_give_more_than_chance_and_noise_gives_none(name: str) -> None:
    """Of 256 tokens; a third of the entries is dropped, after which DAGER finds no span."""
    rng = np.random.default_rng(1)
    texts = [[1, *rng.choice(np.arange(10, 250), 3, replace=False).tolist(), 2] for _ in range(6)]
    hits = {"pruned": 0, "noise": 0}
    for number, text in enumerate(texts):
        torch.manual_seed(number)
        scene = shared(step(name), [[text]], seed=number)
        pruned = changed(scene, lambda grad: grad * (torch.rand_like(grad) < 2 / 3))
        assert not read(pruned, DAGER())
        hits["pruned"] += sum(token in text[1:4] for token in read(pruned)[1:4])
        noise = changed(scene, torch.randn_like)
        hits["noise"] += sum(token in text[1:4] for token in read(noise)[1:4])
    assert hits["pruned"] >= 5 > hits["noise"] + 2, hits


@pytest.mark.parametrize("count", [2, 9, 40])
def test_directions_are_those_of_the_gram_matrix(count: int) -> None:
    rows = torch.randn(90, 40, generator=torch.Generator().manual_seed(3))
    basis = leading_right_singular_vectors(rows, count)
    vectors = torch.linalg.eigh(rows.double().T @ rows.double())[1].flip(1)[:, :count]
    torch.testing.assert_close(basis @ basis.T, vectors @ vectors.T, rtol=0, atol=1e-5)


def test_what_cannot_be_read_is_said() -> None:
    two = shared(step("bert"), [[*ONE, *ONE]])
    assert "2 texts" in str(why_not(TruncatedSpans(), two.transcript, two.knowledge))
    unknown = shared(step("bert"), [ONE], lengths=False)
    assert "lengths" in str(why_not(TruncatedSpans(), unknown.transcript, unknown.knowledge))
    zero = changed(shared(step("bert"), [ONE]), torch.zeros_like)
    assert "no gradient" in str(why_not(TruncatedSpans(), zero.transcript, zero.knowledge))
    with pytest.raises(UsageError, match="beam_width is 0"):
        TruncatedSpans(beam_width=0)
