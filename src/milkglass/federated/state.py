"""A run's folder: what was done so far, so that an interrupted run goes on after its last finished round.

    run.json                 the job and its settings, how many rounds are done, who was missing in each
    weights-N.safetensors    the weights after N rounds, by Hugging Face's names

The weights of a round are written before run.json names them, and the ones before are removed after that: whenever the
process dies, run.json names weights that are there. All of it is its owner's (0700, 0600). What this module does not
know: sites, training.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.federated import private
from milkglass.federated.rounds import Tensors
from milkglass.models.checkpoint import read_json, write_json

FILE, VERSION = "run.json", 2  # 1 drew other batches and noise
SAME = "give the same options to go on with it, or a new folder"


@dataclass(frozen=True)
class FinishedRound:
    """One round. missing: the sites that dropped out. length: the L2 norm of the mean update. loss: before the round,
    in nats, of the texts that it was done with; None where sites keep it."""

    missing: tuple[str, ...]
    length: float
    loss: float | None = None


@dataclass(frozen=True)
class FederatedRun:
    """folder: the run's. job: names what decides the weights. done: the finished rounds, in order. settings: what the
    server is told of the job (`run.settings_of`), by which an audit does the rounds again; {}: a run of before."""

    folder: Path
    job: str
    done: tuple[FinishedRound, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, job: str, weights: Tensors, settings: Mapping[str, Any] | None = None) -> FederatedRun:
        """Begin with these weights, or go on. Raises UsageError where the folder holds something else or another job,
        CorruptCheckpoint."""
        if (folder / FILE).is_file():
            run = cls.read(folder)
            if run.job != job:
                raise UsageError(f"{folder} is a run with {_differing(run.settings, settings or {})}", SAME)
            return run
        require_ours(folder)
        private.folder(folder)
        folder.chmod(0o700)  # an empty one that was there had a mode of its own
        run = cls(folder, job, settings=settings or {})
        run._write(weights)
        return run

    @classmethod
    def read(cls, folder: Path) -> FederatedRun:
        """One that was begun. Raises UsageError where there is none, CorruptCheckpoint."""
        if not (folder / FILE).is_file():
            raise UsageError(f"{folder} is no run: it has no {FILE}", "give a folder that `federated run` wrote")
        job, settings, done = _read(folder)
        return cls(folder, job, done, settings)

    def weights(self) -> dict[str, torch.Tensor]:
        """After the last finished round. Raises CorruptCheckpoint."""
        try:
            return load_file(self.place)
        except (OSError, SafetensorError):
            raise CorruptCheckpoint(f"{self.place.name} is damaged or gone", "begin a new run") from None

    def begin(self) -> None:
        """Remove what an interruption left of the round that is next."""
        shutil.rmtree(self.folder / "updates" / f"round-{len(self.done)}", ignore_errors=True)

    def finished(self, weights: Tensors, done: FinishedRound) -> FederatedRun:
        """The run with one round more."""
        run = replace(self, done=(*self.done, done))
        run._write(weights)
        self.place.unlink(missing_ok=True)
        return run

    @property
    def place(self) -> Path:
        """Where the weights are."""
        return self.folder / f"weights-{len(self.done)}.safetensors"

    def _write(self, weights: Tensors) -> None:
        part = self.place.with_name(f"{self.place.name}.part")
        save_file({name: one.contiguous() for name, one in weights.items()}, part)
        _flushed(private.closed(part))
        part.replace(self.place)
        info = [{"missing": list(one.missing), "length": one.length, "loss": one.loss} for one in self.done]
        fresh = self.folder / f"{FILE}.part"
        about = {"milkglass_federated": VERSION, "job": self.job, "settings": dict(self.settings), "rounds": info}
        write_json(fresh, about)
        _flushed(private.closed(fresh))
        fresh.replace(self.folder / FILE)


def require_ours(folder: Path) -> None:
    """Raises UsageError where it holds something that is no run's; asked before anybody waits for anything."""
    if (folder / FILE).is_file():
        return
    if folder.is_file():
        raise UsageError(f"{folder} is a file, not a folder", "give a new folder")
    foreign = [one.name for one in folder.iterdir() if one.name != "sites"] if folder.is_dir() else []
    if any(not name.startswith("weights-0.") for name in foreign):  # of a run that died before its first word
        raise UsageError(f"{folder} is no run and is not empty", "give a new folder")


def _differing(was: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """In words, what a run has other than what is asked for now."""
    names = [name for name in sorted({*was, *asked}) if was.get(name) != asked.get(name)]
    if not names:
        return "another model, other sites' rows or another shield"
    return ", ".join(f"{name} = {was.get(name)}, not {asked.get(name)}" for name in names)


def _read(folder: Path) -> tuple[str, Mapping[str, Any], tuple[FinishedRound, ...]]:
    raw = read_json(folder / FILE)
    match raw:
        case {"milkglass_federated": 2, "job": str(job), "rounds": list(rounds)}:
            settings = raw.get("settings", {})
            return job, settings if isinstance(settings, dict) else {}, tuple(_done(one) for one in rounds)
    raise CorruptCheckpoint(f"{FILE} of {folder} is not of version {VERSION}, or damaged", "begin a new run")


def _done(one: Mapping[str, Any] | Any) -> FinishedRound:
    match one:
        case {"missing": list(missing), "length": float(length), "loss": float() | None as loss}:
            return FinishedRound(tuple(map(str, missing)), length, loss)
    raise CorruptCheckpoint(f"{FILE} tells of a round badly", "begin a new run")


def _flushed(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
