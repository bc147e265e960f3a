"""Tokens for free, by rows that are not zero or not like the others; and what pruning leaves of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from milkglass.attacks.gradients.dager import DAGER
from milkglass.attacks.gradients.free_tokens import FreeTokens, read_tokens
from milkglass.attacks.gradients.inversion import batches
from milkglass.attacks.gradients.surviving_entries import SurvivingEntries, match_tokens, position_gradient
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Gradients, Transcript
from milkglass.threat.training_step import Task
from tests.attacks.gradient_kit import Shared, shared, step

ONE = [[1, 17, 203, 44, 44, 9, 2]]
TWO = [[1, 17, 203, 44, 9, 2], [1, 60, 17, 71, 8, 90, 33, 150, 2]]


def texts(attack: Attack, scene: Shared, budget: Budget | None = None) -> list[list[int]]:
    guess = attack(scene.transcript, scene.knowledge, budget or Budget(60), np.random.default_rng(0))
    assert guess.texts is not None
    return [one.tolist() for one in guess.texts]


def pruned(scene: Shared, share: float, seed: int = 0) -> Shared:
    """Random entries set to zero."""
    generator = torch.Generator().manual_seed(seed)
    seen = [
        Gradients(
            {n: g * (torch.rand(g.shape, generator=generator) >= share) for n, g in one.tensors.items()},
            one.batch_size,
            one.round,
        )
        for one in scene.transcript.all(Gradients)
    ]
    return replace(scene, transcript=Transcript(tuple(seen), scene.transcript.vocab_size))


def table(scene: Shared) -> torch.Tensor:
    name = scene.step.table_name
    assert name is not None
    return scene.transcript.all(Gradients)[0].tensors[name]


# --- free tokens ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama-untied", "gemma2"])
def test_rows_that_are_not_zero_are_the_tokens(name: str) -> None:
    scene = shared(step(name), [ONE])
    assert texts(FreeTokens(), scene) == [[1, 2, 9, 17, 44, 203]]


@pytest.mark.parametrize(
    ("name", "tied"), [("gpt2", True), ("llama-tied", True), ("qwen3", True), ("llama-untied", False)]
)
def test_where_every_row_is_an_answer_those_that_were_read_stand_apart(name: str, tied: bool) -> None:
    """All but the last token, which was never read."""
    scene = shared(step(name, "next-token"), [ONE])
    assert bool((table(scene) != 0).any(1).all()) is tied
    assert texts(FreeTokens(), scene) == [[1, 9, 17, 44, 203]]


def test_tokens_of_a_batch_are_dealt_out_by_the_lengths() -> None:
    found = texts(FreeTokens(), shared(step("bert"), [TWO]))
    assert sorted(found[0] + found[1]) == sorted({t for text in TWO for t in text})
    assert [len(one) for one in found] == [5, 7]  # 12 tokens for 6 and 9
    even = texts(FreeTokens(), shared(step("bert"), [TWO], lengths=False))
    assert [len(one) for one in even] == [6, 6]


def test_rows_that_are_too_long_for_noise_stand_out() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 0.01 * torch.randn(300, 64, generator=generator)
    assert read_tokens(noise) is None
    noise[[5, 9]] += 0.1
    found = read_tokens(noise)
    assert found is not None
    assert found.tolist() == [5, 9]


def test_rows_of_noise_are_no_tokens() -> None:
    """At 8 standard deviations: 40 tables, 12,000 rows."""
    generator = torch.Generator().manual_seed(0)
    assert all(read_tokens(torch.randn(300, 128, generator=generator)) is None for _ in range(40))


def test_what_is_refused() -> None:
    scene = shared(step("bert"), [ONE])
    seen = scene.transcript.all(Gradients)[0]
    frozen = {n: g for n, g in seen.tensors.items() if n != scene.step.table_name}
    bare = Transcript((Gradients(frozen, 1, 0),), 300)
    for attack in (FreeTokens(), SurvivingEntries()):
        assert "not shared" in str(why_not(attack, bare, scene.knowledge))
        assert "which model" in str(why_not(attack, scene.transcript, Knowledge()))
    alike = pruned(shared(step("llama-tied", "next-token"), [ONE]), 0.5)
    assert "rows of the embeddings" in str(why_not(FreeTokens(), alike.transcript, alike.knowledge))
    assert "the labels" in str(why_not(SurvivingEntries(), scene.transcript, Knowledge(step=scene.step)))
    two = shared(step("bert"), [TWO])
    assert "2 texts" in str(why_not(SurvivingEntries(), two.transcript, two.knowledge))


# --- what pruning leaves ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "task"), [("bert", "classification"), ("gpt2", "classification")])
def test_pruning_ends_exact_inversion_and_not_this(name: str, task: Task) -> None:
    scene = pruned(shared(step(name, task), [[[1, 17, 203, 44, 9, 2]]]), 0.8)
    assert texts(DAGER(), scene) == [[]]
    assert texts(SurvivingEntries(), scene) == [[1, 17, 203, 44, 9, 2]]


def test_a_token_that_stood_twice_is_found_by_the_search() -> None:
    scene = pruned(shared(step("bert"), [[[1, 17, 44, 44, 2]]]), 0.5)
    assert texts(SurvivingEntries(), scene) == [[1, 17, 44, 44, 2]]


def test_positions_have_the_rows_of_their_tokens() -> None:
    """No search is needed while both have entries left."""
    scene = pruned(shared(step("bert"), [[[1, 17, 203, 44, 9, 2]]], lengths=False), 0.5)
    (batch,) = batches(scene.transcript, scene.knowledge)
    places = position_gradient(batch)
    assert places is not None
    assert len(places) == 6
    ids = np.array([1, 2, 9, 17, 44, 203])
    assert match_tokens(table(scene)[ids], places, ids).tolist() == [1, 17, 203, 44, 9, 2]


def test_roberta_s_positions_begin_behind_its_padding() -> None:
    scene = shared(step("roberta"), [[[0, 17, 203, 44, 2]]], lengths=False)
    (batch,) = batches(scene.transcript, scene.knowledge)
    places = position_gradient(batch)
    assert places is not None
    assert len(places) == 5


def test_no_time_leaves_some_order() -> None:
    scene = pruned(shared(step("bert"), [ONE]), 0.5)
    (found,) = texts(SurvivingEntries(), scene, Budget(stopped=lambda: True))
    assert len(found) == 7
    assert set(found) <= set(ONE[0])
