"""One cell of a comparison: a defence on one data set with one seed, split, trained, and graded on the held-out rows.

A cell's folder is named by its digest, and contains its settings (about.json) and the code that began it. Recipes with
the same cell share it, and a stopped one resumes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from milkglass import files
from milkglass.client.alone import LinearModel, pooled
from milkglass.client.data.marked_rows import write_tensors
from milkglass.client.training_request import HELD_OUT_SHARE, LEAST_HELD_OUT, held_out
from milkglass.defences.token_halves import TokenClient, TokenServer
from milkglass.errors import UsageError
from milkglass.experiments.record import BESIDE, SPREAD
from milkglass.experiments.runs import (
    pack_answers,
    provenance,
    record_start,
    run_job,
    secret_of,
    unpack_answers,
    write_spec,
)
from milkglass.metrics.glue import MEASURES
from milkglass.metrics.interval import with_spread
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import Log, no_log
from milkglass.rows.labels import Scale
from milkglass.server.spec import Hyperparameters
from milkglass.threat.defence import Client, Defence, LabelledTexts, Server
from milkglass.threat.observations import Tokens

LINEAR = "linear model"  # the client's own
Answered = tuple[dict[str, float], dict[str, Any], str, NDArray[np.float32]]
ANSWERS_FILE = "figures.json"  # in a cell
CELL_VERSION = 4  # raised when code changes what a cell's settings make: older cells are not taken for it


@dataclass(frozen=True)
class TrialData:
    """A data set as a recipe uses it.

    Attributes:
        others: rows of the training file that are kept out of training, some of which attackers have.
        metrics: names of metrics/glue.py.
        classes: their number, 1 for scores.
        sums: the digests of its files and which rows are used.
    """

    name: str
    train: LabelledTexts
    held_out: LabelledTexts
    others: LabelledTexts
    metrics: tuple[str, ...]
    classes: int
    sums: Mapping[str, Any]  # which files and rows these are


@dataclass(frozen=True)
class GradedCell:
    """What a cell's model answered to the held-out rows.

    Attributes:
        name: the digest of all that decides the cell.
        figures: the quality of the answers.
        made: by which code.
        predictions: the packed answers (`pack_answers`).
        logits: (u, classes) of these answers.
    """

    name: str
    figures: Mapping[str, float]
    made: Mapping[str, Any]
    predictions: str = field(repr=False)
    logits: NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True)
class TrainedHalves(GradedCell):
    """A cell with its model.

    Attributes:
        client, server: the halves as they were split.
        tuned: the server's half after training.
    """

    client: Client = field(repr=False)
    server: Server = field(repr=False)
    tuned: Server = field(repr=False)


def train_cell(
    base: Checkpoint, digest: str, problem: TrialData, defence: Defence, training: Hyperparameters, seed: int,
    cells: Path, threads: int | None, progress: Log = no_log, deadline: float = math.inf,
) -> TrainedHalves:  # fmt: skip
    """Returns a cell, trained if it does not exist. Raises JobFailed if the training fails."""
    with cell_folder(cells, _identity(digest, problem, defence, training, seed)) as folder:
        if not _has_model(folder):  # its answers, if there are any, are of a model on another machine
            (folder / ANSWERS_FILE).unlink(missing_ok=True)
        client, server = halves(base, problem.train, defence, seed, folder, training.max_length)
        tuned = server
        if isinstance(client, TokenClient):
            tuned = _tune(client, server, problem, training, folder / "job", threads, progress, deadline)
        answered = _answer_figures(client, tuned, problem, seed, folder)
    return TrainedHalves(folder.name, *answered, client, server, tuned)


def graded_cell(
    digest: str, problem: TrialData, defence: Defence, training: Hyperparameters, seed: int, cells: Path
) -> GradedCell | None:
    """Returns a cell's answers without its model, which may be on another machine. None: there are none."""
    with cell_folder(cells, _identity(digest, problem, defence, training, seed)) as folder:
        stored = _stored_answers(folder)
        return None if stored is None else GradedCell(folder.name, *_answered(stored, problem, folder))


