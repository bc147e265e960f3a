"""Writes training data as scrambled Parquet: ids and numbers, no text and no names.

The data are read once to check them, their labels are numbered, and then they are written.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from milkglass import files
from milkglass.client.codec.codec import Codec
from milkglass.client.data.marked_rows import INT8_LIST, INT32_LIST, write_mark
from milkglass.client.key.key import Key, permutation
from milkglass.errors import CodecError, TooLong, UsageError
from milkglass.noise.stream import subkey
from milkglass.progress import Progress, no_progress
from milkglass.rows.data_file import Source
from milkglass.rows.examples import Example, Summary, no_labels_error, number_labels, read_examples
from milkglass.rows.labels import Scale
from milkglass.rows.place import Place, places_text
from milkglass.sequences import batched

BATCH_ROWS = 1000  # rows that are tokenized and written at a time
EncodedBatch = tuple[dict[str, pa.Array], Sequence[int], Mapping[int, int]]
LabelsOrScale = Mapping[str, int] | Scale | None  # numbers of labels, a scale of scores, or None: rows without labels


def require_generator(source: Source, summary: Summary, model_kind: object) -> None:
    """Raises CodecError if the rows have no labels and the model is an encoder (`model_kind` is "encoder")."""
    if summary.task == "causal-lm" and model_kind == "encoder":
        error = no_labels_error(source, summary)
        raise CodecError(f"{error.message}, and the model is an encoder, which classifies", error.hint)


def labels_or_scale_of(key: Key, summary: Summary) -> LabelsOrScale:
    """Returns the numbers of the labels, or the scale of the scores. None: the rows have neither.

    Label names that the key knows keep their numbers, so that the answers of a second fine-tune are read like those of
    the first. A scale that the key knows is kept if it suits the data.

    Raises:
        UsageError: nothing could be learnt from the rows under this key.
    """
    if summary.task == "causal-lm" and key.has_shared_ids:
        raise UsageError(
            "these rows are for a model that generates, and under this key an id names no token",
            "name the column of labels with --label-column for a classifier; for answers make a key with "
            "--scheme obfuslm",
        )
    if summary.task == "classification":
        return number_labels(in_secret_order(summary.labels, key), key.info.labels)
    scale = key.info.scale
    return scale if scale and summary.scale and scale.suits(summary.scale) else summary.scale


def in_secret_order(names: Sequence[str], key: Key) -> tuple[str, ...]:
    """Returns the names in an order that the key decides.

    The same names give the same order, so that an upload can resume. The server sees numbers. In alphabetical order,
    anyone who guesses the set of names would know which number is which. Drawn under the key, all orders are equally
    likely. The server can count how often each number occurs.
    """
    ordered = sorted(names)
    info = hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
    order = permutation(subkey(key.root, key.model_digest, f"labels/{info}"), len(ordered))
    return tuple(ordered[index] for index in order)


def in_fresh_order(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names in a random order, for halves that store the numbers beside their own secret."""
    return tuple(secrets.SystemRandom().sample(sorted(names), len(names)))


@dataclass(frozen=True)
class WriteCounts:
    """Counts what was written to a file of training rows.

    Attributes:
        row_count: rows that were written. A conversation can make several.
        token_count: tokens of these rows.
        cut_count: rows that were cut to the length limit.
        left_out_places: the places of the conversations that were left out because no answer is within the limit.
    """

    row_count: int
    token_count: int
    cut_count: int
    left_out_places: tuple[Place, ...] = ()


def write_parquet(
    codec: Codec,
    source: Source,
    out: Path,
    labels: LabelsOrScale = None,
    max_length: int = 512,
    progress: Progress = no_progress,
    skip_long: bool = False,
    selection: NDArray[np.bool_] | None = None,
) -> WriteCounts:
    """Writes `source` scrambled: input_ids, attention_mask, labels, and token_type_ids if the model has them.

    Longer rows are cut and counted. `out` appears when it is complete, and is marked as scrambled (marked_rows.py)
    unless the codec does not scramble.

    Args:
        source: the file with the rows.
        labels: the numbers of the labels, or the scale by which scores are sent (float32). None: rows without labels.
        max_length: the most tokens of a row.
        progress: receives how many more rows were read and encoded.
        skip_long: whether conversations without an answer within the limit are left out. Otherwise all are refused.
        selection: (rows,) whether each row is written. None: all are.

    Raises:
        CodecError: a row cannot be encoded.
        TooLong: conversations have no answer within the limit, or no row is left.
    """
    limit = min(max_length, codec.max_tokens)
    lengths, cut_count = list[NDArray[np.int32]](), 0
    unanswered: dict[Place, int] = {}
    row_count = 0
    with files.atomic_write(out, "wb") as file, ExitStack() as writers:
        writer: pq.ParquetWriter | None = None
        examples = read_examples(source, are_scores=isinstance(labels, Scale))
        for batch in batched(examples if selection is None else compress(examples, selection), BATCH_ROWS):
            columns, too_long, unanswered_rows = _encode_batch(codec, source, batch, labels, limit)
            row_count += len(batch)
            unanswered |= {batch[index].place(source): start for index, start in unanswered_rows.items()}
            if len(table := pa.table(columns)):
                writer = writer or writers.enter_context(pq.ParquetWriter(file, table.schema))
                writer.write_table(table)
                lengths.append(table["input_ids"].combine_chunks().value_lengths().to_numpy())
                cut_count += len({*too_long} - {*unanswered_rows})
            progress(len(batch))
        if not skip_long:
            _require_answers(unanswered, row_count, source, limit, codec.max_tokens)
        if writer is None:
            fault = f"none of the {row_count:,} rows of {source.name} has an answer within {limit} tokens"
            raise TooLong(fault, "give a larger --max-length")
    if codec.key_id is not None:
        write_mark(out, codec.key_id)
    all_lengths = np.concatenate(lengths)
    return WriteCounts(len(all_lengths), int(all_lengths.sum()), cut_count, tuple(unanswered))


