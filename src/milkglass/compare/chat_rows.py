"""A user's rows with answers: some are trained with, some are asked about, and attackers try to read what users say."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from milkglass.client.codec.codec import Codec
from milkglass.client.training_request import step_count
from milkglass.compare.rows import (
    MAX_ATTACKED,
    ComparisonRows,
    digest_of,
    equal_notes,
    notes_on_repeats,
    require_rows,
    require_trainable,
)  # fmt: skip
from milkglass.defences.obfuscated_tables import public_codec
from milkglass.device import training_dtype
from milkglass.errors import CodecError, naming_texts
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import (
    MIN_COMPARISON_ROWS,
    Example,
    Summary,
    comparison_row_count,
    examples_of,
    no_labels_error,
)
from milkglass.rows.messages import Message
from milkglass.rows.repeats import Repeats, distinct_indices, unrelated_indices
from milkglass.server.spec import Hyperparameters
from milkglass.threat.defence import LabelledTexts

CHAT_TASK = "causal-lm"
MAX_ROW_TOKENS = 512  # tokens of a row, as `finetune` cuts it
TOKENS_A_STEP = {"bfloat16": 768, "float32": 512}  # of the longest rows: a training of SmolLM2 stays below 4 GB
MAX_ROWS_A_STEP = 8  # rows, as `finetune` has it
LORA_RANK, LEARNING_RATE, WARMUP_RATIO = 32, 3e-4, 0.1
ROWS_AT_A_TIME = 1000  # rows that are encoded at a time


@dataclass(frozen=True)
class ComparisonSize:
    """Limits how much is trained and asked.

    Attributes:
        steps: the least steps of a training, unless 3 epochs have fewer.
        trained: the least rows that a training takes, unless 3 epochs have fewer.
        rows: how many rows are asked about, at most.
        attacked: how many texts are attacked, at most.
        written: how many of the rows that are asked about get a written answer.
        new_tokens: tokens of a written answer, at most.
    """

    steps: int = 300
    trained: int = 600
    rows: int = 200
    attacked: int = MAX_ATTACKED
    written: int = 40
    new_tokens: int = 96


QUICK = ComparisonSize(steps=12, trained=24, rows=MIN_COMPARISON_ROWS, attacked=300, written=20, new_tokens=40)


@dataclass(frozen=True, eq=False, kw_only=True)
class ChatRows(ComparisonRows):
    """Holds rows with answers. `train` and `held_out` have what users say in these rows; their labels are all 0.

    Attributes:
        chats: the rows that are trained with.
        asked: the rows that are asked about, none of which is cut.
        extent: how much is trained and asked.
        max_row_tokens: tokens of the longest row that is trained with, once it is cut.
        cut_count, left_out_count: how many rows are cut, and how many are left out since no answer of theirs is within
            the limit.
    """

    chats: tuple[Example, ...] = field(repr=False)
    asked: tuple[Example, ...] = field(repr=False)
    extent: ComparisonSize
    max_row_tokens: int
    cut_count: int
    left_out_count: int

    @classmethod
    def of(
        cls, base: Checkpoint, data: DataFile, validation: DataFile | None, seed: int, extent: ComparisonSize,
        max_length: int, summary: Summary,
    ) -> ChatRows:  # fmt: skip
        """Reads the rows.

        Args:
            base: the model, whose template and tokenizer decide which rows are too long.
            validation: the held-out rows. None: a random fifth of the data.
            seed: decides that fifth.
            summary: the summary of the data.

        Raises:
            CodecError: the model is an encoder, the rows are texts alone, or there are too few rows.
        """
        if summary.kind != "chat":
            raise no_labels_error(data, summary)
        if architecture_of(base).kind == "encoder":
            error = no_labels_error(data, summary)
            raise CodecError(
                f"{error.message}, and the model is an encoder, which classifies",
                "give a model that writes answers, such as demo:smollm2, or rows with a text and a label",
            )
        codec = public_codec(base)
        rows = _MeasuredRows.read(codec, data, max_length)
        files = [data] if validation is None else [data, validation]
        validation_rows = None if validation is None else _MeasuredRows.read(codec, validation, max_length)
        distinct = distinct_indices(rows.examples)
        order = [distinct[i] for i in np.random.default_rng(seed).permutation(len(distinct)).tolist()]
        answered_indices = [index for index in order if index not in rows.unanswered_indices]
        uncut_indices = [index for index in answered_indices if index not in rows.cut_indices]
        count = min(extent.rows, comparison_row_count(len(answered_indices)))
        if validation_rows is None:
            longer = "a larger --max-length, or --validation too"
            equal_count = len(rows.examples) - len(distinct)
            require_rows(data.name, len(uncut_indices), 2 * MIN_COMPARISON_ROWS, equal_count, longer, max_length)
            held_out_indices = {*uncut_indices[:count]}
            held_out_examples = [rows.examples[i] for i in uncut_indices[:count]]
            answered_indices = [index for index in answered_indices if index not in held_out_indices]
        else:
            held_out_examples = validation_rows.uncut_examples(seed)[: extent.rows]
            equal_count = len(validation_rows.examples) - len(distinct_indices(validation_rows.examples))
            name = files[1].name
            require_rows(
                name, len(held_out_examples), MIN_COMPARISON_ROWS, equal_count, "or a larger --max-length", max_length
            )
        candidates = [rows.examples[index] for index in answered_indices]
        train_indices = [answered_indices[i] for i in unrelated_indices(candidates, held_out_examples)]
        excluded_count = len(answered_indices) - len(train_indices)
        require_trainable(data.name, len(train_indices), excluded_count)
        notes = notes_on_repeats(rows.examples, excluded_count)
        if validation_rows is not None:
            notes += equal_notes(Repeats.of(validation_rows.examples), f"{files[1].name}: ")
        chats = [rows.examples[index] for index in train_indices]
        train, held_out = (
            LabelledTexts([user_text(example) for example in part], [0] * len(part))
            for part in (chats, held_out_examples)
        )
        lengths = [min(max_length, rows.lengths[index]) for index in train_indices]
        return cls(
            class_names=(), train=train, held_out=held_out, digest=digest_of(chats, held_out_examples), task=CHAT_TASK,
            chats=tuple(chats), asked=tuple(held_out_examples),
            extent=extent, max_row_tokens=max(lengths), cut_count=len({*rows.cut_indices} & {*train_indices}),
            left_out_count=len(rows.unanswered_indices), repeat_notes=notes,
        )  # fmt: skip

    @property
    def attacked_texts(self) -> list[str]:
        """Returns the texts that are attacked: what users say in a half of the training rows."""
        return super().attacked_texts[: self.extent.attacked]

    def training(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of every training: those that were given, and others that fit a small machine.

        Args:
            options: what the user gave. None: not given.
        """
        requested = {name: value for name, value in options.items() if value is not None}
        dtype = training_dtype()
        batch = max(1, min(MAX_ROWS_A_STEP, TOKENS_A_STEP[dtype] // self.max_row_tokens))
        defaults: dict[str, Any] = {
            "lora_rank": LORA_RANK, "learning_rate": LEARNING_RATE, "warmup_ratio": WARMUP_RATIO, "batch_size": batch,
            "dtype": dtype, "group_by_length": False,
        }  # fmt: skip
        if "n_epochs" not in requested:
            size = requested.get("batch_size", batch)
            steps = max(self.extent.steps, math.ceil(self.extent.trained / size))
            defaults["max_steps"] = min(steps, math.ceil(3 * len(self.chats) / size))
        return {**defaults, **requested}

    @staticmethod
    def line_digest(rows: Sequence[Example]) -> str:
        """Returns a digest of the numbers of the lines on which these rows are."""
        return hashlib.sha256(",".join(str(row.line) for row in rows).encode()).hexdigest()[:16]

    def notes(self, training: Hyperparameters) -> tuple[str, ...]:
        """Returns sentences on how the rows are trained with and asked about, and which are cut or left out."""
        max_length, steps = training.max_length, step_count(len(self.chats), training)
        batch = "1 row" if training.batch_size == 1 else f"{training.batch_size} rows"
        words = [
            f"Every training has {steps:,} steps of {batch}, by LoRA of rank {training.lora_rank}",
            f"{min(self.extent.written, len(self.asked))} answers of up to {self.extent.new_tokens} tokens are written",
        ]
        if self.cut_count:
            verb = "is" if self.cut_count == 1 else "are"
            words.append(f"{self.cut_count:,} of {len(self.chats):,} rows {verb} cut to {max_length} tokens")
        if self.left_out_count:
            left_out = "1 row is left out" if self.left_out_count == 1 else f"{self.left_out_count:,} rows are left out"
            words.append(f"{left_out}: no answer begins within {max_length} tokens")
        return (*words, *self.repeat_notes)


@dataclass(frozen=True, eq=False)
class _MeasuredRows:
    """Holds a file's rows with their lengths in tokens.

    Attributes:
        cut_indices: the indices of rows that are cut.
        unanswered_indices: the indices of rows that lose all answers.
    """

    examples: list[Example]
    lengths: list[int]
    cut_indices: frozenset[int]
    unanswered_indices: frozenset[int]

    @classmethod
    def read(cls, codec: Codec, file: DataFile, max_length: int) -> _MeasuredRows:
        examples = examples_of(file)
        lengths, cut_indices, unanswered_indices = [0] * len(examples), set[int](), set[int]()
        for start in range(0, len(examples), ROWS_AT_A_TIME):
            part = examples[start : start + ROWS_AT_A_TIME]
            with naming_texts(lambda index, part=part: str(part[index].place(file))):  # type: ignore[misc]
                encoded = codec.encode_answered([row.messages for row in part], max_length, [row.tools for row in part])
            for source, ids in zip(encoded.source_indices, encoded.ids, strict=True):
                lengths[start + source] = max(lengths[start + source], len(ids))
            cut_indices |= {start + index for index in encoded.cut_indices}
            unanswered_indices |= {start + index for index in encoded.lost_answer_starts}
        return cls(examples, lengths, frozenset(cut_indices), frozenset(unanswered_indices))

    def uncut_examples(self, seed: int) -> list[Example]:
        """Returns the different rows that are not cut, in the seed's order."""
        distinct = distinct_indices(self.examples)
        order = [distinct[i] for i in np.random.default_rng(seed).permutation(len(distinct)).tolist()]
        left_out_indices = {*self.cut_indices, *self.unanswered_indices}
        return [self.examples[i] for i in order if i not in left_out_indices]


def user_text(example: Example) -> str:
    """Returns what the user says in a conversation."""
    return "\n".join(str(message["content"]) for message in example.messages if message["role"] == "user")


def unsanitized_share(examples: Sequence[Example]) -> float:
    """Returns the share of the prompts' words that users do not say, such as of system messages and earlier answers."""
    words, user_words = 0, 0
    for example in examples:
        words += sum(len(str(message.get("content") or "").split()) for message in prompt_messages(example))
        user_words += len(user_text(example).split())
    return 1 - user_words / max(1, words, user_words)


def has_tools(rows: ComparisonRows) -> bool:
    """Returns whether a conversation offers tools to the model, or has a call of one."""
    chats = rows.chats if isinstance(rows, ChatRows) else ()
    return any(chat.tools or any(message.get("tool_calls") for message in chat.messages) for chat in chats)


def prompt_messages(example: Example) -> tuple[Message, ...]:
    """Returns a conversation without its last answer."""
    return example.messages[:-1]
