"""Trains and asks one cell of a comparison on rows with answers.

A decoder is split, tuned by the server's own worker, and asked. A "way" is a way of using a model (ways.py). What
crosses in training and in a prompt depends on the client half:

    scrambled ids       whole conversations, in the ids of the key
    masked text         every message of training rows; in a prompt all but the model's earlier answers
    tokens replaced     what the user says, as the recipes of sanitized generation do it; training answers cross as are

Every way is asked about the same rows, and its loss is that of the rows' own answers. Written answers are greedy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import files
from milkglass.client.codec.codec import Codec
from milkglass.compare.chat_rows import ChatRows, prompt_messages
from milkglass.deadline import require_time
from milkglass.defences.masked_text import MaskingClient
from milkglass.defences.obfuscated_tables import public_codec
from milkglass.defences.sanitized_text import SanitizedTokensClient, SanitizerDefence
from milkglass.defences.token_halves import TokenClient, TokenServer
from milkglass.errors import UnsupportedModel
from milkglass.experiments.kinds.fine_tuning import write_rows
from milkglass.experiments.kinds.generation import greedy_ids, load_generator, reference_answers, row_losses
from milkglass.experiments.procedures import sanitized_chats
from milkglass.experiments.procedures.cells import (
    CELL_VERSION,
    TrainedCell,
    cell_folder,
    count_cpu_seconds,
    load_or_split,
    run_training,
    stored_seconds,
)
from milkglass.experiments.procedures.sanitized_chats import ChatSanitizer
from milkglass.experiments.runs import pack_answers, provenance, unpack_answers, write_spec
from milkglass.metrics import text
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import family_of
from milkglass.models.tokenizer import token_limit
from milkglass.progress import Log
from milkglass.rows.examples import Example, examples_of
from milkglass.rows.messages import Message
from milkglass.sanitizers.text import TokenReader
from milkglass.server.spec import IGNORED_LABEL, Hyperparameters
from milkglass.threat.defence import Defence

ROWS_AT_A_TIME = 2  # rows whose losses are computed at a time: each takes the memory of its tokens times the vocabulary
ANSWERS_AT_A_TIME = 8
WRITTEN_ANSWERS_FILE = "answered.json"


@dataclass(frozen=True)
class ChatPreparer:
    """Prepares conversations as a client half sends them.

    Attributes:
        client: the client half.
        codec: the client half's, with the model's own token limit, so that prompts are not cut.
        sanitizer: replaces the tokens of prompts. None: the client half replaces no tokens.
    """

    client: TokenClient
    codec: Codec
    sanitizer: ChatSanitizer | None

    @classmethod
    def of(cls, base: Checkpoint, client: TokenClient, defence: Defence, rows: ChatRows, seed: int) -> ChatPreparer:
        """Returns the preparer for a client half. A sanitizer's counts come from the rows that are trained with."""
        codec = replace(client.codec, max_tokens=token_limit(base.folder, client.codec.tokenizer))
        if not isinstance(client, SanitizedTokensClient):
            return cls(client, codec, None)
        assert isinstance(defence, SanitizerDefence)
        reader = TokenReader.of_model(base.folder, "the model")
        counts = sanitized_chats.token_counts(reader, rows.chats, "")
        return cls(client, codec, ChatSanitizer.of(defence.method, reader, counts, "", seed))

    def training_rows(self, rows: Sequence[Example], folder: Path) -> Path:
        """Writes training rows as they are sent, and returns their file."""
        if isinstance(self.client, MaskingClient):
            rows = [replace(row, messages=self._mask(row.messages)) for row in rows]
        plain = sanitized_chats.write_chats(rows, folder / "rows.jsonl")
        return plain if self.sanitizer is None else self.sanitizer.write(plain, folder / "sanitized.jsonl")

    def asked_rows(self, rows: Sequence[Example], folder: Path) -> list[Example]:
        """Returns rows with their questions as they are sent, and their own answers."""
        if isinstance(self.client, MaskingClient):
            return [replace(row, messages=self._mask_questions(row.messages)) for row in rows]
        if self.sanitizer is None:
            return list(rows)
        plain = sanitized_chats.write_chats(rows, folder / "asked.jsonl")
        return examples_of(self.sanitizer.write(plain, folder / "asked-sanitized.jsonl"))

    def prompt(self, row: Example) -> NDArray[Any]:
        """Returns the ids of a row's prompt, as they are sent."""
        if self.sanitizer is not None:
            return self.sanitizer.sent_prompt(self.codec.tokenizer, prompt_messages(row), self.codec.max_tokens).ids
        return self.codec.encode_chat(self._messages(row), tools=row.tools)

    def texts(self, row: Example) -> list[str]:
        """Returns what crosses of a row's prompt where text is sent: messages, and definitions and calls of tools."""
        messages = self._messages(row)
        calls = [row.tools, *(message.get("tool_calls") for message in messages)]
        contents = [str(message.get("content") or "") for message in messages]
        return [*contents, *(json.dumps(one, ensure_ascii=False) for one in calls if one)]

    def _messages(self, row: Example) -> tuple[Message, ...]:
        messages = prompt_messages(row)
        return self._mask(messages) if isinstance(self.client, MaskingClient) else messages

    def _mask_questions(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Returns a conversation with its answers as they are, since the loss covers all answers."""
        return tuple(one if one["role"] == "assistant" else self._mask([one])[0] for one in messages)

    def _mask(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        texts = self.client.prepare([str(message.get("content") or "") for message in messages])
        return tuple({**message, "content": text} for message, text in zip(messages, texts, strict=True))


def train_decoder_cell(
    base: Checkpoint, base_digest: str, rows: ChatRows, defence: Defence, training: Hyperparameters, is_tuned: bool,
    seed: int, cells_folder: Path, threads: int | None, log: Log,
) -> tuple[TrainedCell, ChatPreparer]:  # fmt: skip
    """Returns a cell, trained and asked if it does not exist, and what its client half sends.

    The cell's predictions are each row's loss, then each row's number of answer tokens.

    Args:
        is_tuned: whether the model is trained. Otherwise it is asked as it is.

    Raises:
        JobFailed: the training failed, or the deadline (milkglass/deadline.py) passed.
        UnsupportedModel: the defence sends no token ids.
    """
    extent = rows.extent
    identity = {
        "version": CELL_VERSION,
        "base": base_digest,
        "data": {"rows": rows.digest, "train": rows.line_digest(rows.chats), "asked": rows.line_digest(rows.asked)},
        "asked": [extent.written, extent.new_tokens, training.dtype],
        "defence": defence.document(),
        "training": training.model_dump() if is_tuned else {"max_length": training.max_length},
        "seed": seed,
    }
    with cell_folder(cells_folder, identity, log) as folder:
        client, server = load_or_split(base, rows.train, defence, seed, folder, training.max_length)
        if not isinstance(client, TokenClient) or not isinstance(server, TokenServer):
            raise UnsupportedModel(f"{defence.name} sends no token ids", "take a way that is for rows with answers")
        preparer = ChatPreparer.of(base, client, defence, rows, seed)
        result = _tune(preparer, server, rows, training, folder, threads, log) if is_tuned else server
        answered = _answer(preparer, result, rows, training.dtype == "bfloat16", folder, log)
        client_seconds, training_seconds = stored_seconds(folder)
    own_answers = reference_answers(rows.asked[: extent.written])
    similarity = text.mean_similarity(answered["texts"], own_answers, np.random.default_rng(0))["rouge-l"]
    figures = {
        "rouge-l": similarity.value, "rouge-l low": similarity.low, "rouge-l high": similarity.high,
        "seconds": answered["seconds"],
    }  # fmt: skip
    no_logits = np.empty((0, 0), np.float32)
    cell = TrainedCell(
        folder.name, figures, answered["made"], answered["predictions"], no_logits, client, server, result,
        client_seconds=client_seconds, training_seconds=training_seconds,
    )  # fmt: skip
    return cell, preparer


def _tune(
    preparer: ChatPreparer, server: TokenServer, rows: ChatRows, training: Hyperparameters, folder: Path,
    threads: int | None, log: Log,
) -> TokenServer:  # fmt: skip
    """Trains the server's model on the rows as the client sends them."""
    job = folder / "job"
    job.mkdir(exist_ok=True)
    if not (job / "train.safetensors").is_file():
        log("the rows are encoded")
        row_limit = None if training.max_steps is None else training.max_steps * training.batch_size
        with count_cpu_seconds(folder, "client_seconds"):
            file = preparer.training_rows(rows.chats[:row_limit], folder)
            write_rows(preparer.codec, file, job / "train.safetensors", None, training.max_length, skip_long=True)
    write_spec(job, server.folder, training, threads, ("train",))
    return run_training(folder, log)


def _answer(
    preparer: ChatPreparer, server: TokenServer, rows: ChatRows, in_bf16: bool, folder: Path, log: Log
) -> dict[str, Any]:
    """Returns the losses and the written answers, from the cell's folder if they are there.

    Args:
        in_bf16: whether the arithmetic is bf16, as in training.
    """
    path = folder / WRITTEN_ANSWERS_FILE
    if path.is_file():
        return dict(json.loads(path.read_text("utf-8")))
    model: Any = load_generator(server.folder)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=in_bf16):
        losses = _losses(model, preparer, rows, folder, log)
    model = model.to(torch.bfloat16) if in_bf16 else model
    prompts = [preparer.prompt(row) for row in rows.asked[: rows.extent.written]]
    texts, started = list[str](), time.process_time()
    for part in _parts(len(prompts), ANSWERS_AT_A_TIME, "answers are written", log):
        texts += preparer.codec.decode_batch(greedy_ids(model, prompts[part], rows.extent.new_tokens))
    seconds = (time.process_time() - started) / max(1, len(prompts))
    result = {
        "predictions": pack_answers(losses.ravel()),
        "seconds": seconds,
        "texts": texts,
        "made": provenance(folder),
    }
    files.write(path, json.dumps(result, ensure_ascii=False) + "\n")
    return result


