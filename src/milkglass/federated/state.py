"""Keeps in a folder what a federated run has done, so that it goes on after its last finished round.

    run.json                 the job and its settings, how many rounds are done, who was missing in each
    weights-N.safetensors    the weights after N rounds, by Hugging Face's names
    updates/round-N/         each update as it was sent, for a leakage audit: SITE.safetensors, and SITE.json:
                             {"milkglass_update": 1, "site": ..., "round": N, "method": ..., "texts": b, "steps": s}

A round's weights are written before run.json names them, and the earlier ones are removed after that: whenever the
process dies, run.json names weights that are there.

Updates hold only what the server saw: no text, ids, labels, or which rows were in a batch. FedAvg's update of
several steps is recorded as `Gradients` too, but is the sum of several batches' gradients: `steps` says so. Folders
count rounds from 0, messages from 1.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from milkglass import files
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.federated.rounds import Tensors, Update
from milkglass.models.checkpoint import json_text, read_json
from milkglass.threat.observations import Gradients

RUN_FILE, FORMAT_VERSION = "run.json", 2
LOST_HINT = "bring it back from a copy, or do the run again in a new folder: what was sent cannot be worked out"
SAME_HINT = "give the same options to go on with it, or a new folder"


@dataclass(frozen=True)
class FinishedRound:
    """Records a finished round.

    Attributes:
        missing: the names of the sites that dropped out.
        update_norm: the L2 norm of the mean update.
        loss: the loss before the round, in nats, over the texts of the round. None: sites do not report it.
    """

    missing: tuple[str, ...]
    update_norm: float
    loss: float | None = None


@dataclass(frozen=True)
class FederatedRun:
    """Holds what the folder of a federated run records of it.

    Attributes:
        folder: the run's folder.
        job: the digest of all that decides the weights.
        finished_rounds: the rounds that are finished, in order.
        settings: what the server knows of the run (`run_settings`), from which an audit repeats the rounds. {}: a
            run of an earlier version.
    """

    folder: Path
    job: str
    finished_rounds: tuple[FinishedRound, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, job: str, weights: Tensors, settings: Mapping[str, Any] | None = None) -> FederatedRun:
        """Opens the run of a folder, or begins one there.

        Args:
            folder: the run's folder, or a new one.
            job: the digest of all that decides the weights.
            weights: the weights before the first round.
            settings: what the server knows of the job.

        Raises:
            UsageError: the folder holds something else, or a run of another job.
            CorruptCheckpoint: the run is damaged.
        """
        if (folder / RUN_FILE).is_file():
            run = cls.read(folder)
            if run.job != job:
                raise UsageError(f"{folder} is a run with {_differences_text(run.settings, settings or {})}", SAME_HINT)
            return run
        require_run_or_new_folder(folder)
        files.make_private_dir(folder, restrict_existing=True)  # an existing empty folder may be open to others
        run = cls(folder, job, settings=settings or {})
        run._write(weights)
        return run

    @classmethod
    def read(cls, folder: Path) -> FederatedRun:
        """Reads a run that was begun.

        Raises:
            UsageError: the folder holds no run.
            CorruptCheckpoint: the run is damaged.
        """
        require_begun_run(folder)
        job, settings, finished_rounds = _read_run(folder)
        return cls(folder, job, finished_rounds, settings)

    def load_weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights after the last finished round. Raises CorruptCheckpoint."""
        try:
            return load_file(self.weights_file)
        except (OSError, SafetensorError):
            raise CorruptCheckpoint(f"{self.weights_file.name} is damaged or gone", "begin a new run") from None

    def begin_round(self) -> None:
        """Removes what an interrupted run left of the next round."""
        shutil.rmtree(self.folder / "updates" / f"round-{len(self.finished_rounds)}", ignore_errors=True)
        for partial in self.folder.glob(".*.tmp"):
            partial.unlink()

    def finish_round(self, weights: Tensors, finished_round: FinishedRound) -> FederatedRun:
        """Writes a further finished round, with the weights after it, and returns the run that includes it."""
        run = replace(self, finished_rounds=(*self.finished_rounds, finished_round))
        run._write(weights)
        self.weights_file.unlink(missing_ok=True)
        return run

    @property
    def weights_file(self) -> Path:
        """Returns the path of the weights after the last finished round."""
        return self.folder / f"weights-{len(self.finished_rounds)}.safetensors"

    def _write(self, weights: Tensors) -> None:
        """Writes the weights, then run.json."""
        with files.atomic_path(self.weights_file) as path:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
        rounds = [
            {"missing": list(finished_round.missing), "length": finished_round.update_norm, "loss": finished_round.loss}
            for finished_round in self.finished_rounds
        ]
        document = {
            "milkglass_federated": FORMAT_VERSION, "job": self.job, "settings": dict(self.settings), "rounds": rounds,
        }  # fmt: skip
        files.write(self.folder / RUN_FILE, json_text(document))


