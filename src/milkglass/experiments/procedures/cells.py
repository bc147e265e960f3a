"""One cell of a comparison: a defence on one data set with one seed, split, trained, and graded on the held-out rows.

A cell's folder is named by its digest, and contains its settings (about.json) and the commit that began it. Recipes
and comparisons of a user's rows (compare/ways.py) with the same cell share it, and a stopped one resumes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from milkglass import files
from milkglass.client.alone import LinearModel, pool_probabilities
from milkglass.client.data.marked_rows import write_tensors
from milkglass.client.training_request import HELD_OUT_SHARE, MIN_HELD_OUT, held_out_count
from milkglass.deadline import require_time
from milkglass.defences.token_halves import TokenClient, TokenServer
from milkglass.errors import UsageError
from milkglass.experiments.record import POOLED_SUFFIX, SPREAD_SUFFIX
from milkglass.experiments.runs import (
    pack_answers,
    provenance,
    record_start,
    run_job,
    seeded_secret,
    unpack_answers,
    write_spec,
)
from milkglass.metrics.glue import MEASURES
from milkglass.metrics.interval import with_half_widths
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import Log, no_log
from milkglass.rows.labels import Scale
from milkglass.server.spec import Hyperparameters
from milkglass.system import Stopwatch, release_memory
from milkglass.threat.defence import Client, Defence, LabelledTexts, Server
from milkglass.threat.observations import Tokens

LINEAR_MODEL = "linear model"  # the name of the client's own model
ANSWERS_FILE = "figures.json"  # the file in a cell's folder
COSTS_FILE = "costs.json"  # CPU seconds that a cell took, by the names of COST_NAMES
COST_NAMES = ("client_seconds", "training_seconds")
LOCK_RETRY_SECONDS = 0.5  # between two attempts to lock a cell that another run has
CELL_VERSION = 6  # raised when a change of the code changes the result of the same settings


@dataclass(frozen=True)
class CellData:
    """Holds a data set as a recipe uses it.

    Attributes:
        name: the data set's name in the recipe.
        train: the rows that are trained with.
        held_out: the rows that are asked about.
        others: rows of the training file that are kept out of training, some of which attackers have.
        metrics: names of metrics/glue.py.
        class_count: the number of classes; 1 for scores.
    """

    name: str
    train: LabelledTexts
    held_out: LabelledTexts
    others: LabelledTexts
    metrics: tuple[str, ...]
    class_count: int

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Returns what identifies the data of a cell: digests of its rows, and the number of classes.

        The rows are those that are trained with and asked about. Files and names do not count, so that a recipe and a
        comparison with the same rows have the same cells.
        """
        return {"train": self.train.digest(), "held_out": self.held_out.digest(), "classes": self.class_count}


@dataclass(frozen=True)
class GradedCell:
    """Holds what a cell's model answered to the held-out rows.

    Attributes:
        name: the digest of all that decides the cell.
        figures: the quality of the answers, with the half-widths of their intervals.
        provenance: the code that measured the answers (`runs.provenance`).
        packed_predictions: the answers, packed (`pack_answers`).
        logits: (rows, classes) of these answers.
    """

    name: str
    figures: Mapping[str, float]
    provenance: Mapping[str, Any]
    packed_predictions: str = field(repr=False)
    logits: NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True)
class TrainedCell(GradedCell):
    """Holds a graded cell with the client's and the server's half.

    Attributes:
        client: the client's half as it was split.
        server: the server's half as it was split.
        tuned: the server's half after training.
        client_seconds: CPU seconds for splitting the model and preparing the training rows. For halves that
            are trained when they are split, that training is included. nan: earlier code made the cell.
        training_seconds: CPU seconds for training the server's half. nan: earlier code made the cell, or
            the half was trained when it was split.
    """

    client: Client = field(repr=False)
    server: Server = field(repr=False)
    tuned: Server = field(repr=False)
    client_seconds: float = math.nan
    training_seconds: float = math.nan


