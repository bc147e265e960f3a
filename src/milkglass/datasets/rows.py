"""Rows of files as they were published: TSV, CSV, JSON Lines, one JSON list, plain lines, Parquet. One row at a time.

What is raised here names the file, the line and the column, and never a cell's content: it may be private. Names
of columns are shown only where they look like names, since the first line of a file without a header is text.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milkglass.errors import CodecError, EmptyText

MAX_FIELD = 1 << 24  # characters of one CSV cell
BLOCK = 1 << 20  # characters of a JSON list read at a time
SHOWN = 20  # column names in a message

_NAME = re.compile(r"[A-Za-z_#][\w#.-]{0,31}", re.ASCII)
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row is, for messages: "line 7 of dev.tsv".

    Attributes:
        number: from 1.
    """

    file: str
    number: int
    noun: str = "line"

    def __str__(self) -> str:
        return f"{self.noun} {self.number} of {self.file}"


Row = Mapping[str, Any]
Rows = Iterator[tuple[Place, Row]]


def lines(path: Path, encoding: str = "utf-8-sig") -> Iterator[tuple[int, str]]:
    """Each line and its number. Only a line feed ends one: texts hold other characters that Python would split at."""
    try:
        with path.open(encoding=encoding, newline="\n") as file:
            for number, line in enumerate(file, 1):
                yield number, line.rstrip("\r\n")
    except UnicodeDecodeError:
        raise _not_utf8(path) from None


def texts(path: Path, encoding: str = "utf-8-sig") -> Rows:
    """Every line that is not blank, as the column "text"."""
    for number, line in lines(path, encoding):
        if line.strip():
            yield Place(path.name, number), {"text": line.strip()}


def tsv(path: Path, needed: Sequence[str], header: Sequence[str] | None = None, flawed: bool = False) -> Rows:
    """Quoting off, as GLUE writes it. header: of a file without one. flawed: the published file is known to hold rows
    with another number of cells; they come out empty, for the caller to leave out and to count."""
    names = header
    for number, line in lines(path):
        cells = line.split("\t")
        if names is None:
            names = [name.strip() for name in cells]
            require_columns(path.name, names, needed)
        elif not line:
            continue
        elif len(cells) == len(names):
            yield Place(path.name, number), dict(zip(names, cells, strict=True))
        elif flawed:
            yield Place(path.name, number), {}
        else:
            raise _uneven(Place(path.name, number), len(cells), len(names))
    if names is None:
        raise EmptyText(f"{path.name} is empty", "give at least one row")


def comma(path: Path, needed: Sequence[str], header: Sequence[str] | None = None) -> Rows:
    """CSV, quotes doubled inside quotes. header: of a file without one."""
    names = header
    limit = csv.field_size_limit(MAX_FIELD)
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for cells in reader:
                number = reader.line_num
                if names is None:
                    names = [name.strip() for name in cells]
                    require_columns(path.name, names, needed)
                elif len(cells) == len(names):
                    yield Place(path.name, number), dict(zip(names, cells, strict=True))
                elif cells:
                    raise _uneven(Place(path.name, number), len(cells), len(names))
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    except csv.Error:
        raise CodecError(f"{Place(path.name, number + 1)} is not a row", "check its quotes") from None
    finally:
        csv.field_size_limit(limit)
    if names is None:
        raise EmptyText(f"{path.name} is empty", "give at least one row")


def json_lines(path: Path) -> Rows:
    for number, line in lines(path):
        if line.strip():
            place = Place(path.name, number)
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):  # the decoder's own error carries the text
                raise CodecError(f"{place} is not JSON", "write one JSON object a line") from None
            if not isinstance(value, dict):
                raise CodecError(f"{place} is not a JSON object", "write one JSON object a line")
            yield place, value


