"""Reports of a training, and how it is stopped between two steps.

Reported on held-out rows are, for classification, accuracy and the confusion counts of up to MAX_COUNTED_CLASSES
classes; for regression, Pearson's correlation; for language models, the loss alone. The worker knows classes by number
and never learns their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from milkglass.progress import TimeLeft
from milkglass.server.jobs import events
from milkglass.server.jobs.checkpoints import Reserve, complete

MAX_COUNTED_CLASSES = 50  # classes of which the counts are reported
NAMES = {"eval_loss": "eval_loss", "eval_accuracy": "accuracy", "eval_pearson": "pearson"}
BEST = {"classification": "accuracy", "regression": "pearson", "causal-lm": "loss"}  # what decides the best epoch


def classified(prediction: EvalPrediction) -> dict[str, Any]:
    """Returns accuracy, and confusion: a row for each class with how often its texts were taken for each class."""
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids, np.int64)
    guess, classes = logits.argmax(-1), logits.shape[-1]
    result: dict[str, Any] = {"accuracy": float((guess == labels).mean())}
    if classes <= MAX_COUNTED_CLASSES:
        counts = np.bincount(labels * classes + guess, minlength=classes * classes)
        result["confusion"] = counts.reshape(classes, classes).tolist()
    return result


def pearson(prediction: EvalPrediction) -> dict[str, float]:
    """Returns Pearson's correlation of predictions and labels; nan, which is not reported, if one is constant."""
    answers = np.asarray(prediction.predictions, np.float64).reshape(-1)
    expected = np.asarray(prediction.label_ids, np.float64).reshape(-1)
    answers, expected = answers - answers.mean(), expected - expected.mean()
    below = float(np.sqrt((answers @ answers) * (expected @ expected)))
    return {"pearson": float(answers @ expected) / below if below > 0 else math.nan}


MEASURES: Mapping[str, Callable[[EvalPrediction], dict[str, Any]]] = {
    "classification": classified,
    "regression": pearson,
}


def numbers_of(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the figures of the trainer's metrics that a status keeps, without those that are not finite."""
    return {NAMES[n]: float(value) for n, value in (metrics or {}).items() if n in NAMES and math.isfinite(value)}


def event_data(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the figures of an event: a status's numbers, and the confusion counts."""
    counts = (metrics or {}).get("eval_confusion")
    return {**numbers_of(metrics), **({} if counts is None else {"confusion": counts})}


class Reporter(TrainerCallback):
    """Writes events (events.jsonl), and stops the trainer on SIGTERM or when the job is cancelled.

    Attributes:
        reserve: the room for the next save, once it was reserved.
        interrupted: whether SIGTERM had come when `look` was last called.
        cancelled: whether the job was cancelled when `look` was last called.
    """

    def __init__(self, job: Path) -> None:
        self.job = job
        self.reserve: Reserve | None = None
        self.interrupted = self.cancelled = False
        self._signalled = False
        self._left = TimeLeft(0)

    def emit(self, message: str, data: dict[str, Any] | None = None, failed: bool = False) -> None:
        events.emit(self.job, message, "error" if failed else "info", data)

    def interrupt(self, *_: object) -> None:
        self._signalled = True

    def look(self) -> None:
        """Updates `interrupted` and `cancelled`, which do not change until the next call."""
        self.interrupted, self.cancelled = self._signalled, (self.job / "cancel").exists()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._left = TimeLeft(state.max_steps)
        self._left.after(state.global_step)
        begun = {"step": state.global_step, "total_steps": state.max_steps}
        self.emit(f"training from step {state.global_step} of {state.max_steps}", begun)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # a run shorter than `logging_steps` has a last loss, too
        self.look()
        if self.interrupted or (args.load_best_model_at_end and state.global_step % args.save_steps == 0):
            control.should_save = True  # with the best epoch in view the trainer itself saves at their ends alone
        if self.interrupted or self.cancelled:
            control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.interrupted or self.cancelled:
            control.should_evaluate = False  # the epoch has not ended, and a server that stops does not wait for it

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if not logs or "loss" not in logs:
            return
        left = self._left.after(state.global_step)
        self.emit(
            f"step {state.global_step} of {state.max_steps}, loss {logs['loss']:.4f}",
            {
                "step": state.global_step,
                "total_steps": state.max_steps,
                "loss": float(logs["loss"]),
                "learning_rate": float(logs.get("learning_rate", 0.0)),
                "epoch": float(state.epoch or 0.0),
                **({} if left is None else {"eta_seconds": round(left, 1)}),
            },
        )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        info = ", ".join(f"{name} {value:.4f}" for name, value in numbers_of(metrics).items())
        self.emit(f"evaluation: {info}", {"step": state.global_step, **event_data(metrics)})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        complete(self.job, state.global_step, state.best_model_checkpoint)
        self.emit(f"checkpoint at step {state.global_step}")
        if self.reserve is not None and not self.interrupted:
            self.reserve.take()
