"""DAGER: texts come out exactly, by a span that is held against a brute-force oracle, or not at all."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from milkglass.attacks.gradients import spans
from milkglass.attacks.gradients.attention_inputs import AttentionInput, state_depends_on_position
from milkglass.attacks.gradients.dager import DAGER
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Gradients, Transcript
from milkglass.threat.training_step import SharedStep, Task, pad_texts
from tests.attacks.gradient_kit import Shared, shared, step

ONE = [[1, 17, 203, 44, 44, 9, 2]]
TWO = [[1, 17, 203, 44, 9, 2], [1, 60, 17, 71, 8, 90, 33, 150, 2]]
CASES: list[tuple[str, Task]] = [
    ("bert", "classification"),
    ("roberta", "classification"),
    ("mpnet", "classification"),
    ("gpt2", "classification"),
    ("gpt2", "next-token"),
    ("llama-untied", "classification"),
    ("llama-tied", "next-token"),
    ("llama-untied", "next-token"),
    ("gemma2", "classification"),
    ("gemma2", "next-token"),
    ("qwen3", "next-token"),
]


def attack(scene: Shared, **chosen: float) -> Guess:
    one = replace(DAGER(), **chosen)  # type: ignore[arg-type]
    return one(scene.transcript, scene.knowledge, Budget(60), np.random.default_rng(0))


def texts(guess: Guess) -> list[list[int]]:
    assert guess.texts is not None
    return sorted((one.tolist() for one in guess.texts), key=len)


def changed(scene: Shared, change: object) -> Shared:
    seen = [
        Gradients({n: change(g) for n, g in one.tensors.items()}, one.batch_size, one.round)  # type: ignore[operator]
        for one in scene.transcript.all(Gradients)
    ]
    return replace(scene, transcript=Transcript(tuple(seen), scene.transcript.vocab_size))


# --- texts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("name", "task"), CASES)
def test_one_text_comes_out_exactly(name: str, task: Task, known: bool) -> None:
    scene = shared(step(name, task), [ONE], lengths=known)
    assert texts(attack(scene)) == ONE


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("name", "task"), CASES)
def test_two_texts_come_out_exactly(name: str, task: Task, known: bool) -> None:
    scene = shared(step(name, task), [TWO], lengths=known)
    assert texts(attack(scene)) == TWO


def test_each_batch_is_inverted_by_itself() -> None:
    scene = shared(step("gpt2"), [ONE, TWO])
    graded = scene.graded(attack(scene))
    assert graded["exact texts"] == 1.0
    assert graded["token recall"] == 1.0


def test_few_combinations_are_tried_and_many_are_improved_place_by_place() -> None:
    scene = shared(step("bert"), [TWO])
    assert texts(attack(scene, combinations=1)) == texts(attack(scene)) == TWO


def sharing(count: int, seed: int) -> list[list[int]]:
    """Different texts of two tokens a place, so that most tokens are in several of them."""
    rng = np.random.default_rng(seed)
    pool = [rng.choice(np.arange(5, 300), 2, replace=False) for _ in range(4)]
    found: list[list[int]] = []
    while len(found) < count:
        one = [1, *(int(rng.choice(some)) for some in pool), 2]
        found += [one] if one not in found else []
    return found


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("count", [3, 4])
def test_texts_of_a_batch_that_share_tokens_come_out_once_each(count: int, known: bool) -> None:
    for seed in range(4):
        batch = sharing(count, seed)
        assert sorted(texts(attack(shared(step("bert"), [batch], lengths=known)))) == sorted(batch)


def test_texts_that_share_tokens_are_not_found_twice_where_combinations_are_many() -> None:
    """The nearest wrong text is within the tolerance here, at 32 dimensions: a few tokens may be another text's."""
    recall = []
    for seed in range(4):
        scene = shared(step("bert"), [sharing(3, seed)])
        found = attack(scene, combinations=1)
        assert len({tuple(one) for one in texts(found)}) == 3
        recall.append(scene.graded(found)["token recall"])
    assert np.mean(recall) > 0.9