def require_begun_run(folder: Path) -> None:
    """Raises UsageError if the folder holds no run that came to its first round. For use before long work."""
    if (folder / RUN_FILE).is_file():
        return
    if (folder / "sites").is_dir():
        raise UsageError(
            f"{folder} was stopped before its first round: it has no {RUN_FILE}",
            "run the same `milkglass federated run` command again: it goes on",
        )
    raise UsageError(f"{folder} is not a run: it has no {RUN_FILE}", "give a folder that `federated run` wrote")


def require_run_or_new_folder(folder: Path) -> None:
    """Raises UsageError if the folder holds anything but a run. For use before long work."""
    if (folder / RUN_FILE).is_file():
        return
    if folder.is_file():
        raise UsageError(f"{folder} is a file, not a folder", "give a new folder")
    foreign_names = [entry.name for entry in folder.iterdir() if entry.name != "sites"] if folder.is_dir() else []
    unfinished_prefixes = ("weights-0.", ".weights-0.", f".{RUN_FILE}.")  # of a run that died before its first state
    if any(not name.startswith(unfinished_prefixes) for name in foreign_names):
        raise UsageError(f"{folder} is not a run and is not empty", "give a new folder")


def _differences_text(recorded: Mapping[str, Any], requested: Mapping[str, Any]) -> str:
    """Returns, in words, how a run's settings differ from those requested now."""
    names = [name for name in sorted({*recorded, *requested}) if recorded.get(name) != requested.get(name)]
    if not names:
        return "another model, other sites' rows or another shield"
    return ", ".join(f"{name} = {recorded.get(name)}, not {requested.get(name)}" for name in names)


def _read_run(folder: Path) -> tuple[str, Mapping[str, Any], tuple[FinishedRound, ...]]:
    """Returns the job, the settings and the finished rounds of a run's folder. Raises CorruptCheckpoint."""
    document = read_json(folder / RUN_FILE)
    match document:
        case {"milkglass_federated": version, "job": str(job), "rounds": list(rounds)} if version == FORMAT_VERSION:
            settings = document.get("settings", {})
            finished_rounds = tuple(_finished_round(entry) for entry in rounds)
            return job, settings if isinstance(settings, dict) else {}, finished_rounds
    raise CorruptCheckpoint(f"{RUN_FILE} of {folder} is not of version {FORMAT_VERSION}, or damaged", "begin a new run")


def _finished_round(entry: Mapping[str, Any] | Any) -> FinishedRound:
    """Parses a finished round of run.json. Raises CorruptCheckpoint."""
    match entry:
        case {"missing": list(missing), "length": float(update_norm), "loss": float() | None as loss}:
            return FinishedRound(tuple(map(str, missing)), update_norm, loss)
    raise CorruptCheckpoint(f"{RUN_FILE} describes a round that is not valid", "begin a new run")


# --- updates ----------------------------------------------------------------------------------------------------------
def record_update(folder: Path, update: Update, round: int, method: str) -> None:
    """Writes an update into a run's folder. The JSON appears last: with it the update is complete."""
    updates_folder = folder / "updates" / f"round-{round}"
    files.make_private_dir(updates_folder)
    with files.atomic_path(updates_folder / f"{update.site}.safetensors") as path:
        save_file({name: tensor.contiguous() for name, tensor in update.tensors.items()}, path)
    update_document = {
        "milkglass_update": 1,
        "site": update.site,
        "round": round,
        "method": method,
        "texts": update.text_count,
        "steps": update.step_count,
    }
    files.write(updates_folder / f"{update.site}.json", json_text(update_document))


def read_update(path: Path) -> tuple[Gradients, int]:
    """Reads an update.

    Args:
        path: the update's JSON file; its tensors lie beside it.

    Returns:
        The update, and the number of local steps that it sums.

    Raises:
        CorruptCheckpoint: one of the files is damaged or gone.
    """
    match read_json(path):
        case {"milkglass_update": 1, "round": int(round), "texts": int(texts), "steps": int(steps)} if texts > 0:
            pass
        case _:
            raise CorruptCheckpoint(f"{path.parent.name}/{path.name} does not describe an update", LOST_HINT)
    try:
        return Gradients(load_file(path.with_suffix(".safetensors")), texts, round), steps
    except (OSError, SafetensorError):
        name = f"{path.parent.name}/{path.stem}.safetensors"
        raise CorruptCheckpoint(f"the update {name}, of round {round + 1}, is damaged", LOST_HINT) from None
