"""A job's training (server/training.py) and transformers' Trainer, written as its documents have it, on the same rows.

Both train the scrambled MiniLM in this process, with the same seed, so that their batches are the same. Compared is a
step: the time from the first report of a loss to the last one, over the steps between them.
"""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from milkglass.client.codec.codec import Codec
from milkglass.client.data.marked_rows import write_tensors
from milkglass.server import training
from milkglass.server.jobs.trainer import JobCallback
from milkglass.server.spec import Event, Hyperparameters, JobSpec

BATCH, LABELS, EVERY = 16, 3, 10  # rows of a step, classes, and steps from one report of a loss to the next
Losses = dict[int, tuple[float, float]]  # by step: when a loss was reported, and what it was


class Clock(TrainerCallback):
    """When each loss was reported, and what it was."""

    def __init__(self) -> None:
        self.losses: Losses = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = (time.time(), float(logs["loss"]))


@dataclass(frozen=True)
class Data:
    """Rows in a file for the job, and in memory for the bare Trainer.

    Attributes:
        original: the plain model, whose tokenizer pads.
        model: the scrambled one.
        folder: for files of both.
    """

    original: Path
    model: Path
    folder: Path
    rows: Sequence[Mapping[str, Any]]
    settings: Hyperparameters

    @classmethod
    def of(cls, codec: Codec, original: Path, model: Path, folder: Path, texts: Sequence[str]) -> Data:
        ids = [one.tolist() for one in codec.encode(texts).ids]
        rows = [{"input_ids": one, "labels": place % LABELS} for place, one in enumerate(ids)]
        columns = {
            "lengths": [len(one) for one in ids],
            "input_ids": sum(ids, []),
            "labels": [r["labels"] for r in rows],
        }
        write_tensors(folder / "train.safetensors", [{name: np.array(one) for name, one in columns.items()}])
        assert len(rows) % (EVERY * BATCH) == 0, "both sides report the last step where it is one of every EVERY"
        chosen = {"num_labels": LABELS, "batch_size": BATCH, "n_epochs": 1, "logging_steps": EVERY}
        settings = Hyperparameters.model_validate(chosen)
        return cls(original, model, folder, rows, settings)

    def ours(self) -> Losses:
        """Of what a job runs."""
        return job_losses(self.folder / "job", self.model, self.folder / "train.safetensors", self.settings)

    def bare(self) -> Losses:
        """Of a bare Trainer."""
        chosen = self.settings
        set_seed(chosen.seed)
        model = AutoModelForSequenceClassification.from_pretrained(self.model, num_labels=LABELS, dtype=torch.float32)
        arguments = TrainingArguments(
            str(self.folder / "bare"), num_train_epochs=chosen.n_epochs, per_device_train_batch_size=BATCH,
            learning_rate=chosen.learning_rate, seed=chosen.seed, train_sampling_strategy="group_by_length",
            logging_steps=EVERY, logging_first_step=True, save_strategy="no", report_to=[],
            disable_tqdm=True, dataloader_pin_memory=False, use_cpu=True,
        )  # fmt: skip
        collate = DataCollatorWithPadding(AutoTokenizer.from_pretrained(self.original))
        return trainer_losses(model=model, args=arguments, train_dataset=list(self.rows), data_collator=collate)


def job_losses(job: Path, model: Path, train: Path, settings: Hyperparameters) -> Losses:
    """Of what a job runs, in a new folder."""
    shutil.rmtree(job, ignore_errors=True)  # of the round before
    job.mkdir(parents=True)
    spec = JobSpec.model_validate({"model": str(model), "train": str(train), "hyperparameters": settings})
    with redirect_stdout(io.StringIO()):  # Trainer prints each report
        training.train(job, spec, JobCallback(job))
    lines = (job / "events.jsonl").read_text("utf-8").splitlines()
    events = [one for one in map(Event.model_validate_json, lines) if one.data and "loss" in one.data]
    return {one.data["step"]: (one.time, one.data["loss"]) for one in events if one.data}


def trainer_losses(**options: Any) -> Losses:
    """Of transformers' Trainer with these options."""
    clock = Clock()
    with redirect_stdout(io.StringIO()):
        Trainer(**options, callbacks=[clock]).train()
    return clock.losses


def step_seconds(losses: Losses) -> float:
    first, last = min(losses), max(losses)
    return (losses[last][0] - losses[first][0]) / (last - first)


def require_alike(ours: Losses, other: Losses) -> None:
    """Times can be compared where both sides train alike."""
    apart = max(abs(ours[step][1] - other[step][1]) for step in ours.keys() | other.keys())
    if apart > 1e-3:
        raise RuntimeError(f"the job and the bare Trainer do not train alike: losses differ by {apart:.1e}")
