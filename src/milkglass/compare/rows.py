"""A user's rows: some are trained with, some are asked about, and of the first a half is what attackers try to read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from milkglass.errors import CodecError
from milkglass.experiments import data_refs
from milkglass.experiments.procedures.trials import TrialData
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import MIN_HELD_OUT, Example, Summary, checked_summary, read_examples
from milkglass.threat.defence import LabelledTexts

HELD_OUT_SHARE = 0.2  # of the rows that are asked about; MIN_HELD_OUT at least
MAX_ATTACKED = 1_000  # texts that are attacked


@dataclass(frozen=True, eq=False)
class ComparisonRows:
    """Holds a user's rows: some are trained with, others are asked about.

    Attributes:
        names: the names of the classes, by number; empty for scores.
        train: the rows that are trained with.
        held_out: the rows that are asked about.
        digest: the digest of what was read (`digest_of`).
    """

    names: tuple[str, ...]
    train: LabelledTexts = field(repr=False)
    held_out: LabelledTexts = field(repr=False)
    digest: str
    task: str = "classification"

    @classmethod
    def read(
        cls, data: DataFile, validation: DataFile | None, seed: int,
        report_skipped: Callable[[str, Summary], None] = lambda name, summary: None, task: str | None = None,
        max_rows: int | None = None,
    ) -> ComparisonRows:  # fmt: skip
        """Reads the rows.

        Args:
            validation: the rows that are asked about. None: a random fifth of the data.
            seed: decides that fifth.
            report_skipped: receives each file's name and summary.
            task: "classification" or "regression". None: decided by the labels.
            max_rows: how many random rows of the data are taken, those that are asked about included. None: all.

        Raises:
            CodecError: there are rows without labels, or too few rows.
        """
        files = [data] if validation is None else [data, validation]
        summary, *_ = summaries = [checked_summary(file, task) for file in files]
        for file, file_summary in zip(files, summaries, strict=True):
            report_skipped(file.name, file_summary)
        rows = list(read_examples(data))
        order = np.random.default_rng(seed).permutation(len(rows))[:max_rows]
        if validation is None:
            if len(order) < 2 * MIN_HELD_OUT:
                fault = f"{data.name} has {len(order)} rows, {2 * MIN_HELD_OUT} are needed"
                raise CodecError(fault, "give more rows, or --validation too")
            count = max(MIN_HELD_OUT, round(HELD_OUT_SHARE * len(order)))
            held_out_rows, order = [rows[i] for i in order[:count]], order[count:]
        else:
            held_out_rows = list(read_examples(validation))
        train_rows = [rows[i] for i in order]
        is_regression = summary.task == "regression"
        numbers = {name: number for number, name in enumerate(summary.labels)}
        train, held_out = (
            data_refs.labelled_texts(part, numbers, is_regression) for part in (train_rows, held_out_rows)
        )
        return cls(summary.labels, train, held_out, digest_of(train_rows, held_out_rows), summary.task)

    @property
    def private(self) -> list[str]:
        """Returns the texts that are attacked: one half of the training rows at most; of pairs the first text."""
        return list(self.train.texts[: min(MAX_ATTACKED, len(self.train.texts) // 2)])

    @property
    def others(self) -> list[str]:
        """Returns the texts of the other half, which an attacker has."""
        return list(self.train.texts[len(self.train.texts) // 2 :])

    def problem(self, seed: int) -> TrialData:
        """Returns the rows in the form from which a cell is trained."""
        identity = {"rows": self.digest, "task": self.task, "train": len(self.train.texts), "seed": seed}
        measures = ("pearson",) if self.task == "regression" else ("accuracy",)
        classes = 1 if self.task == "regression" else len(self.names)
        return TrialData("own", self.train, self.held_out, LabelledTexts([], []), measures, classes, identity)


def digest_of(*parts: Sequence[Example]) -> str:
    """Returns a digest of what was read of rows: texts, pairs, labels, messages and tools, in their order."""
    hasher = hashlib.sha256()
    for part in parts:
        for row in part:
            content = [row.kind, row.text, row.pair, row.label, row.messages, row.tools]
            hasher.update(json.dumps(content, default=str).encode() + b"\n")
        hasher.update(b"\n")
    return hasher.hexdigest()
