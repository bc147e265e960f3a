"""What a scheme costs on a user's own rows: one model is trained plain and scrambled with the same settings, locally.

It is compared with what the client does alone and with the most frequent class. All answer the same held-out rows,
which decide nothing: no epoch, and no model of the client's own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.obfuscate.preflight import require_scramblable
from milkglass.client.training_request import steps_of
from milkglass.defences.obfuscated_tables import Plain, TableDefence
from milkglass.errors import CodecError
from milkglass.experiments import data_refs
from milkglass.experiments.procedures.trials import BAGS, TrialData, trained
from milkglass.experiments.record import ALONE, COMMONEST
from milkglass.experiments.runs import require_same_run, unpacked
from milkglass.metrics.confusion import Confusion
from milkglass.metrics.interval import Interval, resampled
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.tokenizer import load_tokenizer
from milkglass.progress import Log, no_log
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import Summary, checked, read_examples, require_classes
from milkglass.schemes.scheme import Scheme
from milkglass.server.jobs.folder import read_events
from milkglass.server.spec import Hyperparameters
from milkglass.system import cores
from milkglass.threat.defence import LabelledTexts

PLAIN = "no defence"
SHARE, LEAST = 0.2, 40  # of the rows held out, and how many at least
REPORTS = 32  # of a training's loss, at least: by these its end is judged
IN_A_QUARTER, ERRORS = 4, 2.0  # reports in a quarter, at least; standard errors


@dataclass(frozen=True, eq=False)
class OwnRows:
    """A user's rows, some of them held out.

    Attributes:
        names: of the classes, by number.
        train, held_out: the rows.
        digest: of the files.
    """

    names: tuple[str, ...]
    train: LabelledTexts = field(repr=False)
    held_out: LabelledTexts = field(repr=False)
    digest: str

    @classmethod
    def read(
        cls, data: DataFile, validation: DataFile | None, seed: int,
        skipped: Callable[[str, Summary], None] = lambda name, found: None,
    ) -> OwnRows:  # fmt: skip
        """Reads the rows.

        Args:
            data: the file.
            validation: the rows that are held out. None: a random fifth of the data.
            seed: of that fifth.
            skipped: receives each file's name and summary.

        Raises:
            CodecError: there are rows without labels, or too few rows.
        """
        files = [data] if validation is None else [data, validation]
        summary, *_ = found = [checked(one, "classification") for one in files]
        require_classes(data, summary)
        for one, holds in zip(files, found, strict=True):
            skipped(one.name, holds)
        rows = list(read_examples(data))
        order = np.random.default_rng(seed).permutation(len(rows))
        count = max(LEAST, round(SHARE * len(rows)))
        if validation is None and len(rows) < 2 * LEAST:
            fault = f"{data.name} has {len(rows)} rows, {2 * LEAST} are needed"
            raise CodecError(fault, "give more rows, or --validation too")
        kept = [rows[i] for i in (order if validation is not None else order[count:])]
        apart = list(read_examples(validation)) if validation is not None else [rows[i] for i in order[:count]]
        numbers = {name: number for number, name in enumerate(summary.labels)}
        digest = hashlib.sha256(b"".join(hashlib.sha256(one.path.read_bytes()).digest() for one in files)).hexdigest()
        return cls(summary.labels, data_refs.labelled(kept, numbers), data_refs.labelled(apart, numbers), digest)

    def problem(self, seed: int) -> TrialData:
        nobody = LabelledTexts([], [])
        sums = {"rows": self.digest, "train": len(self.train.texts), "seed": seed}
        return TrialData("own", self.train, self.held_out, nobody, ("accuracy",), len(self.names), sums)


@dataclass(frozen=True, eq=False)
class Compared:
    """Answers to the same held-out rows.

    Attributes:
        names: of the classes.
        truth: (u,) numbers of classes.
        answers: (u,) of each row of the table, by its name: COMMONEST, the client's own, PLAIN, the scheme's.
        alone: the name of the client's own.
        falling: mean losses before and at the end of trainings whose loss was still falling (`fall`).
    """

    names: tuple[str, ...]
    truth: NDArray[np.int64]
    answers: Mapping[str, NDArray[np.int64]]
    alone: str
    falling: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def confusion(self, row: str) -> Confusion:
        return Confusion.between(self.names, self.truth.tolist(), self.answers[row].tolist())

    def gap(self, row: str, other: str) -> Interval:
        """Returns by how much the accuracy of `row` exceeds that of `other`, resampling the same rows together."""
        gaps = (self.answers[row] == self.truth).astype(np.float64) - (self.answers[other] == self.truth)
        return resampled(lambda counts: counts @ gaps / len(gaps), len(gaps), np.random.default_rng(0))


def compare(
    base: Checkpoint, scheme: Scheme, name: str, rows: OwnRows, settings: Mapping[str, Any], seed: int, out: Path,
    progress: Log = no_log,
) -> Compared:  # fmt: skip
    """Trains both models on this machine. Results in `out` are reused by a second run.

    Args:
        name: the scheme's, in the table.
        settings: hyperparameters of both trainings.

    Raises:
        UnsupportedModel, UsageError: before anything is trained.
        JobFailed: a training failed.
    """
    training = Hyperparameters(**{**settings, "task": "classification", "num_labels": len(rows.names), "seed": seed})
    steps = steps_of(len(rows.train.texts), training)
    training = training.model_copy(update={"logging_steps": max(1, min(training.logging_steps, steps // REPORTS))})
    problem, digest = rows.problem(seed), base.digest()
    defences = {PLAIN: Plain(), name: TableDefence(scheme)}
    about = {"base": digest, "rows": rows.digest, "scheme": scheme.document(), "training": training.model_dump()}
    require_scramblable(base, scheme, False)
    require_same_run(out, {"compare": 1, **about})
    epochs = f"{training.n_epochs:g} epoch{'' if training.n_epochs == 1 else 's'}"
    progress(
        f"train {len(rows.train.texts):,} rows twice, in {steps:,} steps ({epochs}) each time, and "
        f"ask about {len(rows.held_out.texts):,}; all on this machine; how long it takes is shown after the first steps"
    )
    if words := cut_words(base, rows.train, training.max_length):
        progress(words)
    answers, alone = own_answers(rows)
    falling = dict[str, tuple[float, float]]()
    for number, (row, defence) in enumerate(defences.items(), 1):
        cell = trained(
            base, digest, problem, defence, training, seed, out / "cells", cores(),
            lambda text, row=row, number=number: progress(f"{row} ({number} of 2): {text}"),  # type: ignore[misc]
        )  # fmt: skip
        answers[row] = unpacked(cell.predictions).astype(np.int64)
        if means := fall(reported(out / "cells" / cell.name / "job")):
            falling[row] = means
    return Compared(rows.names, np.asarray(rows.held_out.labels, np.int64), answers, alone, falling)


def cut_words(base: Checkpoint, rows: LabelledTexts, max_length: int) -> str:
    """Returns a message if rows are cut, else ""."""
    tokenizer = load_tokenizer(base.folder)
    lengths = np.array([len(ids) for ids in tokenizer(list(rows.texts), rows.pairs)["input_ids"]])
    if not (count := int((lengths > max_length).sum())):
        return ""
    return (
        f"{count:,} of {len(lengths):,} rows are cut to {max_length} tokens, and all rows of their batches take as "
        f"long as they do; half of the rows have at most {np.median(lengths):.0f}, so that a lower --max-length may do"
    )


def own_answers(rows: OwnRows) -> tuple[dict[str, NDArray[np.int64]], str]:
    """Returns the answers of the most frequent class and of the client's best own model, chosen on training rows."""
    train, labels = rows.train, np.asarray(rows.train.labels, np.int64)
    whole = np.full(len(rows.held_out.labels), np.bincount(labels).argmax())
    cut = max(1, round(SHARE * len(labels)))
    first, last = (train.part(part) for part in (slice(cut, None), slice(0, cut)))

    def right(kind: str) -> float:
        if len(set(first.labels)) < 2:
            return 0.0
        guess = BAGS[kind].fit(first.texts, first.labels, first.pairs).predict(last.texts, last.pairs)
        return float((guess == np.asarray(last.labels)).mean())

    best = max(BAGS, key=right)
    own = BAGS[best].fit(train.texts, train.labels, train.pairs).predict(rows.held_out.texts, rows.held_out.pairs)
    return {COMMONEST: whole, f"{ALONE}, {best}": own.astype(np.int64)}, f"{ALONE}, {best}"


