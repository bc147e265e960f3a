"""Splits a user's rows into training rows and held-out rows; attackers try to read half of the training rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import CodecError
from milkglass.experiments import data_refs
from milkglass.experiments.procedures.cells import CellData
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import (
    MIN_COMPARISON_ROWS,
    Example,
    Summary,
    checked_summary,
    comparison_row_count,
    read_examples,
)
from milkglass.rows.repeats import Repeats, distinct_indices, unrelated_indices
from milkglass.threat.defence import LabelledTexts

MAX_ATTACKED = 1_000  # texts that are attacked


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Holds training rows and held-out rows. No training row asks the same as a held-out row.

    Attributes:
        notes: sentences on rows that repeat others.
    """

    train: list[Example] = field(repr=False)
    held_out: list[Example] = field(repr=False)
    notes: tuple[str, ...]

    @classmethod
    def read(
        cls, data: DataFile, validation: DataFile | None, seed: int, max_rows: int | None, has_classes: bool
    ) -> SplitRows:
        """Reads the rows. Rows that are equal in question and answer count once.

        Args:
            validation: the held-out rows. None: a random fifth of the data.
            seed: decides that fifth.
            max_rows: how many random rows are taken of each file at most. None: all.
            has_classes: whether labels are classes, each of which is held out in its share.

        Raises:
            CodecError: there are too few rows.
        """
        all_rows = list(read_examples(data))
        rows = [all_rows[index] for index in distinct_indices(all_rows)]
        order = np.random.default_rng(seed).permutation(len(rows))[:max_rows]
        if validation is None:
            require_rows(
                data.name, len(order), 2 * MIN_COMPARISON_ROWS, len(all_rows) - len(rows), "or --validation too"
            )
            labels = [rows[i].label if has_classes else None for i in order]
            is_held_out = stratified_mask(labels, comparison_row_count(len(order)))
            held_out, order = [rows[i] for i in order[is_held_out]], order[~is_held_out]
        else:
            validation_rows = list(read_examples(validation))
            distinct = distinct_indices(validation_rows)
            chosen = np.random.default_rng(seed).permutation(len(distinct))[:max_rows]
            held_out = [validation_rows[distinct[i]] for i in sorted(chosen)]
            require_rows(validation.name, len(held_out), MIN_COMPARISON_ROWS, len(validation_rows) - len(distinct))
        candidates = [rows[i] for i in order]
        train = [candidates[index] for index in unrelated_indices(candidates, held_out)]
        require_trainable(data.name, len(train), len(candidates) - len(train))
        notes = notes_on_repeats(all_rows, len(candidates) - len(train))
        if validation is not None:
            notes += equal_notes(Repeats.of(validation_rows), f"{validation.name}: ")
        return cls(train, held_out, notes)


def stratified_mask(labels: Sequence[str | None], count: int) -> NDArray[np.bool_]:
    """Returns (labels,) a mask of `count` labels in which each label has its share, to less than one.

    It is systematic sampling: the labels are sorted, and every (labels / count)-th one is taken.
    """
    order = sorted(range(len(labels)), key=lambda index: labels[index] or "")
    mask = np.zeros(len(labels), dtype=np.bool_)
    mask[[order[int((place + 0.5) * len(labels) / count)] for place in range(count)]] = True
    return mask


def _require_known_labels(file: DataFile, data_name: str, labels: Sequence[str]) -> None:
    """Raises CodecError if a row of a file has none of these labels, which are those of the file `data_name`."""
    unknown_rows = [row for row in read_examples(file) if row.label not in labels]
    if unknown_rows:
        counted = f", and so have {len(unknown_rows) - 1:,} more" if len(unknown_rows) > 1 else ""
        raise CodecError(
            f"{unknown_rows[0].place(file)} has a label that {data_name} lacks{counted}",
            "a label is spelt alike in both files, capitals too",
        )


def require_rows(
    name: str, count: int, min_count: int, equal_count: int, alternative: str = "", max_tokens: int | None = None
) -> None:
    """Raises CodecError if a file has fewer than `min_count` rows.

    Args:
        name: the file's name.
        count: how many different rows it has.
        min_count: how many it must have.
        equal_count: how many rows equal an earlier one.
        alternative: what else helps, for the hint.
        max_tokens: the limit of tokens of the counted rows. None: no limit.
    """
    if count < min_count:
        rows = "row" if count == 1 else "rows"
        counted = f"{count} different {rows}" if equal_count else f"{count} {rows}"
        within = "" if max_tokens is None else f" within {max_tokens} tokens"
        equal = f" ({equal_count:,} equal earlier ones)" if equal_count else ""
        hint = f"give more rows, {alternative}" if alternative else "give more rows"
        raise CodecError(f"{name} has {counted}{within}{equal}, {min_count} are needed", hint)


