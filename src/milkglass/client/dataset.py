"""The user's own data: read it, check it, and write it as scrambled Parquet that a server can train on.

JSON Lines, one of these shapes throughout a file:

    {"text": ..., "label": ...}                      {"text": ..., "text_pair": ..., "label": ...}
    {"messages": [{"role": ..., "content": ...}]}    {"instruction": ..., "input": ..., "output": ...}
    {"text": ...}

or TSV/CSV with a header of the same names (also `sentence` for `text`). TSV is read without quoting, as GLUE writes it.
Files are read a row at a time, so they may be of any size. Messages name the file and the line, and never quote it: a
traceback or a log must not hold private text. Label names stay on the client; the server sees their numbers. For a
regression the labels are numbers, 2.5 or "2.5"; the server sees them standardised (scores.py).
"""

from __future__ import annotations

import csv
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from milkglass.client.codec import Codec, Labelled
from milkglass.client.conversation import Message
from milkglass.client.scores import Scale, score_of
from milkglass.errors import CodecError, EmptyText, UsageError

Kind = Literal["labelled", "chat", "text"]
BATCH = 1000  # rows tokenised and written at a time
MAX_FIELD = 1 << 24  # characters of one CSV field
SYNONYMS = {"sentence": "text", "sentence1": "text", "sentence2": "text_pair"}

List32, List8 = pa.list_(pa.int32()), pa.list_(pa.int8())


@dataclass(frozen=True)
class Example:
    """One row. `line` counts from 1, for messages; either `text` (and perhaps `pair`, `label`) or `messages`."""

    line: int
    kind: Kind
    text: str = ""
    pair: str | None = None
    label: str | None = None
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Summary:
    """What a file holds. labels: the names that occur, in order (numbers by value). scale: of the scores, where it was
    read as data for a regression; there are no labels then."""

    kind: Kind
    rows: int
    pairs: bool
    labels: tuple[str, ...]
    scale: Scale | None = None

    @property
    def task(self) -> Literal["classification", "regression", "causal-lm"]:
        if self.kind != "labelled":
            return "causal-lm"
        return "classification" if self.scale is None else "regression"


@dataclass(frozen=True)
class Written:
    rows: int
    tokens: int
    longest: int
    cut: int  # rows cut to the length limit


def read_examples(path: Path, scores: bool = False) -> Iterator[Example]:
    """scores: labels are the numbers of a regression. Raises CodecError, naming file and line, for a row that is not of
    the file's shape, EmptyText for a file without rows."""
    rows = _table_rows(path) if path.suffix.lower() in (".csv", ".tsv") else _json_rows(path)
    first: Example | None = None
    try:
        for line, row in rows:
            example = _example(line, place(path, line), row, scores)
            first = first or example
            if (example.kind, example.pair is None) != (first.kind, first.pair is None):
                raise CodecError(
                    f"{place(path, line)} holds another kind of row than line {first.line}",
                    "give one kind of row a file",
                )
            yield example
    except UnicodeDecodeError as error:
        raise CodecError(f"{path.name} is not UTF-8 text", "convert it to UTF-8") from error
    if first is None:
        raise EmptyText(f"{path.name} has no rows", "give at least one")


def place(path: Path, line: int) -> str:
    """How messages name a row."""
    return f"line {line} of {path.name}"


def summarise(path: Path, scores: bool = False) -> Summary:
    """Read the whole file once, checking every row. scores: as for `read_examples`."""
    if scores:
        return _scored(path)
    names: set[str] = set()
    rows, example = 0, None
    for example in read_examples(path):
        rows += 1
        if example.label is not None:
            names.add(example.label)
    assert example is not None  # read_examples refuses an empty file
    numeric = all(name.isascii() and name.isdigit() for name in names)
    ordered = sorted(names, key=lambda name: (int(name) if numeric else 0, name))
    return Summary(example.kind, rows, example.pair is not None, tuple(ordered))


def require_classes(path: Path, found: Summary) -> None:
    """Raises CodecError for labels of which nothing can be learnt: one alone, or another in each of the rows, as where
    numbers of rows were taken for labels."""
    count = len(found.labels)
    if count < 2:
        raise CodecError(f"the column label of {path.name} has 1 label only", "classification needs at least 2")
    if count == found.rows > 2:
        raise CodecError(
            f"the column label of {path.name} has {count:,} labels in {found.rows:,} rows, and no class has two rows",
            "does it hold ids? `milkglass data FILE --label-column NAME --out NEW.jsonl` takes another column",
        )