@contextmanager
def count_cpu_seconds(folder: Path, name: Literal["client_seconds", "training_seconds"]) -> Iterator[None]:
    """Adds the CPU seconds that a block takes to those of a cell, also if the block fails or is interrupted."""
    watch = Stopwatch()
    try:
        yield
    finally:
        costs = dict(zip(COST_NAMES, stored_seconds(folder), strict=True))
        costs[name] = watch.cost().processor + (0.0 if math.isnan(costs[name]) else costs[name])
        counted = {cost: seconds for cost, seconds in costs.items() if not math.isnan(seconds)}
        files.write(folder / COSTS_FILE, json.dumps(counted) + "\n")


def stored_seconds(folder: Path) -> tuple[float, ...]:
    """Returns a cell's `client_seconds` and `training_seconds`; nan for what was not counted."""
    path = folder / COSTS_FILE
    stored = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return tuple(float(stored.get(name, math.nan)) for name in COST_NAMES)


def train_cell(
    base: Checkpoint, base_digest: str, data: CellData, defence: Defence, training: Hyperparameters, seed: int,
    cells_folder: Path, threads: int | None, log: Log = no_log,
) -> TrainedCell:  # fmt: skip
    """Returns a trained and graded cell, from its folder if it was trained before.

    At a deadline (milkglass/deadline.py) the split, the training and the wait for another run end.

    Args:
        base: the model that is split.
        base_digest: the digest of `base`.
        data: the rows.
        defence: splits the model.
        training: the settings of the server's worker.
        seed: decides the secret and the training.
        cells_folder: the folder with all cells.
        threads: how many threads the training uses. None: the worker decides.

    Raises:
        JobFailed: the training fails, or the deadline passes.
        UsageError: there are too few rows to stop early by.
    """
    identity = _identity(base_digest, data, defence, training, seed)
    with cell_folder(cells_folder, identity, log) as folder:
        if not _has_model(folder):  # its answers, if there are any, are of a model on another machine
            (folder / ANSWERS_FILE).unlink(missing_ok=True)
        client, server = load_or_split(base, data.train, defence, seed, folder, training.max_length)
        tuned = server
        if isinstance(client, TokenClient):
            tuned = _train_server_half(client, server, data, training, folder, threads, log)
        answers = _grade_answers(client, tuned, data, seed, folder)
        client_seconds, training_seconds = stored_seconds(folder)
    return TrainedCell(
        **vars(answers), client=client, server=server, tuned=tuned, client_seconds=client_seconds,
        training_seconds=training_seconds,
    )  # fmt: skip


def graded_cell(
    base_digest: str, data: CellData, defence: Defence, training: Hyperparameters, seed: int, cells_folder: Path
) -> GradedCell | None:
    """Returns a cell's answers without its model, which may be on another machine. None if no answers are stored."""
    with cell_folder(cells_folder, _identity(base_digest, data, defence, training, seed)) as folder:
        stored = _stored_answers(folder)
        return None if stored is None else _unpack_answers(stored, data, seed, folder)


def _has_model(folder: Path) -> bool:
    """Returns whether a cell's model is here, trained. Halves that are trained at their split have no job."""
    job = folder / "job"
    return (folder / "client").is_dir() and (not job.exists() or (job / "result").is_dir())


def _identity(
    base_digest: str, data: CellData, defence: Defence, training: Hyperparameters, seed: int
) -> dict[str, Any]:
    """Returns all that decides a cell."""
    return {
        "version": CELL_VERSION,
        "base": base_digest,
        "data": data.identity,
        "defence": defence.document(),
        "training": training.model_dump(),
        "seed": seed,
    }


@contextmanager
def cell_folder(cells_folder: Path, identity: Mapping[str, Any], log: Log = no_log) -> Iterator[Path]:
    """Yields a cell's folder, locked, since several runs may share it. The lock of a process that dies is released.

    Args:
        cells_folder: the folder with all cells.
        identity: what decides the cell. The digest of it is the folder's name.
        log: is told if another run has the cell, since this one then waits.

    Raises:
        JobFailed: the deadline of `milkglass.deadline` passes while another run has the cell.
    """
    folder = cells_folder / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    files.make_private_dir(folder)
    with (folder / "lock").open("w") as file:
        if not _try_lock(file):
            log(f"another run trains this model in {cells_folder.parent}: waiting for it")
            while not _try_lock(file):
                require_time()
                time.sleep(LOCK_RETRY_SECONDS)
        (folder / "about.json").write_text(json.dumps(identity, indent=1) + "\n", "utf-8")
        record_start(folder)
        yield folder