def _has_model(folder: Path) -> bool:
    """Returns whether a cell's model is here, trained. Halves that are trained at their split have no job."""
    job = folder / "job"
    return (folder / "client").is_dir() and (not job.exists() or (job / "result").is_dir())


def _identity(
    digest: str, problem: TrialData, defence: Defence, training: Hyperparameters, seed: int
) -> dict[str, Any]:
    """Returns all that decides a cell."""
    return {
        "version": CELL_VERSION,
        "base": digest,
        "data": dict(problem.sums),
        "defence": defence.document(),
        "training": training.model_dump(),
        "seed": seed,
    }


@contextmanager
def cell_folder(cells: Path, identity: Mapping[str, Any]) -> Iterator[Path]:
    """Yields a cell's folder, locked, since several runs may share it. A dead process holds no lock.

    Args:
        identity: all that decides the cell. Its digest is the folder's name.
    """
    folder = cells / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    files.private_dir(folder)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "about.json").write_text(json.dumps(identity, indent=1) + "\n", "utf-8")
        record_start(folder)
        yield folder


def halves(
    base: Checkpoint, corpus: LabelledTexts, defence: Defence, seed: int, folder: Path, max_length: int
) -> tuple[Client, Server]:
    """Splits the model once. The client half is written last, so that an existing one is complete.

    Args:
        max_length: of what is trained with: a client that sends ids is asked about no more of a text.
    """
    if (folder / "client").is_dir():
        client, server = defence.load(base, folder / "client", folder / "server")
    else:
        if (folder / "server").is_dir():  # of a run that was stopped here
            shutil.rmtree(folder / "server")
        client, server = defence.split(base, corpus, secret_of(seed), folder / "server")
        client.save(folder / "client")
    if isinstance(client, TokenClient):
        client = replace(client, codec=replace(client.codec, limit=min(client.codec.limit, max_length)))
    return client, server


def _tune(
    client: TokenClient, server: Server, problem: TrialData, training: Hyperparameters, job: Path, threads: int | None,
    progress: Log, deadline: float,
) -> TokenServer:  # fmt: skip
    """Trains the server's half. Epochs are compared on rows of the training data, as in `milkglass finetune`."""
    job.mkdir(exist_ok=True)
    splits = {"train": problem.train}
    if training.early_stopping:
        if not (count := held_out(len(problem.train.texts))):
            raise UsageError(
                f"{len(problem.train.texts)} rows are too few to stop early by",
                f"give {LEAST_HELD_OUT / HELD_OUT_SHARE:.0f}",
            )
        splits = {"train": problem.train.part(slice(count, None)), "validation": problem.train.part(slice(0, count))}
    for split, rows in splits.items():
        if not (job / f"{split}.safetensors").is_file():
            labels: Sequence[float] = rows.labels
            if training.task == "regression":  # standardised, as the product sends scores
                scale = Scale.of(map(float, problem.train.labels))
                labels = [scale.sent(float(label)) for label in rows.labels]
            _write_rows(client, rows, labels, training.task, job / f"{split}.safetensors")
    write_spec(job, server.folder, training, threads, tuple(splits))
    run_job(job, progress, deadline)
    return TokenServer(job / "result")


def _write_rows(client: TokenClient, rows: LabelledTexts, labels: Sequence[float], task: str, out: Path) -> None:
    """Writes what the client sends for these rows, in the server's format."""
    (sent,) = client.send(rows.texts, rows.pairs)
    assert isinstance(sent, Tokens)
    label = "scores" if task == "regression" else "labels"
    tensors: dict[str, NDArray[Any]] = {
        "lengths": sent.ids.lengths, "input_ids": sent.ids.ids, label: np.asarray(labels)
    }  # fmt: skip
    if sent.types is not None:
        tensors["token_type_ids"] = sent.types.ids
    write_tensors(out, [tensors])