def test_a_text_that_is_in_a_batch_twice_is_found_again() -> None:
    one, other = [1, 17, 203, 44, 2], [1, 60, 8, 71, 90, 2]
    assert texts(attack(shared(step("bert"), [[one, one]]))) == [one, one]
    assert texts(attack(shared(step("bert"), [[one, other, other]]))) == [one, other, other]


def test_a_repeated_first_token_is_no_text_of_its_own() -> None:
    """It is in the span at any length: attention over equal values is that value."""
    scene = shared(step("llama-tied", "next-token"), [[[7, 7, 9, 7, 4, 6]]], lengths=False)
    assert texts(attack(scene)) == [[7, 7, 9, 7, 4, 6]]


def test_a_last_token_that_was_read_before_is_told_by_the_whole_gradient() -> None:
    for name in ("llama-tied", "llama-untied"):
        scene = shared(step(name, "next-token"), [[[5, 9, 30, 9]]])
        assert texts(attack(scene)) == [[5, 9, 30, 9]]


# --- spans ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama-untied", "gemma2"])
def test_the_span_is_that_of_what_entered_by_least_squares(name: str) -> None:
    """The oracle has the vectors that entered, and asks of each token how well they make it up."""
    one = step(name)
    low = AttentionInput(one, 0)
    scene = shared(one, [[[1, 17, 203, 44, 9, 2]]])
    grads = scene.transcript.all(Gradients)[0].tensors
    rows = [grads[m.name].T if m.is_transposed else grads[m.name] for m in low.projections]
    span = spans.row_space(rows)
    entered = low.compute(one.embed(torch.tensor([[1, 17, 203, 44, 9, 2]])).detach())[0].double()
    assert span.rank == 6
    assert float(span.distances(entered).max()) < 1e-4
    every = low.compute(one.embed(torch.arange(300)[:, None]).detach())[:, 0].double()
    best = torch.linalg.lstsq(entered.T, every.T).solution
    oracle = (every - best.T @ entered).norm(dim=1) / every.norm(dim=1)
    assert torch.allclose(span.distances(every), oracle, atol=1e-2)
    assert torch.equal(span.distances(every) < 1e-4, oracle < 1e-4)


def test_the_rank_lies_at_the_gap() -> None:
    eps = torch.finfo(torch.float32).eps
    assert spans.numerical_rank(torch.tensor([1.0, 0.1, 1e-4, 1e-8, 5e-9]), eps) == 3
    assert spans.numerical_rank(torch.tensor([1.0, 0.1, 1e-4, 1e-8, 0.0]), eps) == 3  # an exact zero is no gap
    assert spans.numerical_rank(torch.tensor([1.0, 0.5, 0.3, 0.2]), eps) == 4
    assert spans.numerical_rank(torch.tensor([1.0, 0.3, 0.004, 0.003]), torch.finfo(torch.bfloat16).eps) == 2


@pytest.mark.parametrize(("name", "count", "transposed"), [("bert", 3, False), ("gpt2", 1, True), ("qwen3", 3, False)])
def test_projections_are_found_by_what_they_read(name: str, count: int, transposed: bool) -> None:
    task: Task = "next-token" if name == "qwen3" else "classification"
    one = step(name, task)
    for number in (0, 1):
        matrices = AttentionInput(one, number).projections
        assert len(matrices) == count
        assert [m.is_transposed for m in matrices] == [transposed] * count
        assert all(f".{number}." in m.name for m in matrices)
        assert any(word in matrices[0].name for word in ("query", "c_attn", "q_proj"))


@pytest.mark.parametrize(("name", "placed"), [("bert", True), ("gpt2", True), ("llama-untied", False)])
def test_positions_that_only_rotate_don_t_enter(name: str, placed: bool) -> None:
    assert state_depends_on_position(AttentionInput(step(name), 0)) is placed