def json_list(path: Path) -> Iterator[tuple[Place, Any]]:
    """The entries of a file that is one JSON list; a block of it is held at a time, and one entry."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            buffer = file.read(BLOCK)
            while buffer.isspace():
                buffer = file.read(BLOCK)
            at = _skip(buffer, 0)
            if buffer[at : at + 1] != "[":
                raise CodecError(f"{path.name} is not a JSON list", 'write [{"instruction": ...}, ...]')
            at, number, more = _skip(buffer, at + 1), 1, BLOCK
            while True:
                place = Place(path.name, number, "entry")
                result = _entry(buffer, at)
                if result is None:  # the block ends inside the entry, or this is no JSON: only more text can tell
                    ahead = file.read(more)
                    if not ahead:
                        raise CodecError(f"{place} is not JSON", "save the list again: it is cut off or broken")
                    buffer, more = buffer[at:] + ahead, more * 2
                    at = _skip(buffer, 0)
                    continue
                value, at, last = result
                if value is not _END:
                    yield place, value
                if last:
                    return
                number, more = number + 1, BLOCK
    except UnicodeDecodeError:
        raise _not_utf8(path) from None


_END = object()
_DECODER = json.JSONDecoder()


def _entry(buffer: str, at: int) -> tuple[Any, int, bool] | None:
    """The entry that begins at `at`, where the next one begins, and whether it is the last. None: not to be read."""
    if buffer[at : at + 1] == "]":
        return _END, at + 1, True
    try:
        value, end = _DECODER.raw_decode(buffer, at)
    except (ValueError, RecursionError):
        return None
    end = _skip(buffer, end)
    mark = buffer[end : end + 1]
    return (value, _skip(buffer, end + 1), mark == "]") if mark in (",", "]") and mark else None


def _skip(buffer: str, at: int) -> int:
    result = _SPACE.match(buffer, at)
    assert result is not None  # it matches nothing as well
    return result.end()


def parquet(path: Path, needed: Sequence[str]) -> Rows:
    """needed: the columns that are read; none are named: all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid:
        raise CodecError(f"{path.name} is not a Parquet file", "give .parquet, .jsonl, .csv or .tsv") from None
    with file:
        require_columns(path.name, file.schema_arrow.names, needed)
        number = 0
        for batch in file.iter_batches(columns=list(needed) or None):
            for row in batch.to_pylist():
                number += 1
                yield Place(path.name, number, "row"), row


# --- checks -----------------------------------------------------------------------------------------------------------
def require_columns(file: str, names: Sequence[str], needed: Sequence[str]) -> None:
    """Raises CodecError for a header that lacks a column or has one twice."""
    if lost := [name for name in needed if name not in names]:
        raise CodecError(f"the header of {file} names no column {lost[0]}", columns_there(names, needed))
    if twice := [name for name in needed if names.count(name) > 1]:
        raise CodecError(f"the header of {file} names the column {twice[0]} twice", "rename one of them")


def columns_there(names: Collection[str], known: Collection[str] = ()) -> str:
    """ "the columns there are: id, text". What does not look like a name is counted and not shown."""
    shown = [name for name in names if name in known or _NAME.fullmatch(name)]
    hidden = len(names) - len(shown[:SHOWN])
    if not shown:
        return f"its first line has {hidden} cells and looks like no header: add one that names the columns"
    return f"the columns there are: {', '.join(shown[:SHOWN])}" + (f" and {hidden} more" if hidden else "")


def text_of(place: Place, row: Row, column: str) -> str:
    """A cell that must hold text. Raises CodecError, EmptyText."""
    if column not in row:
        raise CodecError(f"{place} has no {column}", columns_there(list(row)))
    value = row[column]
    if not isinstance(value, str):
        raise CodecError(f"{place} has a {column} that is not text", "give a string")
    if not value.strip():
        raise EmptyText(f"{place} has an empty {column}", "leave the row out")
    return value


def _uneven(place: Place, cells: int, columns: int) -> CodecError:
    return CodecError(f"{place} has {cells} cells, and there are {columns} columns", "check its tabs or quotes")


def _not_utf8(path: Path) -> CodecError:
    return CodecError(f"{path.name} is not UTF-8 text", "convert it to UTF-8")