def _require_answers(
    unanswered: Mapping[Place, int], row_count: int, source: Source, limit: int, model_limit: int
) -> None:
    """Raises TooLong if conversations have no answer within the limit: cut, they would teach nothing.

    Args:
        unanswered: the place of each such conversation, with the number of tokens before its first answer.
        row_count: how many rows the file has.
        limit: the most tokens of a row.
        model_limit: the most tokens that the model takes.
    """
    if not unanswered:
        return
    verb = "has" if len(unanswered) == 1 else "have"
    start = max(unanswered.values())
    longer = f"set --max-length to more than {start} to use them all, or " if start < model_limit else ""
    raise TooLong(
        f"{len(unanswered):,} of the {row_count:,} rows of {source.name} {verb} no answer within {limit} tokens: "
        f"{places_text([*unanswered])}",
        f"{longer}leave them out with --skip-long",
    )


def _encode_batch(
    codec: Codec, source: Source, batch: Sequence[Example], labels: LabelsOrScale, limit: int
) -> EncodedBatch:
    """Returns the columns of the encoded rows, the indices of rows that were cut, and the rows without an answer.

    The rows without an answer within the limit are given by their indices, with the tokens before their first answer.
    """
    label_numbers = _label_column(source, batch, labels) if batch[0].kind == "labelled" else None
    try:
        if label_numbers is not None:
            return _encode_classified(codec, batch, label_numbers, limit)
        if batch[0].kind == "chat":
            labelled = codec.encode_answered([row.messages for row in batch], limit, [row.tools for row in batch])
        else:
            labelled = codec.encode_causal([row.text for row in batch], limit, truncate=True)
    except CodecError as error:
        if error.text_index is not None:
            raise error.with_name(str(batch[error.text_index].place(source))) from None
        span = f"between {batch[0].noun} {batch[0].line} and {batch[-1].place(source)}"
        raise type(error)(f"{span}: {error.message}", error.hint) from None
    columns = {**_id_columns(labelled.ids), "labels": _lists(labelled.labels, INT32_LIST)}
    return columns, labelled.cut_indices, labelled.lost_answer_starts


def _label_column(source: Source, batch: Sequence[Example], labels: LabelsOrScale) -> pa.Array:
    """Returns the numbers of a batch's labels, or its scores as they are sent.

    Raises:
        UsageError: no numbers of labels were given.
        CodecError: a row has a label without a number.
    """
    if labels is None:
        raise UsageError("these rows have labels, and no numbers for them were given", "number them first")
    if isinstance(labels, Scale):
        return pa.array([labels.standardise(float(str(row.label))) for row in batch], pa.float32())
    example = next((row for row in batch if row.label not in labels), None)
    if example is not None:
        raise CodecError(
            f"{example.place(source)} has a label that the training file lacks", "use the same label names"
        )
    return pa.array([labels[str(row.label)] for row in batch], pa.int32())


def _encode_classified(codec: Codec, batch: Sequence[Example], label_numbers: pa.Array, limit: int) -> EncodedBatch:
    pairs = None if batch[0].pair is None else [row.pair or "" for row in batch]
    encoded = codec.encode([row.text for row in batch], pairs, limit, truncate=True)
    columns = _id_columns(encoded.ids)
    if encoded.token_type_ids is not None:
        columns["token_type_ids"] = _lists(encoded.token_type_ids, INT8_LIST)
    columns["labels"] = label_numbers
    return columns, encoded.cut_indices, {}


def _id_columns(ids: Sequence[NDArray[np.int32]]) -> dict[str, pa.Array]:
    return {
        "input_ids": _lists(ids, INT32_LIST),
        "attention_mask": _lists([np.ones(len(row), np.int8) for row in ids], INT8_LIST),
    }


def _lists(arrays: Sequence[NDArray[Any]], list_type: pa.DataType) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(np.concatenate(arrays) if arrays else [], list_type.value_type), type=list_type
    )
