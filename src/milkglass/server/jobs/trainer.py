"""Trains a job: its checkpoints, its reports, and how it stops between two steps.

    checkpoint-N/   trained.safetensors, the optimiser's and the schedule's state, the trainer's; `complete` marks one
                    that was written to its end, `trained` one whose optimiser the disk had no room for
    reserve         as large as the next file that must be written; it is removed before a save and made again after it

Only what is trained is saved, into room that was reserved for it; frozen weights are in the model that the job began
with. The newest complete checkpoint is kept, and the best one if epochs are compared; folder.py says which one a job
resumes from. If the reserve cannot be made again, training stops while all that was learnt is on the disk.

Reported on held-out rows are, for classification, accuracy and the confusion counts of up to MAX_COUNTED_CLASSES
classes; for regression, Pearson's correlation; for language models, the loss alone. The worker knows classes by number
and never learns their names.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from milkglass.errors import SaveFailed
from milkglass.progress import TimeLeft
from milkglass.server.jobs.folder import all_checkpoints, checkpoint_to_resume, usable_checkpoints, write_event
from milkglass.server.jobs.needs import MAX_LIMIT_FACTOR, size_text
from milkglass.server.settings import FULL_DISK_ERRNOS, disk_full_error
from milkglass.server.spec import COMPLETE_MARK, IGNORED_LABEL, RESERVE_FILE, WEIGHTS_ONLY_MARK
from milkglass.system import trim_memory

TRAINED_FILE = "trained.safetensors"
MAX_COUNTED_CLASSES = 50  # classes of which the counts are reported
METRIC_NAMES = {"eval_loss": "eval_loss", "eval_accuracy": "accuracy", "eval_pearson": "pearson"}
# The metric by which the best epoch is chosen
BEST_EPOCH_METRIC = {"classification": "accuracy", "regression": "pearson", "causal-lm": "loss"}


class DiskReserve:
    """Reserves `size` bytes on the disk of `job`, a job's folder, as a file that is removed before they are needed."""

    def __init__(self, job: Path, size: int) -> None:
        self._path, self._size = job / RESERVE_FILE, size

    def take(self) -> None:
        """Reserves the room. Raises DiskFull if the disk has too little."""
        try:
            with self._path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, self._size)
        except OSError as error:
            self.release()
            if error.errno not in FULL_DISK_ERRNOS:
                raise
            full_error = disk_full_error()
            full_error.message += f": no {size_text(self._size)} are left for the next checkpoint"
            raise full_error from None

    def release(self) -> None:
        """Frees the room. Does nothing if none is reserved."""
        self._path.unlink(missing_ok=True)


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors that training changes, by name; tied weights once."""
    tensors = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    names = model.state_dict().keys()
    tensors |= {name: tensor for name, tensor in model.named_buffers() if name in names}
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def restore_trained_tensors(model: nn.Module, path: Path) -> None:
    """Copies the tensors of a file that holds `trained_tensors` into the model.

    Raises KeyError if the file lacks one of them.
    """
    tensors, targets = load_file(path), {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in trained_tensors(model):
        targets[name].copy_(tensors[name])


@contextmanager
def saving(noun: str) -> Iterator[None]:
    """Raises SaveFailed for any error inside the block: torch and the system have many kinds.

    Args:
        noun: what is written, such as "a checkpoint", for the message.
    """
    try:
        yield
    except Exception as error:
        hint = "the worker's log on the server says why"
        raise SaveFailed(f"{noun} could not be saved ({type(error).__name__})", hint) from error


@dataclass(frozen=True)
class PartLimit:
    """Limits the parts into which a step is divided.

    Attributes:
        tokens: the largest size of a part, which is the number of its rows times their `row_size`.
        logits: how many tokens the logits of one position count as (`needs.logits_in_tokens`).
    """

    tokens: int
    logits: float = 0.0

    def row_size(self, length: int, position_count: int) -> float:
        """Returns what a row counts as, in tokens.

        Args:
            length: its tokens, padding included.
            position_count: how many of its positions have logits.
        """
        return length + self.logits * position_count

    def ratio(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Returns the size of a batch divided by the limit; more than 1 is beyond it."""
        rows, length = batch["input_ids"].shape
        return rows * self.row_size(length, len(logit_positions(batch["labels"]))) / self.tokens


