"""A request for a fine-tune: files and held-out rows, numbers of labels, and hyperparameters.

All is checked before anything is written or sent.

Of a classifier or regression, the hyperparameters that the user does not set follow from the number of rows. The
papers' rate of 2e-5 is for models as they were published. A table whose rows were mixed must be learnt again, which
takes 1e-4, for three epochs or for more if three have few steps. docs/log.md, 2026-11-24, has the grid
(`recipes/training_defaults.toml`). Language models are trained as in the ObfusLM paper (server/spec.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.data.training_rows import (
    LabelsOrScale,
    WriteCounts,
    labels_or_scale_of,
    require_generator,
    write_parquet,
)
from milkglass.client.key.file import UnlockedKey
from milkglass.client.key.key import permutation
from milkglass.errors import CodecError, UsageError
from milkglass.noise.stream import subkey
from milkglass.progress import Log, Stage, no_log, no_stage
from milkglass.rows.data_file import DataFile, Source
from milkglass.rows.examples import Summary, checked_summary, read_examples
from milkglass.rows.place import places_text
from milkglass.rows.repeats import overlap_warning, question_digest
from milkglass.server.spec import MAX_ROW_TOKENS, Hyperparameters, checked_settings

if TYPE_CHECKING:
    from milkglass.client.codec.codec import Codec
    from milkglass.client.key.key import Key


LEARNING_RATE, WARMUP_RATIO = 1e-4, 0.06
MIN_STEPS, MIN_EPOCHS, MAX_EPOCHS = 100, 3, 10  # few rows are trained for more epochs, until MIN_STEPS are reached
PATIENCE_EPOCHS = 3  # epochs without improvement before training stops
HELD_OUT_SHARE, MIN_HELD_OUT, MAX_HELD_OUT = 0.1, 50, 1000  # share and limits of the rows to compare epochs by
BATCH_SIZE: int = Hyperparameters.model_fields["batch_size"].default
SUFFIX_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")  # the suffixes that the server accepts


def training_defaults(task: str, rows: int, settings: Mapping[str, Any], has_validation: bool) -> dict[str, Any]:
    """Returns the hyperparameters that were given, with defaults for those that are None or missing.

    Args:
        task: "classification", "regression", or "causal-lm", which gets no defaults.
        rows: the number of training rows.
        settings: the hyperparameters that were given.
        has_validation: whether there are rows by which epochs are compared.
    """
    requested = {name: value for name, value in settings.items() if value is not None}
    if task == "causal-lm":
        return requested
    batch = requested.get("batch_size") or BATCH_SIZE
    epochs = min(MAX_EPOCHS, max(MIN_EPOCHS, math.ceil(MIN_STEPS * batch / max(1, rows))))
    defaults: dict[str, Any] = {"learning_rate": LEARNING_RATE, "warmup_ratio": WARMUP_RATIO, "n_epochs": float(epochs)}
    if has_validation and "max_steps" not in requested:
        defaults["early_stopping"] = PATIENCE_EPOCHS
    return {**defaults, **requested}


def step_count(rows: int, settings: Hyperparameters) -> int:
    """Returns the number of steps of a training run without early stopping.

    As in the Trainer of transformers, the steps of each epoch are rounded up. `rows` is the number of training rows.
    """
    return settings.max_steps or math.ceil(settings.n_epochs * math.ceil(rows / settings.batch_size))


def held_out_count(rows: int) -> int:
    """Returns how many of a file's `rows` rows are held out to compare epochs by; 0 if there are too few."""
    count = min(MAX_HELD_OUT, round(HELD_OUT_SHARE * rows))
    return count if count >= MIN_HELD_OUT else 0


def held_out_mask(root: bytes, digest: str, questions: Sequence[Hashable]) -> NDArray[np.bool_]:
    """Returns (rows,) whether each row is held out. `root` and `digest` are a key's root and its model's digest.

    Rows with the same question are held out together, until there are enough rows. The choice depends only on the key,
    the number of rows, and which of them ask the same. An interrupted upload can therefore go on, and a key whose
    symbols are found from labelled rows does not see the held-out ones (client/obfuscate/symbols.py).

    Args:
        questions: what each row asks; equal for rows that ask the same.
    """
    rows = len(questions)
    first_index = dict[Hashable, int]()
    question_of = np.array([first_index.setdefault(question, index) for index, question in enumerate(questions)], int)
    sizes = np.bincount(question_of, minlength=rows)
    is_held_out, count = np.zeros(rows, np.bool_), 0
    for index in permutation(subkey(root, digest, f"held out/{rows}"), rows).tolist():
        if count >= held_out_count(rows):
            break
        question = int(question_of[index])
        count += 0 if is_held_out[question] else int(sizes[question])
        is_held_out[question] = True
    return np.asarray(is_held_out[question_of])