def _scored(path: Path) -> Summary:
    rows, first = 0, None

    def numbers() -> Iterator[float]:
        nonlocal rows, first
        for example in read_examples(path, scores=True):
            if example.label is None:
                raise CodecError(
                    f"{place(path, example.line)} has no label", "a regression needs a number in every row"
                )
            rows, first = rows + 1, first or example
            yield float(example.label)

    scale = Scale.of(numbers())
    assert first is not None  # read_examples refuses an empty file
    return Summary("labelled", rows, first.pair is not None, (), scale)


def number_labels(names: Sequence[str], known: Mapping[str, int] | None) -> dict[str, int]:
    """A number for each label. The known numbers stand when they cover all names, so that a second fine-tune, or one on
    part of the data, numbers them alike."""
    if known and set(names) <= set(known):
        return dict(known)
    return {name: number for number, name in enumerate(names)}


def write_parquet(
    codec: Codec,
    source: Path,
    out: Path,
    labels: Mapping[str, int] | Scale | None = None,
    max_length: int = 512,
    progress: Callable[[int], None] = lambda rows: None,
) -> Written:
    """Scramble `source` into `out`: input_ids, attention_mask, token_type_ids where the model has them, and labels:
    their numbers, or given a Scale, for a regression, the scores (float32) as it sends them.

    Too long rows are cut to `max_length` tokens and counted. `out` appears under its name only when it is complete.
    """
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    counts: list[Written] = []
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            with ExitStack() as writers:
                writer: pq.ParquetWriter | None = None
                for batch in _batches(read_examples(source, scores=isinstance(labels, Scale))):
                    table, cut = _encoded(codec, source, batch, labels, max_length)
                    writer = writer or writers.enter_context(pq.ParquetWriter(file, table.schema))
                    writer.write_table(table)
                    counts.append(_count(table, cut))
                    progress(len(batch))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return Written(
        sum(one.rows for one in counts),
        sum(one.tokens for one in counts),
        max(one.longest for one in counts),
        sum(one.cut for one in counts),
    )


def _count(table: pa.Table, cut: int) -> Written:
    lengths = table["input_ids"].combine_chunks().value_lengths().to_numpy()
    return Written(table.num_rows, int(lengths.sum()), int(lengths.max()), cut)


# --- rows -------------------------------------------------------------------------------------------------------------
def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    _require_bytes(path)
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError):  # the decoder's own error carries the line's text
                raise CodecError(f"{place(path, line)} is not JSON", "write one JSON object a line") from None
            if not isinstance(row, dict):
                raise CodecError(f"{place(path, line)} is not a JSON object", 'write {"text": ..., "label": ...}')
            yield line, row


def _table_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    _require_bytes(path)
    tabs = path.suffix.lower() == ".tsv"
    with path.open(encoding="utf-8-sig", newline="") as file:
        limit = csv.field_size_limit(MAX_FIELD)
        try:
            reader = csv.reader(
                file, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_NONE if tabs else 0, strict=True
            )
            header = [SYNONYMS.get(name.strip(), name.strip()) for name in next(reader, [])]
            if "text" not in header:
                raise CodecError(
                    f"the header of {path.name} names no column text or sentence", "give the columns text and label"
                )
            for cells in reader:
                if len(cells) != len(header) and cells:
                    raise CodecError(
                        f"{place(path, reader.line_num)} has {len(cells)} cells, the header {len(header)}",
                        "quote cells that hold the separator" if not tabs else "remove tabs from the text",
                    )
                if cells:
                    yield reader.line_num, dict(zip(header, cells, strict=True))
        except csv.Error:
            raise CodecError(f"{place(path, reader.line_num)} is no row", "check its quotes") from None
        finally:
            csv.field_size_limit(limit)


def _require_bytes(path: Path) -> None:
    """Nothing is said of the columns of a file that has none."""
    if not path.stat().st_size:
        raise EmptyText(f"{path.name} is empty", "give at least one row")


