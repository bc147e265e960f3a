"""The user's own data, read and checked row by row.

JSON Lines, one of these shapes throughout a file:

    {"text": ..., "label": ...}                      {"text": ..., "text_pair": ..., "label": ...}
    {"messages": [{"role": ..., "content": ...}]}    {"instruction": ..., "input": ..., "output": ...}
    {"text": ...}

or TSV/CSV with a header of the same names (also `sentence` for `text`). TSV is read without quoting, as GLUE writes it.
Files are read a row at a time, so they may be of any size. Messages name the file and the line, and never quote it: a
traceback or a log must not hold private text. Label names stay on the client; the server sees their numbers. For a
regression the labels are numbers, 2.5 or "2.5"; the server sees them standardised (label_scale.py).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from milkglass.client.codec.conversation import Message
from milkglass.client.label_scale import Scale, score_of
from milkglass.errors import CodecError, EmptyText, UsageError

Kind = Literal["labelled", "chat", "text"]
KINDS = (".jsonl", ".json", ".csv", ".tsv", "")  # of training data; what has no kind is read as JSON Lines
MAX_FIELD = 1 << 24  # characters of one CSV field
SYNONYMS = {"sentence": "text", "sentence1": "text", "sentence2": "text_pair"}


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


def read_examples(path: Path, scores: bool = False) -> Iterator[Example]:
    """scores: labels are the numbers of a regression. Raises CodecError, naming file and line, for a row that is not of
    the file's shape, EmptyText for a file without rows."""
    rows = _table_rows(path) if path.suffix.lower() in (".csv", ".tsv") else _json_rows(path)
    first: Example | None = None
    try:
        for line, row in rows:
            example = _example(path, line, row, scores)
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
    """Read the whole file once, checking every row. scores: as for `read_examples`. Raises UsageError for a file of
    another kind by its name."""
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise UsageError(
            f"training data must be .jsonl, .csv or .tsv; {path.name} is {kind}",
            f"`milkglass data {path.name} --out NEW.jsonl` makes it of a Parquet file"
            if kind == ".parquet"
            else 'write one JSON object a line: {"text": "...", "label": "..."}',
        )
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
    # by value without `int`, which refuses more than 4,300 digits
    ordered = sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name) if numeric else name)
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
            raise CodecError(f"{place(path, reader.line_num)} is not a row", "check its quotes") from None
        finally:
            csv.field_size_limit(limit)


def _require_bytes(path: Path) -> None:
    """Nothing is said of the columns of a file that has none."""
    if not path.stat().st_size:
        raise EmptyText(f"{path.name} is empty", "give at least one row")


def _example(path: Path, line: int, row: Mapping[str, Any], scores: bool) -> Example:
    where = place(path, line)
    if "messages" in row:
        return Example(line, "chat", messages=_messages(where, row["messages"]))
    if "instruction" in row:
        requested = _string(where, row, "instruction")
        extra = _string(where, row, "input") if row.get("input") else ""
        answer = _string(where, row, "output")
        user = {"role": "user", "content": f"{requested}\n\n{extra}" if extra else requested}
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
            f"{where} has a label that is neither a name nor a whole number",
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