def logit_positions(labels: torch.Tensor) -> torch.Tensor:
    """Returns the positions at which some row predicts a label; none if labels are not of tokens.

    Args:
        labels: (rows, tokens) token labels, IGNORED_LABEL for none, or (rows,).
    """
    if labels.ndim == 1:
        return torch.empty(0, dtype=torch.long)
    return (labels[:, 1:] != IGNORED_LABEL).any(0).nonzero().squeeze(1)


def with_needed_logits(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's arguments by which it computes logits only at `logit_positions`. The loss is the same.

    A position's logits are as many numbers as the vocabulary has tokens, and most tokens of instructions and chats
    belong to the question, which predicts no label.
    """
    labels = batch["labels"]
    if labels.ndim == 1 or len(positions := logit_positions(labels)) == labels.shape[1] - 1:
        return dict(batch)
    if not len(positions):  # a model without logits has no loss
        positions = torch.zeros(1, dtype=torch.long, device=labels.device)
    return {**batch, "logits_to_keep": positions, "shift_labels": labels[:, 1 + positions]}


def split_batch(batch: Mapping[str, torch.Tensor], limit: PartLimit) -> list[dict[str, torch.Tensor]]:
    """Splits a padded batch into parts that are within the limit, or of one row that is beyond it.

    Rows of like length come together, and a part is padded to its own longest row only. Parts take time: a batch of up
    to MAX_LIMIT_FACTOR times the limit stays whole.

    Args:
        batch: tensors (rows, tokens), padded on the right, or (rows,).
        limit: the limit of a part.

    Returns:
        The parts, longest rows first; the batch alone if it stays whole.
    """
    if limit.ratio(batch) <= MAX_LIMIT_FACTOR:
        return [dict(batch)]
    lengths = batch["attention_mask"].sum(1)
    order = torch.argsort(lengths, descending=True, stable=True).tolist()
    parts = list[dict[str, torch.Tensor]]()
    while order:
        longest, count = max(1, int(lengths[order[0]])), 1
        while count < len(order):
            position_count = len(logit_positions(batch["labels"][order[: count + 1]]))
            if (count + 1) * limit.row_size(longest, position_count) > limit.tokens:
                break
            count += 1
        rows, order = torch.tensor(order[:count]), order[count:]
        parts.append(
            {name: tensor[rows][:, :longest] if tensor.ndim > 1 else tensor[rows] for name, tensor in batch.items()}
        )
    return parts


def label_count(batch: Mapping[str, torch.Tensor]) -> int:
    """Returns the number of labels over which a model averages its loss: the rows, or the tokens that are predicted."""
    labels = batch["labels"]
    return int((labels[:, 1:] != IGNORED_LABEL).sum()) if labels.ndim > 1 else len(labels)


@contextmanager
def gradient_checkpointing(model: nn.Module) -> Iterator[None]:
    """Turns on gradient checkpointing: of each layer only the inputs are kept.

    The backward pass computes the layer again. The gradients are the same, since the layer's dropout is drawn as it
    was. A model of which transformers does not mark the layers keeps everything; transformers' own switch would refuse
    it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = False


class CheckpointTrainer(Trainer):
    """Trains as transformers' Trainer does, and saves only what is trained. A save that fails ends the training.

    A step of many tokens goes through the model in parts, whose gradients are added, and a long row that cannot be
    split goes through it with `gradient_checkpointing`: that takes less memory and learns the same. Gradient
    accumulation in transformers does not do for a regression, whose loss it would not divide.
    """

    def __init__(self, reserve: DiskReserve, part_limit: PartLimit | None, **options: Any) -> None:
        """Sets the trainer up.

        Args:
            reserve: the room for the next save.
            part_limit: how much of a step goes through the model at once; None for all.
            options: see transformers' Trainer.
        """
        self._reserve, self._part_limit = reserve, part_limit
        self._failure: Exception | None = None
        super().__init__(**options)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Adds the gradients of a batch, and returns its loss."""
        if self._part_limit is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if len(parts := split_batch(inputs, self._part_limit)) == 1:
            with self._checkpointing_for(model, inputs):
                return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        count, total = label_count(inputs), torch.zeros((), device=self.args.device)
        for part in parts:
            if not (part_count := label_count(part)):
                continue
            with self._checkpointing_for(model, part):
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, self._prepare_inputs(part)) * (part_count / count)
                self.accelerator.backward(loss)
            total += loss.detach()
            trim_memory()  # parts of other lengths do not fit into the memory that this one leaves
        return total

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        """Returns what transformers' Trainer does, with logits only where a label is predicted."""
        return super().compute_loss(model, with_needed_logits(inputs), *arguments, **options)

    def _checkpointing_for(self, model: nn.Module, part: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Returns `gradient_checkpointing` for a part that is far beyond the limit, else nothing to enter."""
        assert self._part_limit is not None
        if self._part_limit.ratio(part) > MAX_LIMIT_FACTOR:
            return gradient_checkpointing(model)
        return nullcontext()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            save_file(trained_tensors(self.model), folder / TRAINED_FILE, metadata={"format": "pt"})

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._reserve.release()
        with saving("a checkpoint"):
            super()._save_checkpoint(model, trial)
            if self._failure is not None:
                (Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}" / WEIGHTS_ONLY_MARK).touch()
                raise self._failure

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves both. If the optimiser cannot be written, the weights are kept without it."""
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        except Exception as error:  # noqa: BLE001  (torch and the system have many names for a disk that is full)
            self._failure = error
            (Path(output_dir) / OPTIMIZER_NAME).unlink(missing_ok=True)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)  # type: ignore[union-attr]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = Path(resume_from_checkpoint) / TRAINED_FILE
        if path.is_file():
            restore_trained_tensors(self.model, path)
        else:  # an earlier version's: the whole model
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or (Path(checkpoint) / OPTIMIZER_NAME).is_file():
            return
        schedule = Path(checkpoint) / SCHEDULER_NAME
        if schedule.is_file():  # without the optimiser its moments begin at zero, at the rate of that step
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))  # type: ignore[union-attr]
            for group, learning_rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):  # type: ignore[union-attr]
                group["lr"] = learning_rate

    def _load_best_model(self) -> None:
        path = Path(str(self.state.best_model_checkpoint)) / TRAINED_FILE
        if path.is_file():
            restore_trained_tensors(self.model, path)
        else:
            super()._load_best_model()