@dataclass(frozen=True, eq=False)
class TrainingPart:
    """Selects the rows of a data file that become one training file.

    Attributes:
        file: the data file.
        row_count: how many rows are taken.
        selection: (rows of the file,) whether each row is taken. None: all are.
    """

    file: DataFile
    row_count: int
    selection: NDArray[Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class TrainingRequest:
    """Checks a request for a fine-tune, and writes its rows as scrambled files.

    Attributes:
        source: the file with the rows to train on.
        summary: what was found in that file.
        parts: the rows to train on, then the rows to compare epochs by, if there are any.
        labels: the numbers of the labels, or the scale of scores. None: rows without labels.
        settings: hyperparameters, as they are sent to the server.
    """

    source: DataFile
    summary: Summary
    parts: tuple[TrainingPart, ...]
    labels: LabelsOrScale
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, key: Key, max_tokens: int, data: Source | str, validation: Source | str | None, task: str | None,
        hold_out: bool, hyperparameters: Mapping[str, Any], notice: Log = no_log,
    ) -> TrainingRequest:  # fmt: skip
        """Reads all rows of the files, and checks the request.

        See `Session.finetune` for the other arguments and the errors.

        Args:
            key: the key under which the rows are to be scrambled.
            max_tokens: the most tokens that the model takes.
        """
        source = DataFile.of(data)
        summary = checked_summary(source, task)
        require_generator(source, summary, key.info.kind)
        parts: tuple[TrainingPart, ...] = (TrainingPart(source, summary.row_count),)
        if validation is not None:
            validation_file = DataFile.of(validation)
            parts = (*parts, TrainingPart(validation_file, checked_summary(validation_file, summary.task).row_count))
            are_scores = summary.task == "regression"
            rows = (list(read_examples(file, are_scores)) for file in (validation_file, source))
            if warning := overlap_warning(validation_file.name, *rows):
                notice(warning)
        if hold_out and validation is not None:
            raise UsageError("rows to compare epochs by were given, and others are to be held out", "leave one out")
        if hold_out:
            _require_held_out(summary, source.name)
            questions = [question_digest(row) for row in read_examples(source, summary.task == "regression")]
            is_held_out = held_out_mask(key.root, key.model_digest, questions)
            count = int(is_held_out.sum())
            if count == summary.row_count:
                raise CodecError(
                    f"all {count:,} rows of {source.name} ask the same, so that none is left to train with",
                    "give different rows, or leave --hold-out out",
                )
            notice(f"{count:,} of {summary.row_count:,} rows of {source.name} are held out, to find the best epoch")
            parts = tuple(TrainingPart(source, int(mask.sum()), mask) for mask in (~is_held_out, is_held_out))
        if hyperparameters.get("early_stopping") and len(parts) == 1:
            raise UsageError(
                f"early stopping after {hyperparameters['early_stopping']} epochs has no rows to compare epochs by",
                "give --validation FILE, or --hold-out to keep a tenth of the rows for that",
            )
        labels = labels_or_scale_of(key, summary)
        defaults = training_defaults(summary.task, summary.row_count, hyperparameters, has_validation=len(parts) > 1)
        settings = {
            **defaults,
            "max_length": max_tokens if (length := defaults.get("max_length")) is None else min(length, max_tokens),
            "task": summary.task,
            "num_labels": len(labels) if isinstance(labels, Mapping) else None,
        }
        return cls(source, summary, parts, labels, checked_settings(settings))

    def write(
        self, unlocked: UnlockedKey, codec: Codec, folder: Path, skip_long: bool, stage: Stage = no_stage,
        notice: Log = no_log,
    ) -> tuple[list[Path], WriteCounts]:  # fmt: skip
        """Writes the parts as scrambled files into a folder. Returns their paths, and the counts of the first one."""
        paths = [folder / name for name in ("train.parquet", "val.parquet")[: len(self.parts)]]
        length = self.settings["max_length"]
        counts = [
            write_rows(
                unlocked,
                codec,
                part.file,
                path,
                part.row_count,
                self.labels,
                length,
                stage,
                notice,
                skip_long,
                part.selection,
            )
            for part, path in zip(self.parts, paths, strict=True)
        ]
        return paths, counts[0]

    def announcement(self, rows: int) -> str:
        """Returns a sentence on how long the training is, in steps: only the server's machine can tell minutes.

        `rows` is the number of training rows.
        """
        hyperparameters = Hyperparameters(**self.settings)
        count = hyperparameters.n_epochs
        epochs = "" if hyperparameters.max_steps else f" for {count:g} epoch{'' if count == 1 else 's'}"
        steps, size = step_count(rows, hyperparameters), hyperparameters.batch_size
        trained_rows = "1 row is" if rows == 1 else f"{rows:,} rows are"
        announcement = f"{trained_rows} trained with{epochs}, {steps:,} step{'' if steps == 1 else 's'} of {size} rows"
        if hyperparameters.early_stopping:
            announcement += f"; {hyperparameters.early_stopping} epochs that are no better may end it sooner"
        if len(self.parts) == 1 and hyperparameters.task == "classification":
            announcement += "; accuracy is not shown without --validation FILE or --hold-out"
        return f"{announcement}; how long it takes is shown after the first steps"