def _losses(model: Any, preparer: ChatPreparer, rows: ChatRows, folder: Path, log: Log) -> NDArray[np.float64]:
    """Returns (2, rows) the sum of each row's losses, and the number of its answers' tokens."""
    asked_examples = preparer.asked_rows(rows.asked, folder)
    encoded = preparer.codec.encode_answered(
        [example.messages for example in asked_examples], None, [example.tools for example in asked_examples]
    )
    examples: list[dict[str, Any]] = [
        {"input_ids": ids, "labels": labels} for ids, labels in zip(encoded.ids, encoded.labels, strict=True)
    ]
    order = np.argsort([len(ids) for ids in encoded.ids], kind="stable").tolist()
    result = np.zeros((2, len(asked_examples)))
    for part in _parts(len(order), ROWS_AT_A_TIME, "rows are asked about", log):
        losses_and_counts = row_losses(model, [examples[i] for i in order[part]], ROWS_AT_A_TIME)
        for index, loss, token_count in zip(order[part], *losses_and_counts, strict=True):
            result[:, encoded.source_indices[index]] += loss, token_count
    return result


def _parts(count: int, size: int, activity: str, log: Log) -> Iterator[slice]:
    """Yields slices of `size` that cover `count`, and logs how far they are, such as "8 of 40 answers are written".

    Raises JobFailed once the deadline (milkglass/deadline.py) passed.
    """
    last_report = time.monotonic()
    for start in range(0, count, size):
        require_time()
        if time.monotonic() - last_report > 8:
            log(f"{start} of {count} {activity}")
            last_report = time.monotonic()
        yield slice(start, start + size)


