"""One step of shared training: both sides' gradients are the same, and are those of the model's own loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from milkglass.errors import UsageError
from milkglass.threat.training_step import SharedStep, Task, pad_texts
from tests import tiny

IDS = [[5, 9, 7, 6], [8, 11, 4]]
CASES: list[tuple[str, Task]] = [
    ("bert", "classification"),
    ("distilbert", "classification"),
    ("roberta", "classification"),
    ("mpnet", "classification"),
    ("gpt2", "classification"),
    ("llama-untied", "classification"),
    ("gpt2", "next-token"),
    ("llama-tied", "next-token"),
    ("gemma2", "next-token"),
    ("qwen3", "next-token"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in {name for name, _ in CASES}:
        tiny.save(name, root / name)
    return root


def given(task: Task) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, mask = pad_texts(IDS, pad_id=1)
    return ids, mask, torch.tensor([0, 1]) if task == "classification" else ids


@pytest.mark.parametrize(("name", "task"), CASES)
def test_whoever_embeds_the_same_texts_has_the_same_gradient(home: Path, name: str, task: Task) -> None:
    step = SharedStep.open(home / name, task)
    ids, mask, targets = given(task)
    shared = step.gradient(ids, mask, targets)
    assert set(shared) == set(step.parameter_names)
    assert step.table_name is not None
    assert (shared[step.table_name].abs().sum(1) > 0)[[5, 9, 7, 6, 8, 11, 4]].all()
    names = [one for one in step.parameter_names if one != step.table_name and shared[one].abs().sum() > 0]
    embeds = step.embed(ids).detach().requires_grad_()
    found = step.dummy_gradients(embeds, mask, targets, names)
    for one, grad in zip(names, found, strict=True):
        assert torch.allclose(grad, shared[one], atol=1e-5), one
    sum((grad * grad).sum() for grad in found).backward()  # type: ignore[union-attr]
    assert embeds.grad is not None
    assert embeds.grad.abs().sum() > 0


@pytest.mark.parametrize(("name", "task"), CASES)
def test_padding_changes_nothing(home: Path, name: str, task: Task) -> None:
    step = SharedStep.open(home / name, task)
    ids, mask, targets = given(task)
    padded = step.gradient(ids[1:], mask[1:], targets[1:])
    bare = step.gradient(ids[1:, :3], mask[1:, :3], targets[1:] if task == "classification" else targets[1:, :3])
    for one in step.parameter_names:
        assert torch.allclose(padded[one], bare[one], atol=1e-5), one


def test_the_loss_is_the_model_s_own(home: Path) -> None:
    step = SharedStep.open(home / "llama-tied", "next-token")
    ids, mask, _ = given("next-token")
    model = AutoModelForCausalLM.from_pretrained(home / "llama-tied").eval()
    asked = ids.masked_fill(mask == 0, -100)
    own = model(input_ids=ids, attention_mask=mask, labels=asked).loss
    assert torch.allclose(step.loss(step.embed(ids), mask, ids), own, atol=1e-5)


def test_soft_targets_that_are_certain_are_hard_ones(home: Path) -> None:
    step = SharedStep.open(home / "gpt2", "next-token")
    ids, mask, _ = given("next-token")
    soft = torch.nn.functional.one_hot(ids, len(step.table)).float()
    embeds = step.embed(ids)
    assert torch.allclose(step.loss(embeds, mask, soft), step.loss(embeds, mask, ids), atol=1e-6)


def test_adapters_alone_are_shared(home: Path) -> None:
    step = SharedStep.open(home / "llama-untied", "classification", lora_rank=4)
    assert step.table_name is None
    assert {one.split(".")[-1] for one in step.parameter_names if "lora" not in one} == {"weight"}
    assert all("lora_" in one or one == "score.weight" for one in step.parameter_names)
    ids, mask, targets = given("classification")
    shared = step.gradient(ids, mask, targets)
    assert shared["model.layers.0.self_attn.q_proj.lora_A.default.weight"].shape == (4, 32)


def test_adapters_of_transposed_layers(home: Path) -> None:
    step = SharedStep.open(home / "gpt2", "next-token", lora_rank=4)
    ids, mask, _ = given("next-token")
    shared = step.gradient(ids, mask, None)
    assert shared and all("lora_" in one for one in shared)


def test_the_head_comes_from_the_seed(home: Path) -> None:
    one, same, other = (SharedStep.open(home / "bert", seed=seed).module.classifier.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_what_is_refused(home: Path) -> None:
    with pytest.raises(UsageError, match="encoder"):
        SharedStep.open(home / "bert", "next-token")
    step = SharedStep.open(home / "gpt2", "next-token")
    with pytest.raises(UsageError, match="second token"):
        step.gradient(torch.tensor([[5]]), torch.tensor([[1]]), None)
    with pytest.raises(UsageError, match="a class"):
        SharedStep.open(home / "gpt2").gradient(torch.tensor([[5, 6]]), torch.tensor([[1, 1]]), None)
    with pytest.raises(UsageError, match="no parameter"):
        SharedStep(step.module.requires_grad_(False), "next-token")