def reported(job: Path) -> list[float]:
    """Returns the losses in a job's events, in the order of their steps. A step repeated after a stop counts once."""
    losses = dict[int, float]()
    for one in read_events(job):
        data = one.event.data or {}
        if "loss" in data and "step" in data:
            losses[int(data["step"])] = float(data["loss"])
    return [losses[step] for step in sorted(losses)]


def fall(losses: Sequence[float]) -> tuple[float, float] | None:
    """Returns the mean losses of the third and the last quarter of a training that was still falling when it ended.

        falls where   mean(third quarter) - mean(last quarter)  >  2 sqrt(s3^2/n3 + s4^2/n4)

    The quarters are of the reports; s^2 is the variance within one. The limit is two standard errors of the difference
    (Welch 1947), so that noise of batches does not count as a fall. A loss on training rows also falls if a model
    memorises them.

    Returns:
        None if nothing shows a fall, or if a quarter has fewer than IN_A_QUARTER reports.
    """
    count = len(losses) // 4
    if count < IN_A_QUARTER:
        return None
    before, last = np.asarray(losses[-2 * count : -count]), np.asarray(losses[-count:])
    error = math.sqrt((before.var(ddof=1) + last.var(ddof=1)) / count)
    means = float(before.mean()), float(last.mean())
    return means if means[0] - means[1] > ERRORS * error else None