def _example(line: int, where: str, row: Mapping[str, Any], scores: bool = False) -> Example:
    """where: the row's name in messages."""
    if "messages" in row:
        return Example(line, "chat", messages=_messages(where, row["messages"]))
    if "instruction" in row:
        asked = _string(where, row, "instruction")
        extra = _string(where, row, "input") if row.get("input") else ""
        answer = _string(where, row, "output")
        user = {"role": "user", "content": f"{asked}\n\n{extra}" if extra else asked}
        return Example(line, "chat", messages=(user, {"role": "assistant", "content": answer}))
    if "text" not in row and "sentence" in row:
        row = {**row, "text": row["sentence"]}
    text = _string(where, row, "text")
    pair = _string(where, row, "text_pair") if "text_pair" in row else None
    if "label" not in row:
        if pair is not None:
            raise CodecError(f"{where} has a text_pair and no label", "give a label")
        return Example(line, "text", text)
    label = repr(score_of(where, row["label"])) if scores else _label(where, row["label"])
    return Example(line, "labelled", text, pair, label)


def _string(where: str, row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise CodecError(f"{where} has no {name}", f'each row needs "{name}", a string')
    if not value.strip():
        raise EmptyText(f"{where} has an empty {name}", "leave the row out")
    return value


def _label(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise CodecError(
            f"{where} has a label that is no name and no whole number",
            "give a name such as billing; for numbers of a regression say `--task regression`",
        )
    return str(value).strip()


def _messages(where: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise CodecError(f"{where} has no list of messages", 'give [{"role": "user", "content": ...}, ...]')
    turns = []
    for turn in value:
        if not isinstance(turn, dict) or turn.get("role") not in ("system", "user", "assistant"):
            raise CodecError(f"{where} has a message of no known role", "roles: system, user, assistant")
        turns.append({"role": turn["role"], "content": _string(where, turn, "content")})
    if not any(turn["role"] == "assistant" for turn in turns[1:]):
        raise CodecError(f"{where} has no assistant's answer to learn", "end it with the assistant's message")
    return tuple(turns)


# --- columns ----------------------------------------------------------------------------------------------------------
def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    examples = iter(examples)
    while batch := list(islice(examples, BATCH)):
        yield batch


def _encoded(
    codec: Codec, source: Path, batch: Sequence[Example], labels: Mapping[str, int] | Scale | None, max_length: int
) -> tuple[pa.Table, int]:
    try:
        if batch[0].kind == "labelled":
            return _classified(codec, source, batch, labels, max_length)
        done = _supervised(codec, batch, max_length)
    except CodecError as error:
        if error.message.startswith("line "):
            raise
        if error.place is not None:
            raise error.renamed(place(source, batch[error.place].line)) from None
        between = f"between lines {batch[0].line} and {batch[-1].line} of {source.name}"
        raise type(error)(f"{between}: {error.message}", error.hint) from None
    columns = {**_id_columns(done.ids), "labels": _lists(done.labels, List32)}
    return pa.table(columns), done.cut


def _supervised(codec: Codec, batch: Sequence[Example], max_length: int) -> Labelled:
    if batch[0].kind == "chat":
        return codec.encode_examples([one.messages for one in batch], max_length, truncate=True)
    return codec.encode_plain([one.text for one in batch], max_length, truncate=True)


def _numbers(source: Path, batch: Sequence[Example], labels: Mapping[str, int] | Scale | None) -> pa.Array:
    if labels is None:
        raise UsageError("these rows have labels, and no numbers for them were given", "number them first")
    if isinstance(labels, Scale):
        return pa.array([labels.sent(float(str(one.label))) for one in batch], pa.float32())
    unknown = next((one.line for one in batch if one.label not in labels), None)
    if unknown is not None:
        raise CodecError(
            f"{place(source, unknown)} has a label that the training file lacks", "use the same label names"
        )
    return pa.array([labels[str(one.label)] for one in batch], pa.int32())


def _classified(
    codec: Codec, source: Path, batch: Sequence[Example], labels: Mapping[str, int] | Scale | None, max_length: int
) -> tuple[pa.Table, int]:
    numbers = _numbers(source, batch, labels)
    pairs = None if batch[0].pair is None else [one.pair or "" for one in batch]
    encoded = codec.encode([one.text for one in batch], pairs, max_length, truncate=True)
    columns = _id_columns(encoded.ids)
    if encoded.token_type_ids is not None:
        columns["token_type_ids"] = _lists(encoded.token_type_ids, List8)
    columns["labels"] = numbers
    return pa.table(columns), encoded.cut


def _id_columns(ids: Sequence[NDArray[np.int32]]) -> dict[str, pa.Array]:
    return {
        "input_ids": _lists(ids, List32),
        "attention_mask": _lists([np.ones(len(one), np.int8) for one in ids], List8),
    }


def _lists(arrays: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in arrays])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays), kind.value_type), type=kind)