def _answer_figures(client: Client, server: Server, problem: TrialData, seed: int, folder: Path) -> Answered:
    """Returns the quality of the server's answers to the held-out rows in percent, and the answers.

    Returns:
        The figures with the half-widths of their intervals, the code that measured them, the packed answers, and
            logits.
    """
    stored = _stored_answers(folder)
    if stored is None:
        logits = client.receive(server.answer(client.send(problem.held_out.texts, problem.held_out.pairs)))
        guess = logits[:, 0] if problem.classes == 1 else logits.argmax(1)
        figures = quality_figures(guess, problem.held_out.labels, problem.metrics, problem.classes, seed)
        stored = {
            "figures": figures,
            "made": provenance(folder),
            "predictions": pack_answers(guess),
            "logits": pack_answers(logits),
        }
        files.write(folder / ANSWERS_FILE, json.dumps(stored) + "\n")
    return _answered(stored, problem, folder)


def _stored_answers(folder: Path) -> dict[str, Any] | None:
    """Returns the record of a cell's answers. None: there is none, or earlier code wrote it, without logits."""
    path = folder / ANSWERS_FILE
    stored: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return stored if "logits" in stored else None


def _answered(stored: Mapping[str, Any], problem: TrialData, folder: Path) -> Answered:
    """Returns what a record says, see `_answer_figures`."""
    logits = unpack_answers(stored["logits"]).reshape(len(problem.held_out.labels), -1)
    return dict(stored["figures"]), stored.get("made") or provenance(folder), str(stored["predictions"]), logits


def quality_figures(
    guess: NDArray[Any], labels: Sequence[float], metrics: Sequence[str], classes: int, seed: int
) -> dict[str, float]:
    """Returns the quality of (u,) answers to rows with these labels, in percent.

    These are the data set's measures and, for two classes, precision and recall of class 1 (CMIF, section 4.1). "NAME
    +-" is half the width of the bootstrap interval.
    """
    figures: dict[str, float] = {}
    of_class_1 = ("precision", "recall") if classes == 2 else ()
    for name in dict.fromkeys((*metrics, *of_class_1)):
        interval = MEASURES[name](guess, np.asarray(labels), np.random.default_rng(seed))
        figures |= with_spread({name: interval})
    return figures


def commonest_class_figures(problem: TrialData, seed: int) -> dict[str, float]:
    """Returns the quality of the most frequent class of the training rows for every text. For scores there is none."""
    if problem.classes == 1:
        return {}
    counts = np.bincount(np.asarray(problem.train.labels, np.int64), minlength=problem.classes)
    guess = np.full(len(problem.held_out.labels), counts.argmax())
    return quality_figures(guess, problem.held_out.labels, problem.metrics, problem.classes, seed)


def own_model(problem: TrialData) -> LinearModel | None:
    """Returns the client's own model of the training rows. None: the rows have one label."""
    train = problem.train
    if len(set(train.labels)) < 2:
        return None
    return LinearModel.fit(train.texts, train.labels, train.pairs, problem.classes == 1)


def client_alone_figures(problem: TrialData, own_model: LinearModel | None, seed: int) -> dict[str, dict[str, float]]:
    """Returns the quality of the client's own model by its name."""
    if own_model is None:
        return {}
    guess = own_model.predict(problem.held_out.texts, problem.held_out.pairs)
    return {LINEAR: quality_figures(guess, problem.held_out.labels, problem.metrics, problem.classes, seed)}


def with_own_model(
    cell: GradedCell, problem: TrialData, own_model: LinearModel | None, seed: int
) -> tuple[dict[str, float], NDArray[np.int64]] | None:
    """Returns the quality of the server's answers pooled with the client's own (client/alone.py), and the (u,) classes.

    The measures are named "MEASURE with own model". None for scores.
    """
    if own_model is None or own_model.regression:
        return None
    held_out = problem.held_out
    log_probabilities = own_model.log_probabilities(held_out.texts, held_out.pairs, problem.classes)
    guess = pooled(log_softmax(cell.logits.astype(np.float64), axis=1), log_probabilities).argmax(1)
    figures = quality_figures(guess, held_out.labels, problem.metrics, 0, seed)
    return {f"{name}{BESIDE}{mark}": figures[name + mark] for name in problem.metrics for mark in ("", SPREAD)}, guess