def require_trainable(name: str, count: int, excluded_count: int) -> None:
    """Raises CodecError if too few rows are left to train with.

    Args:
        name: the file's name.
        count: how many rows are left.
        excluded_count: how many rows were left out, since a held-out row asks the same.
    """
    if count < MIN_COMPARISON_ROWS:
        raise CodecError(
            f"{name} has {count} rows to train with, and {excluded_count:,} that ask the same as a held-out "
            f"row; {MIN_COMPARISON_ROWS} are needed",
            "a row is trained with or held out, not both: give other rows in one of the files",
        )


def notes_on_repeats(rows: Sequence[Example], excluded_count: int) -> tuple[str, ...]:
    """Returns sentences on rows that repeat others.

    Args:
        rows: all rows of a file.
        excluded_count: how many rows are left out of training, since a held-out row asks the same.
    """
    excluded_note = ""
    if excluded_count:
        left_out = "row is" if excluded_count == 1 else "rows are"
        excluded_note = f"{excluded_count:,} {left_out} not trained with, since a held-out row asks the same"
    repeats = Repeats.of(rows)
    return *equal_notes(repeats), *filter(None, (excluded_note, repeats.contradiction_text()))


def equal_notes(repeats: Repeats, prefix: str = "") -> tuple[str, ...]:
    """Returns a sentence on rows that equal earlier ones, with a prefix; an empty tuple if there are none."""
    text = repeats.equal_text()
    return (f"{prefix}{text}: equal rows count once",) if text else ()


@dataclass(frozen=True, eq=False)
class ComparisonRows:
    """Holds a user's rows, split into training rows and held-out rows.

    Attributes:
        class_names: the names of the classes, by number; empty for scores.
        train: the training rows.
        held_out: the held-out rows.
        digest: the digest of what was read (`digest_of`).
        task: "classification", "regression" or, in `ChatRows`, "causal-lm".
        repeat_notes: sentences on rows that repeat others.
    """

    class_names: tuple[str, ...]
    train: LabelledTexts = field(repr=False)
    held_out: LabelledTexts = field(repr=False)
    digest: str
    task: str = "classification"
    repeat_notes: tuple[str, ...] = ()

    @classmethod
    def read(
        cls, data: DataFile, validation: DataFile | None, seed: int,
        report_skipped: Callable[[str, Summary], None] = lambda name, summary: None, task: str | None = None,
        max_rows: int | None = None,
    ) -> ComparisonRows:  # fmt: skip
        """Reads the rows. Equal rows count once, and no training row asks the same as a held-out row.

        Args:
            validation: the held-out rows. None: a random fifth of the data, with each class in its share.
            seed: decides that fifth.
            report_skipped: receives each file's name and summary.
            task: "classification" or "regression". None: decided by the labels.
            max_rows: how many random rows are taken of each file at most. None: all.

        Raises:
            CodecError: there are rows without labels, or too few rows.
        """
        files = [data] if validation is None else [data, validation]
        summary, *_ = summaries = [checked_summary(file, task) for file in files]
        for file, file_summary in zip(files, summaries, strict=True):
            report_skipped(file.name, file_summary)
        if validation is not None and not summary.scale:
            _require_known_labels(validation, data.name, summary.labels)
        is_regression = summary.task == "regression"
        split = SplitRows.read(data, validation, seed, max_rows, has_classes=not is_regression)
        numbers = {name: number for number, name in enumerate(summary.labels)}
        train, held_out = (
            data_refs.labelled_texts(part, numbers, is_regression) for part in (split.train, split.held_out)
        )
        digest = digest_of(split.train, split.held_out)
        return cls(summary.labels, train, held_out, digest, summary.task, split.notes)

    @property
    def attacked_texts(self) -> list[str]:
        """Returns the texts that are attacked, at most MAX_ATTACKED: those of the first half of the training rows.

        A pair is two texts.
        """
        max_rows = MAX_ATTACKED if self.train.pairs is None else MAX_ATTACKED // 2
        return self._texts_of(slice(min(max_rows, len(self.train.texts) // 2)))

    @property
    def attacker_texts(self) -> list[str]:
        """Returns the texts of the second half of the training rows, which an attacker has."""
        return self._texts_of(slice(len(self.train.texts) // 2, None))

    def _texts_of(self, rows: slice) -> list[str]:
        """Returns the texts of some training rows; of pairs, all first texts and then all second texts."""
        return [*self.train.texts[rows], *(self.train.pairs[rows] if self.train.pairs is not None else ())]

    def cell_data(self) -> CellData:
        """Returns the rows in the form that a training takes."""
        measures = ("pearson",) if self.task == "regression" else ("accuracy",)
        classes = 1 if self.task == "regression" else len(self.class_names)
        return CellData("own", self.train, self.held_out, LabelledTexts([], []), measures, classes)


def digest_of(*parts: Sequence[Example]) -> str:
    """Returns a digest of what was read of rows: texts, pairs, labels, messages and tools, in their order."""
    hasher = hashlib.sha256()
    for part in parts:
        for row in part:
            content = [row.kind, row.text, row.pair, row.label, row.messages, row.tools]
            hasher.update(json.dumps(content, default=str).encode() + b"\n")
        hasher.update(b"\n")
    return hasher.hexdigest()