# --- in the job's folder ----------------------------------------------------------------------------------------------
def prepare_resumption(job: Path) -> Path | None:
    """Removes what a kill left half-written, and returns the checkpoint to resume from. None: there is none."""
    drop_unfinished(job)
    return checkpoint_to_resume(job)


def drop_unfinished(job: Path) -> None:
    """Removes incomplete checkpoints and results, and weights without an optimiser beside a complete checkpoint."""
    newest = checkpoint_to_resume(job)
    lacks_optimiser = newest is not None and not (newest / COMPLETE_MARK).is_file()
    usable = [
        checkpoint
        for checkpoint in usable_checkpoints(job)
        if lacks_optimiser or (checkpoint / COMPLETE_MARK).is_file()
    ]
    for folder in [job / "result.partial", *all_checkpoints(job)]:
        if folder not in usable:
            shutil.rmtree(folder, ignore_errors=True)  # of what stays, nothing is read


def mark_complete_and_prune(job: Path, step: int, best_checkpoint: str | None) -> None:
    """Marks the checkpoint of this step as complete, and removes older ones but the best."""
    newest = job / "checkpoints" / f"checkpoint-{step}"
    (newest / COMPLETE_MARK).touch()
    for folder in all_checkpoints(job):
        if folder != newest and (best_checkpoint is None or folder.name != Path(best_checkpoint).name):
            shutil.rmtree(folder, ignore_errors=True)


def classification_metrics(prediction: EvalPrediction) -> dict[str, Any]:
    """Returns accuracy, and confusion: a row for each class with how often its texts were taken for each class."""
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids, np.int64)
    guess, classes = logits.argmax(-1), logits.shape[-1]
    metrics: dict[str, Any] = {"accuracy": float((guess == labels).mean())}
    if classes <= MAX_COUNTED_CLASSES:
        counts = np.bincount(labels * classes + guess, minlength=classes * classes)
        metrics["confusion"] = counts.reshape(classes, classes).tolist()
    return metrics


