"""Checkpoints of a training: only what is trained is saved, into room that was reserved for it.

    checkpoint-N/   trained.safetensors, the optimiser's and the schedule's state, the trainer's; `complete` marks one
                    that was written to its end, `trained` one whose optimiser the disk had no room for
    reserve         as large as the next file that must be written; it is removed before a save and made again after it

Frozen weights are in the model that the job began with. The newest complete checkpoint is kept, and the best one if
epochs are compared; kept.py says which one a job resumes from. If the reserve cannot be made again, training stops
while all that was learnt is on the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from milkglass.errors import SaveFailed
from milkglass.server.jobs.kept import checkpoints, marked, resumed_from
from milkglass.server.jobs.needs import shown
from milkglass.server.settings import FULL_DISK, disk_full
from milkglass.server.spec import COMPLETE, RESERVE, SHORT

TRAINED = "trained.safetensors"


class Reserve:
    """Reserved room on the job's disk."""

    def __init__(self, job: Path, size: int) -> None:
        self._path, self._size = job / RESERVE, size

    def take(self) -> None:
        """Reserves the room. Raises DiskFull if the disk has too little."""
        try:
            with self._path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, self._size)
        except OSError as error:
            self.release()
            if error.errno not in FULL_DISK:
                raise
            full = disk_full()
            full.message += f": no {shown(self._size)} are left for the next checkpoint"
            raise full from None

    def release(self) -> None:
        self._path.unlink(missing_ok=True)


def drop_reserve(job: Path) -> None:
    (job / RESERVE).unlink(missing_ok=True)


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors that training changes, by name; tied weights once."""
    learnt = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    saved = model.state_dict().keys()
    learnt |= {name: tensor for name, tensor in model.named_buffers() if name in saved}
    return {name: tensor.detach().contiguous() for name, tensor in learnt.items()}


@torch.no_grad()
def restore(model: nn.Module, path: Path) -> None:
    """Loads what `trained` returned. Raises KeyError for a model that is trained in other parts."""
    held, into = load_file(path), {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in trained(model):
        into[name].copy_(held[name])


@contextmanager
def saving(what: str) -> Iterator[None]:
    """Raises SaveFailed for any error while something is written: torch and the system have many kinds."""
    try:
        yield
    except Exception as error:
        hint = "the worker's log on the server says why"
        raise SaveFailed(f"{what} could not be saved ({type(error).__name__})", hint) from error


class CheckpointTrainer(Trainer):
    """A trainer that saves only what is trained. A save that fails ends the training."""

    def __init__(self, reserve: Reserve, **given: Any) -> None:
        self._reserve = reserve
        self._failure: Exception | None = None
        super().__init__(**given)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            save_file(trained(self.model), folder / TRAINED, metadata={"format": "pt"})

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves in the reserved room. Raises SaveFailed for any error."""
        self._reserve.release()
        with saving("a checkpoint"):
            super()._save_checkpoint(model, trial)
            if self._failure is not None:
                (Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}" / SHORT).touch()
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
        path = Path(resume_from_checkpoint) / TRAINED
        if path.is_file():
            restore(self.model, path)
        else:  # an earlier version's: the whole model
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or (Path(checkpoint) / OPTIMIZER_NAME).is_file():
            return
        schedule = Path(checkpoint) / SCHEDULER_NAME
        if schedule.is_file():  # without the optimiser its moments begin anew, at the rate of that step
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))  # type: ignore[union-attr]
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):  # type: ignore[union-attr]
                group["lr"] = rate

    def _load_best_model(self) -> None:
        path = Path(str(self.state.best_model_checkpoint)) / TRAINED
        if path.is_file():
            restore(self.model, path)
        else:
            super()._load_best_model()


# --- in the job's folder ----------------------------------------------------------------------------------------------
def newest_checkpoint(job: Path) -> Path | None:
    """Returns the checkpoint that a job resumes from, and removes what a kill left half-written."""
    drop_unfinished(job)
    return resumed_from(job)


def drop_unfinished(job: Path) -> None:
    """Removes incomplete checkpoints and results, and weights without an optimiser beside a complete checkpoint."""
    kept = resumed_from(job)
    short = kept is not None and not (kept / COMPLETE).is_file()
    needed = [checkpoint for checkpoint in marked(job) if short or (checkpoint / COMPLETE).is_file()]
    for folder in [job / "result.partial", *checkpoints(job)]:
        if folder not in needed:
            shutil.rmtree(folder, ignore_errors=True)  # of what stays, nothing is read


def complete(job: Path, step: int, best: str | None) -> None:
    """Marks the checkpoint of this step as complete, and removes older ones but the best."""
    newest = job / "checkpoints" / f"checkpoint-{step}"
    (newest / COMPLETE).touch()
    for folder in checkpoints(job):
        if folder != newest and (best is None or folder.name != Path(best).name):
            shutil.rmtree(folder, ignore_errors=True)