def vector_bytes(base: Checkpoint) -> int:
    """Returns the bytes of one token's vector in the embedding table, as it leaves an enclave."""
    table = family_of(base.config).locate(base).table
    ref = base.tensors[table]
    return int(ref.bytes // ref.shape[0])


def split_losses(losses_and_counts: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Splits what `losses_and_counts` returned: (rows,) the sum of each row's losses, (rows,) its number of tokens."""
    losses, tokens = np.asarray(losses_and_counts, np.float64).reshape(2, -1)
    return losses, tokens


def losses_and_counts(cell: TrainedCell, rows: ChatRows, token_model: Checkpoint | None = None) -> NDArray[Any]:
    """Returns (2 * rows,) the summed loss of each row's answers, then the number of their tokens.

    Args:
        token_model: the model in whose tokens answers are counted, so that losses of models with other tokens compare.
            None: the cell's own.
    """
    losses = unpack_answers(cell.packed_predictions)
    if token_model is None:
        return losses
    encoded = public_codec(token_model).encode_answered([row.messages for row in rows.asked])
    counts = [np.count_nonzero(labels[1:] != IGNORED_LABEL) for labels in encoded.labels]
    return np.concatenate([losses[: len(rows.asked)], np.bincount(encoded.source_indices, counts, len(rows.asked))])


def similarity_figures(cell: TrainedCell) -> Mapping[str, float]:
    """Returns the similarity (ROUGE-L) of the written answers, with its interval."""
    return {name: value for name, value in cell.figures.items() if name.startswith("rouge-l")}