def _require_held_out(summary: Summary, name: str) -> None:
    """Raises UsageError if too few rows would be held out, or if they have no label to compare epochs by."""
    if summary.task == "causal-lm":
        raise UsageError(
            f"{name} has no labels to compare epochs by", "give --validation FILE, or leave --hold-out out"
        )
    if not held_out_count(summary.row_count):
        raise UsageError(
            f"a tenth of the {summary.row_count:,} rows of {name} is less than {MIN_HELD_OUT}, too few to compare "
            "epochs by",
            f"give --validation FILE, or {MIN_HELD_OUT / HELD_OUT_SHARE:.0f} rows, or leave --hold-out out",
        )


def require_suffix(suffix: str | None) -> None:
    """Raises UsageError for a suffix of a model's name that no server accepts."""
    if suffix is not None and not (isinstance(suffix, str) and SUFFIX_PATTERN.fullmatch(suffix)):
        raise UsageError(
            f"the suffix {suffix!r} is not 1 to 64 signs of A-Z, a-z, 0-9, _ and -",
            "give a name like that; it is sent unchanged, so let it reveal nothing",
        )


def require_hyperparameters(requested: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    """Returns the hyperparameters that are not None, with numbers in place of texts of numbers.

    Raises UsageError, before a key is opened, for hyperparameters that `Session.finetune` would refuse.

    `name_of` returns a hyperparameter's name in messages.
    """
    if columns := [name for name in requested if name.endswith("_column")]:
        raise UsageError(f"there is no hyperparameter {columns[0]!r}", "columns are named by DataFile(path, text=NAME)")
    length = requested.get("max_length")  # a larger one becomes what the model takes
    is_larger = isinstance(length, int | float) and length > MAX_ROW_TOKENS
    return checked_settings({**requested, **({"max_length": MAX_ROW_TOKENS} if is_larger else {})}, name_of)


def write_rows(
    unlocked: UnlockedKey,
    codec: Codec,
    data: Source,
    out: Path,
    rows: int,
    labels: LabelsOrScale,
    max_length: int,
    stage: Stage = no_stage,
    notice: Log = no_log,
    skip_long: bool = False,
    selection: NDArray[Any] | None = None,
) -> WriteCounts:
    """Writes rows as the scrambled Parquet file `out`, counts them under the key, and reports rows that are cut.

    See `write_parquet` for the other arguments and the errors.

    Args:
        unlocked: counts what is encoded.
        data: the file with the rows.
        rows: how many rows are written.
        notice: receives what was cut or left out.
    """
    advance = stage(f"scramble {data.name}", rows)
    counts = write_parquet(codec, data, out, labels, max_length, advance, skip_long, selection)
    if counts.left_out_places:
        notice(
            f"left out: {len(counts.left_out_places):,} of {rows:,} rows of {data.name}, without an answer within "
            f"{max_length} tokens ({places_text(counts.left_out_places)})"
        )
    if counts.row_count > (expected := rows - len(counts.left_out_places)):
        notice(
            f"{expected:,} conversations of {data.name} make {counts.row_count:,} examples, one of each answer: the "
            "chat template writes earlier turns in another way once there are later ones"
        )
    if counts.cut_count:
        notice(f"{counts.cut_count:,} of {counts.row_count:,} examples of {data.name} were cut to {max_length} tokens")
    unlocked.count(counts.row_count, counts.token_count, notice)
    return counts
