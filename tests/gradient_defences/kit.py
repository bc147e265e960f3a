"""What the tests of gradients share: models, a batch, and a defence's way from a batch to what is shared."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from milkglass.gradient_defences.defence import GradientDefence, share_gradient
from milkglass.noise.stream import Stream
from milkglass.threat.training_step import SharedStep, Task, pad_texts

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import gradients as literal  # noqa: E402, F401

CASES: list[tuple[str, Task]] = [
    ("bert", "classification"),
    ("distilbert", "classification"),
    ("gpt2", "next-token"),
    ("llama-tied", "next-token"),
    ("llama-untied", "classification"),
]
IDS = [[5, 9, 7, 6], [8, 11, 4]]


def given(step: SharedStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    ids, mask = pad_texts(IDS, pad_id=1)
    return ids, mask, torch.tensor([0, 1]) if step.task == "classification" else None


def shared(step: SharedStep, shield: GradientDefence, seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(share_gradient(step, *given(step), shield, 0, Stream.of_seed(seed)).tensors)


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double()