def test_the_model_is_left_as_it_was() -> None:
    one = step("bert")
    before = {name: tensor.clone() for name, tensor in one.module.state_dict().items()}
    attack(shared(one, [ONE]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.module.state_dict().items())
    assert not any(part._forward_pre_hooks for part in one.module.modules())


# --- adapters ---------------------------------------------------------------------------------------------------------
def trained(name: str, rank: int) -> SharedStep:
    """Adapters whose second halves are no longer zero, as after a first step."""
    made = step.__wrapped__(name, "classification", rank)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, one in made.module.named_parameters():
            if "lora_B" in key:
                one += 0.1 * torch.randn(one.shape, generator=generator)
    return made


@pytest.mark.parametrize("name", ["bert", "llama-untied"])
@pytest.mark.parametrize("fresh", [True, False])
def test_adapters_give_texts_away(name: str, fresh: bool) -> None:
    """At the first step only the second halves have gradients."""
    one = step(name, lora=20) if fresh else trained(name, 20)
    scene = shared(one, [ONE])
    assert texts(attack(scene)) == ONE


def test_adapters_leave_the_last_token_out_where_the_next_one_is_the_target() -> None:
    """It is read from the head's gradient, which is not shared (a deviation)."""
    scene = shared(step("llama-tied", "next-token", lora=20), [[[1, 17, 203, 44, 9, 2]]])
    assert texts(attack(scene)) == [[1, 17, 203, 44, 9]]
    assert any("the last token is left out" in one for one in DAGER.paper.deviations)


def test_adapters_of_a_rank_as_large_as_the_text_do_once_they_are_trained() -> None:
    scene = shared(trained("bert", 7), [ONE])
    assert texts(attack(scene)) == ONE


@pytest.mark.parametrize("fresh", [True, False])
def test_adapters_of_a_smaller_rank_are_refused(fresh: bool) -> None:
    one = step("bert", lora=3) if fresh else trained("bert", 3)
    scene = shared(one, [ONE])
    assert "rank of the adapters of layer 1" in str(why_not(DAGER(), scene.transcript, scene.knowledge))


# --- what fails -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama-untied"])
def test_noise_leaves_nothing_and_it_says_so(name: str) -> None:
    scene = shared(step(name), [ONE])
    generator = torch.Generator().manual_seed(1)
    noisy = changed(scene, lambda g: g + 0.01 * torch.randn(g.shape, generator=generator))
    assert texts(attack(noisy)) == [[]]


def test_pruning_leaves_nothing() -> None:
    scene = shared(step("gpt2"), [TWO])
    generator = torch.Generator().manual_seed(1)
    pruned = changed(scene, lambda g: g * (torch.rand(g.shape, generator=generator) < 0.5))
    assert texts(attack(pruned)) == [[], []]


def test_more_tokens_than_the_model_is_wide_leave_nothing() -> None:
    long = np.random.default_rng(0).integers(3, 300, 40).tolist()
    assert texts(attack(shared(step("gpt2"), [[long]]))) == [[]]


def test_without_the_first_layers_gradients_it_is_refused() -> None:
    scene = shared(step("bert"), [ONE])
    seen = scene.transcript.all(Gradients)[0]
    head = {n: g for n, g in seen.tensors.items() if ".layer.0." not in n}
    bare = Transcript((Gradients(head, 1, 0),), scene.transcript.vocab_size)
    assert re.search("no gradient .* layer 1", str(why_not(DAGER(), bare, scene.knowledge)))
    assert "which model" in str(why_not(DAGER(), scene.transcript, Knowledge()))


def test_a_spent_budget_returns_what_there_is() -> None:
    scene = shared(step("gpt2"), [TWO])
    guess = DAGER().run(scene.transcript, scene.knowledge, Budget(stopped=lambda: True), np.random.default_rng(0))
    assert guess.texts is not None
    assert len(guess.texts) == 2


def test_its_gradient_is_the_client_s() -> None:
    """The kit shares what the client would."""
    one = step("bert")
    scene = shared(one, [ONE])
    assert scene.knowledge.labels is not None
    ids, mask = pad_texts(ONE, 0)
    own = one.gradient(ids, mask, torch.from_numpy(scene.knowledge.labels))
    assert all(torch.equal(own[n], g) for n, g in scene.transcript.all(Gradients)[0].tensors.items())
