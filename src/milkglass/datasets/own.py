"""The user's own tables: JSON Lines, CSV, TSV or Parquet, with columns of any name.

A file whose columns have the names that `client/data/dataset.py` knows needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milkglass.client.data.dataset import SYNONYMS, Example
from milkglass.datasets.rows import Place, Row, Rows, columns_there, comma, json_lines, parquet, text_of, tsv
from milkglass.errors import CodecError, EmptyText, UsageError


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a file are read. A label is a name, a whole number, or true and false.

    Attributes:
        label: None for plain text.
    """

    text: str
    label: str | None = None
    pair: str | None = None

    def __post_init__(self) -> None:
        if self.pair is not None and self.label is None:
            raise UsageError("a pair column without a label column teaches nothing", "give --label-column too")
        if len(set(self.needed)) < len(self.needed):
            raise UsageError("two of the columns are one and the same", "give each its own")

    def document(self) -> dict[str, str | None]:
        return {"text": self.text, "label": self.label, "text_pair": self.pair}

    @property
    def needed(self) -> tuple[str, ...]:
        return tuple(name for name in (self.text, self.pair, self.label) if name is not None)


def read(path: Path, columns: Columns) -> Iterator[Example]:
    """Raises UsageError for another kind of file, CodecError for a row that cannot be, when it is reached."""
    return _examples(path, _rows(path, columns.needed), columns)


def columns_of(path: Path, label: str | None = None, pair: str | None = None) -> Columns:
    """The column of texts and, where they are not given, those of labels and second texts, by the names that
    `client/data/dataset.py` knows. Raises UsageError where no column has such a name, EmptyText, CodecError."""
    rows = _rows(path, ())
    names = list(next(rows, (None, {}))[1])
    if not names:
        raise EmptyText(f"{path.name} has no rows", "give at least one")
    known = {SYNONYMS.get(name, name): name for name in reversed(names)}
    if "text" not in known:
        raise UsageError(
            f"no column of {path.name} is called text or sentence", f"give --text-column; {columns_there(names)}"
        )
    label = label or known.get("label")
    return Columns(known["text"], label, pair or (known.get("text_pair") if label else None))


def _rows(path: Path, needed: tuple[str, ...]) -> Rows:
    reader = _READERS.get(path.suffix.lower())
    if not path.is_file():
        raise UsageError(f"there is no file {path}", "give the file itself")
    if reader is None:
        raise UsageError(f"{path.name} is of no kind that is read", f"give {', '.join(_READERS)}")
    return reader(path, needed)


def _examples(path: Path, rows: Rows, columns: Columns) -> Iterator[Example]:
    provided = False
    for place, row in rows:
        provided = True
        text = text_of(place, row, columns.text)
        if columns.label is None:
            yield Example(place.number, "text", text)
            continue
        pair = None if columns.pair is None else text_of(place, row, columns.pair)
        yield Example(place.number, "labelled", text, pair, _label(place, row, columns.label))
    if not provided:
        raise EmptyText(f"{path.name} has no rows", "give at least one")


def _label(place: Place, row: Row, column: str) -> str:
    if column not in row:
        raise CodecError(f"{place} has no {column}", columns_there(list(row)))
    value: Any = row[column]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a Parquet column of whole numbers with gaps is one of floats
    if isinstance(value, float) or not isinstance(value, str | int):
        raise CodecError(
            f"{place} has a {column} that is neither a name nor a whole number", "give a name such as billing"
        )
    result = str(value).lower() if isinstance(value, bool) else str(value).strip()
    if not result:
        raise EmptyText(f"{place} has an empty {column}", "leave the row out")
    return result


_READERS = {".jsonl": lambda path, needed: json_lines(path), ".csv": comma, ".tsv": tsv, ".parquet": parquet}
