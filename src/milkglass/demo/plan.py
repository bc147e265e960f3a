"""How much the demo does, and with which settings: some four minutes on two cores, or much less with `quick`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEVER = 10_000  # steps between checkpoints: a job this short needs none on the way

SORTING = {
    "task": "classification",
    "method": "full",
    "n_epochs": 3.0,
    "batch_size": 16,
    "learning_rate": 2e-4,
    "warmup_ratio": 0.1,
    "max_length": 64,
    "logging_steps": 5,
    "save_steps": NEVER,
}
# ObfusLM's recipe made small: rank 16 in the place of 256, two layers in full at each end, the tables trained.
WRITING = {
    "task": "causal-lm",
    "method": "lora",
    "lora_rank": 16,
    "lora_alpha": 32,
    "full_first": 2,
    "full_last": 2,
    "train_tables": True,
    "max_steps": 30,
    "batch_size": 4,
    "learning_rate": 5e-4,
    "warmup_ratio": 0.1,
    "max_length": 128,
    "logging_steps": 2,
    "save_steps": NEVER,
}


@dataclass(frozen=True)
class DemoPlan:
    """asked: test messages to classify. prompts: to answer, with `new_tokens` at most each."""

    sorting: Mapping[str, Any]
    writing: Mapping[str, Any]
    asked: int
    prompts: int
    new_tokens: int


USUAL = DemoPlan(SORTING, WRITING, asked=120, prompts=6, new_tokens=32)
QUICK = DemoPlan(
    SORTING | {"max_steps": 6, "logging_steps": 3},
    WRITING | {"max_steps": 2, "logging_steps": 1},
    asked=24,
    prompts=2,
    new_tokens=12,
)
