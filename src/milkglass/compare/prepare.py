"""Reads the rows of a comparison and decides the settings of its trainings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from milkglass.client.obfuscate.preflight import require_pad_token
from milkglass.client.training_request import step_count, training_defaults
from milkglass.compare.chat_rows import CHAT_TASK, MAX_ROW_TOKENS, QUICK, ChatRows, ComparisonSize
from milkglass.compare.rows import ComparisonRows
from milkglass.compare.training_checks import MIN_LOSS_REPORTS, cut_rows_message, row_token_ids, unknown_tokens_message
from milkglass.device import training_dtype
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.tokenizer import load_tokenizer, token_limit
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import Summary, checked_summary
from milkglass.sanitizers.masking import FOREIGN_TEXTS, LanguageTally
from milkglass.server.jobs.needs import ModelSizes
from milkglass.server.spec import Hyperparameters, checked_settings

ReportSkipped = Callable[[str, Summary], None]  # receives a file's name and its summary


@dataclass(frozen=True)
class PreparedRows:
    """Holds the rows of a comparison, and how every way is trained with them.

    Attributes:
        notes: how the rows are trained with and asked about, in sentences.
    """

    rows: ComparisonRows
    base: Checkpoint
    training: Hyperparameters
    notes: tuple[str, ...]


def prepare(
    open_model: Callable[[], Checkpoint], data: DataFile, held_out: DataFile | None, options: Mapping[str, Any],
    seed: int, *, task: str | None, quick: bool, text_length: int, max_rows: int | None, report_skipped: ReportSkipped,
) -> PreparedRows:  # fmt: skip
    """Reads and checks the rows, opens the model, and decides the settings of its trainings.

    Args:
        held_out: the rows that are asked about. None: a part of the data.
        options: hyperparameters by name; None for one that the user did not give.
        task: "classification" or "regression". None: decided by the labels.
        quick: whether rows with answers are few and their trainings short.
        text_length: tokens to which rows with labels are cut, if `options` has no other.
        max_rows: how many rows with labels are taken of each file at most. None: all.

    Raises:
        CodecError: the rows have neither labels nor answers, or are too few.
        UsageError: an option is out of range.
        UnsupportedModel: the model is a decoder without a padding id, and the rows have labels.
    """
    summary = checked_summary(data, task)
    if summary.task == CHAT_TASK:
        options = {**options, "max_length": options.get("max_length") or MAX_ROW_TOKENS}
        return _prepare_chats(open_model, data, held_out, options, seed, quick, summary, report_skipped)
    options = {**options, "max_length": options.get("max_length") or text_length}
    rows = ComparisonRows.read(data, held_out, seed, report_skipped, task, max_rows)
    settings = checked_settings(training_defaults(rows.task, len(rows.train.texts), options, False))
    head = {"task": "regression"} if rows.task == "regression" else {"num_labels": len(rows.class_names)}
    training = Hyperparameters(**{**settings, **head, "dtype": training_dtype(), "seed": seed})
    training = _with_frequent_reports(training, len(rows.train.texts))
    base = open_model()
    require_pad_token(base)
    max_tokens = token_limit(base.folder, load_tokenizer(base.folder))
    training = training.model_copy(update={"max_length": min(training.max_length, max_tokens)})
    tokens = row_token_ids(base, rows.train)
    cut_note = cut_rows_message(tokens, training.max_length, max_tokens, rows.train.pairs is not None)
    notes = [*rows.repeat_notes, cut_note, unknown_tokens_message(base, tokens), _language_note(rows)]
    return PreparedRows(rows, base, training, tuple(filter(None, notes)))


def _language_note(rows: ComparisonRows | ChatRows) -> str:
    """Returns a sentence if texts do not look English; "" if they do."""
    texts = [*rows.train.texts, *(rows.train.pairs or [])]
    return FOREIGN_TEXTS if LanguageTally.of(texts).has_foreign_texts() else ""


def halves_options(training: Hyperparameters) -> str:
    """Returns the options of `milkglass split train` by which two halves are trained as a comparison trains them."""
    steps = f" --max-steps {training.max_steps}" if training.max_steps else ""
    task = " --task regression" if training.task == "regression" else ""
    return (
        f"{task} --epochs {math.ceil(training.n_epochs)}{steps} --batch-size {training.batch_size}"
        f" --learning-rate {training.learning_rate!r} --max-length {training.max_length}"
    )


def _prepare_chats(
    open_model: Callable[[], Checkpoint], data: DataFile, held_out: DataFile | None, options: Mapping[str, Any],
    seed: int, quick: bool, summary: Summary, report_skipped: ReportSkipped,
) -> PreparedRows:  # fmt: skip
    report_skipped(data.name, summary)
    if held_out is not None:
        report_skipped(held_out.name, checked_summary(held_out, CHAT_TASK))
    base, extent = open_model(), QUICK if quick else ComparisonSize()
    rows = ChatRows.of(base, data, held_out, seed, extent, options["max_length"], summary)
    settings = checked_settings({"task": CHAT_TASK, **rows.training(options)})
    training = Hyperparameters(**{**settings, "task": CHAT_TASK, "seed": seed}).for_layers(
        len(ModelSizes.of(base).layers)
    )
    training = _with_frequent_reports(training, len(rows.train.texts))
    unknown_note = unknown_tokens_message(base, row_token_ids(base, rows.train))
    notes = (*rows.notes(training), unknown_note, _language_note(rows))
    return PreparedRows(rows, base, training, tuple(filter(None, notes)))


def _with_frequent_reports(training: Hyperparameters, row_count: int) -> Hyperparameters:
    """Returns settings whose loss is reported so often that the end of a training can be judged by it."""
    steps = max(1, min(training.logging_steps, step_count(row_count, training) // MIN_LOSS_REPORTS))
    return training.model_copy(update={"logging_steps": steps})