def _try_lock(file: IO[str]) -> bool:
    """Tries to lock a file for this process. Returns whether it succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def load_or_split(
    base: Checkpoint, corpus: LabelledTexts, defence: Defence, seed: int, folder: Path, max_length: int
) -> tuple[Client, Server]:
    """Returns a model's halves: those in the folder, or new ones that are split and saved there.

    The client half is saved last, so that halves are complete if it exists.

    Args:
        base: the model.
        corpus: the rows that a defence may learn from, which are the training rows.
        defence: splits the model.
        seed: decides the secret.
        folder: the cell's folder.
        max_length: tokens to which rows are cut, in training and when texts are sent.
    """
    if (folder / "client").is_dir():
        client, server = defence.load(base, folder / "client", folder / "server")
    else:
        if (folder / "server").is_dir():  # of a run that was stopped here
            shutil.rmtree(folder / "server")
        with count_cpu_seconds(folder, "client_seconds"):
            client, server = defence.split(base, corpus, seeded_secret(seed), folder / "server")
            client.save(folder / "client")
    if isinstance(client, TokenClient):
        client = replace(client, codec=replace(client.codec, max_tokens=min(client.codec.max_tokens, max_length)))
    return client, server


def _train_server_half(
    client: TokenClient, server: Server, data: CellData, training: Hyperparameters, folder: Path, threads: int | None,
    log: Log,
) -> TokenServer:  # fmt: skip
    """Trains the server's half. To stop early, epochs are compared on rows of the training data, as in `finetune`."""
    job = folder / "job"
    job.mkdir(exist_ok=True)
    splits = {"train": data.train}
    if training.early_stopping:
        if not (count := held_out_count(len(data.train.texts))):
            raise UsageError(
                f"{len(data.train.texts)} rows are too few to stop early by",
                f"give {MIN_HELD_OUT / HELD_OUT_SHARE:.0f}",
            )
        splits = {"train": data.train.part(slice(count, None)), "validation": data.train.part(slice(0, count))}
    for split, rows in splits.items():
        if not (job / f"{split}.safetensors").is_file():
            labels: Sequence[float] = rows.labels
            if training.task == "regression":  # standardised, as the product sends scores
                scale = Scale.of(map(float, data.train.labels))
                labels = [scale.standardise(float(label)) for label in rows.labels]
            with count_cpu_seconds(folder, "client_seconds"):
                _write_rows(client, rows, labels, training.task, job / f"{split}.safetensors")
    write_spec(job, server.folder, training, threads, tuple(splits))
    return run_training(folder, log)


def run_training(folder: Path, log: Log) -> TokenServer:
    """Runs the training of a cell's server half, unless it has ended before, and returns the trained half."""
    job = folder / "job"
    with nullcontext() if (job / "result").is_dir() else count_cpu_seconds(folder, "training_seconds"):
        release_memory()  # what splitting and encoding used is free, and the training process needs memory
        run_job(job, log)
    return TokenServer(job / "result")


def _write_rows(client: TokenClient, rows: LabelledTexts, labels: Sequence[float], task: str, path: Path) -> None:
    """Writes what the client sends for these rows, in the server's format."""
    (sent,) = client.send(rows.texts, rows.pairs)
    assert isinstance(sent, Tokens)
    label = "scores" if task == "regression" else "labels"
    tensors: dict[str, NDArray[Any]] = {
        "lengths": sent.ids.lengths, "input_ids": sent.ids.ids, label: np.asarray(labels)
    }  # fmt: skip
    if sent.token_types is not None:
        tensors["token_type_ids"] = sent.token_types.ids
    write_tensors(path, [tensors])