def pearson_metric(prediction: EvalPrediction) -> dict[str, float]:
    """Returns Pearson's correlation of predictions and labels; nan, which is not reported, if one is constant."""
    answers = np.asarray(prediction.predictions, np.float64).reshape(-1)
    labels = np.asarray(prediction.label_ids, np.float64).reshape(-1)
    answers, labels = answers - answers.mean(), labels - labels.mean()
    denominator = float(np.sqrt((answers @ answers) * (labels @ labels)))
    return {"pearson": float(answers @ labels) / denominator if denominator > 0 else math.nan}


METRIC_FUNCTIONS: Mapping[str, Callable[[EvalPrediction], dict[str, Any]]] = {
    "classification": classification_metrics,
    "regression": pearson_metric,
}


def reported_figures(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the finite figures of the trainer's metrics that a status keeps."""
    figures = {METRIC_NAMES[name]: value for name, value in (metrics or {}).items() if name in METRIC_NAMES}
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


def evaluation_event_data(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what an event says of an evaluation: the finite figures, and the confusion counts if there are any."""
    counts = (metrics or {}).get("eval_confusion")
    return {**reported_figures(metrics), **({} if counts is None else {"confusion": counts})}


class JobCallback(TrainerCallback):
    """Writes events, and stops the trainer on SIGTERM or when the job is cancelled.

    Attributes:
        job: the job's folder.
        reserve: the room for the next save, once it was reserved.
        is_interrupted: whether SIGTERM had come when `poll` was last called.
        is_cancelled: whether the job was cancelled when `poll` was last called.
    """

    def __init__(self, job: Path) -> None:
        self.job = job
        self.reserve: DiskReserve | None = None
        self.is_interrupted = self.is_cancelled = False
        self._is_signalled = False
        self._time_left = TimeLeft(0)

    def emit(self, message: str, data: dict[str, Any] | None = None, is_failure: bool = False) -> None:
        """Writes an event of the job, of the level "error" if `is_failure`."""
        write_event(self.job, message, "error" if is_failure else "info", data)

    def interrupt(self, *_: object) -> None:
        """Notes that training is to stop at the next step, to be resumed later. It handles SIGTERM."""
        self._is_signalled = True

    def poll(self) -> None:
        """Updates `is_interrupted` and `is_cancelled`, which do not change until the next call."""
        self.is_interrupted, self.is_cancelled = self._is_signalled, (self.job / "cancel").exists()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._time_left = TimeLeft(state.max_steps)
        self._time_left.estimate(state.global_step)
        progress = {"step": state.global_step, "total_steps": state.max_steps}
        self.emit(f"training from step {state.global_step} of {state.max_steps}", progress)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # a run shorter than `logging_steps` has a last loss, too
        self.poll()
        if self.is_interrupted or (args.load_best_model_at_end and state.global_step % args.save_steps == 0):
            # If the best epoch is sought, the trainer itself saves at the ends of epochs alone
            control.should_save = True
        if self.is_interrupted or self.is_cancelled:
            control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.is_interrupted or self.is_cancelled:
            control.should_evaluate = False  # the epoch has not ended, and a server that stops does not wait for it

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if not logs or "loss" not in logs:
            return
        seconds_left = self._time_left.estimate(state.global_step)
        self.emit(
            f"step {state.global_step} of {state.max_steps}, loss {logs['loss']:.4f}",
            {
                "step": state.global_step,
                "total_steps": state.max_steps,
                "loss": float(logs["loss"]),
                "learning_rate": float(logs.get("learning_rate", 0.0)),
                "epoch": float(state.epoch or 0.0),
                **({} if seconds_left is None else {"eta_seconds": round(seconds_left, 1)}),
            },
        )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in reported_figures(metrics).items())
        self.emit(f"evaluation: {figures}", {"step": state.global_step, **evaluation_event_data(metrics)})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        mark_complete_and_prune(self.job, state.global_step, state.best_model_checkpoint)
        self.emit(f"checkpoint at step {state.global_step}")
        if self.reserve is not None and not self.is_interrupted:
            self.reserve.take()