def _grade_answers(client: Client, server: Server, data: CellData, seed: int, folder: Path) -> GradedCell:
    """Returns the server's answers to the held-out rows, stored in the cell's folder, and their quality."""
    stored = _stored_answers(folder)
    if stored is None:
        logits = client.receive(server.answer(client.send(data.held_out.texts, data.held_out.pairs)))
        predictions = logits[:, 0] if data.class_count == 1 else logits.argmax(1)
        stored = {
            "made": provenance(folder),
            "predictions": pack_answers(predictions),
            "logits": pack_answers(logits),
        }
        files.write(folder / ANSWERS_FILE, json.dumps(stored) + "\n")
    return _unpack_answers(stored, data, seed, folder)


def _stored_answers(folder: Path) -> dict[str, Any] | None:
    """Returns the record of a cell's answers. None if there is none, or earlier code wrote it, without logits."""
    path = folder / ANSWERS_FILE
    stored: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return stored if "logits" in stored else None


def _unpack_answers(stored: Mapping[str, Any], data: CellData, seed: int, folder: Path) -> GradedCell:
    """Returns the cell whose answers `_grade_answers` stored, graded by the metrics of the data set."""
    logits = unpack_answers(stored["logits"]).reshape(len(data.held_out.labels), -1)
    predictions = unpack_answers(stored["predictions"])
    figures = quality_figures(predictions, data.held_out.labels, data.metrics, data.class_count, seed)
    code = stored.get("made") or provenance(folder)
    return GradedCell(folder.name, figures, code, str(stored["predictions"]), logits)


def quality_figures(
    predictions: NDArray[Any], labels: Sequence[float], metrics: Sequence[str], class_count: int, seed: int
) -> dict[str, float]:
    """Returns the quality of these answers (rows,) against the labels, in percent.

    It is measured by the data set's metrics and, for two classes, by precision and recall of class 1 (CMIF, section
    4.1). "NAME +-" is half the width of the bootstrap interval.
    """
    figures: dict[str, float] = {}
    class_1_metrics = ("precision", "recall") if class_count == 2 else ()
    for name in dict.fromkeys((*metrics, *class_1_metrics)):
        interval = MEASURES[name](predictions, np.asarray(labels), np.random.default_rng(seed))
        figures |= with_half_widths({name: interval})
    return figures


def commonest_class_figures(data: CellData, seed: int) -> dict[str, float]:
    """Returns the quality of answering every text with the training rows' most frequent class; empty for scores."""
    if data.class_count == 1:
        return {}
    counts = np.bincount(np.asarray(data.train.labels, np.int64), minlength=data.class_count)
    predictions = np.full(len(data.held_out.labels), counts.argmax())
    return quality_figures(predictions, data.held_out.labels, data.metrics, data.class_count, seed)


def fit_own_model(data: CellData) -> LinearModel | None:
    """Fits the client's own model on the training rows. Returns None if all rows have one label."""
    train = data.train
    if len(set(train.labels)) < 2:
        return None
    return LinearModel.fit(train.texts, train.labels, train.pairs, data.class_count == 1)


def client_alone_figures(data: CellData, own_model: LinearModel | None, seed: int) -> dict[str, float]:
    """Returns the quality of the client's own model, or {} without one."""
    if own_model is None:
        return {}
    predictions = own_model.predict(data.held_out.texts, data.held_out.pairs)
    return quality_figures(predictions, data.held_out.labels, data.metrics, data.class_count, seed)


def pooled_figures(
    cell: GradedCell, data: CellData, own_model: LinearModel | None, seed: int
) -> tuple[dict[str, float], NDArray[np.int64]] | None:
    """Returns the quality of the server's answers pooled with the client's own (client/alone.py), and (rows,) classes.

    The measures are named "MEASURE with own model". Returns None for scores, or if there is no own model.
    """
    if own_model is None or own_model.is_regression:
        return None
    held_out = data.held_out
    log_probabilities = own_model.log_probabilities(held_out.texts, held_out.pairs, data.class_count)
    predictions = pool_probabilities(log_softmax(cell.logits.astype(np.float64), axis=1), log_probabilities).argmax(1)
    figures = quality_figures(predictions, held_out.labels, data.metrics, 0, seed)  # 0: no precision and recall
    pooled = {
        f"{name}{POOLED_SUFFIX}{suffix}": figures[name + suffix]
        for name in data.metrics
        for suffix in ("", SPREAD_SUFFIX)
    }
    return pooled, predictions
