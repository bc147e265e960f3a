"""Names the places of rows and their columns in messages.

A message names the file, the line and the column, and never a cell's content, which may be private. The first line of
a file without a header is a row of text. It counts as a header, and is shown completely, only if one of its cells is a
column that the user or the program looks for, in any spelling ("Customer said" for customer_said): a row of text is
not expected to have that very word as a cell. It also counts as a header if it has a name where the rows below have
numbers. In any other first line a cell with a blank, such as "my arm hurts", may be text. Then a message has only
single words that look like names, and counts the rest; a command prints the line itself on its user's terminal
(`MilkglassError.for_terminal`). The keys of JSON objects and the columns of Parquet are names.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from milkglass.errors import CodecError, EmptyText
from milkglass.unique_keys import RepeatedKey

MAX_COLUMNS_SHOWN = 20  # column names in a message
MAX_PLACES_SHOWN = 3  # places in a message
MAX_NAME_CHARACTERS = 64  # characters of a column's name in a message
MAX_CELL_CHARACTERS = 40  # characters of a first line's cell on the terminal
AnyCodecError = TypeVar("AnyCodecError", bound=CodecError)
USUAL_COLUMNS = frozenset({"text", "sentence", "label"})  # columns that any file may have
AMBIGUOUS_COLUMNS = frozenset({"question", "premise", "dialogue"})  # such a cell may be the label of a row of text

_NAME_PATTERN = re.compile(r"[A-Za-z_#][\w#.-]{0,31}", re.ASCII)
_SEPARATOR_PATTERN = re.compile(r"[\W_]+")
_NO_VALUE = "n/?a|nan|null|none|nil|empty|missing|unknown"
_WORDS_PATTERN = re.compile(rf"(?!(?:{_NO_VALUE})$)[^\W\d](?:[^\d,;]{{0,30}}[^\W\d]|[.#])", re.IGNORECASE)
_NUMBER_PATTERN = re.compile(r"[+-]?\d[\d.,:/ -]*")
MIN_NUMBER_ROWS = 5  # rows of numbers that show that the line above them is a header

NAMING_HINT = (
    "--text-column names the column of texts, --pair-column that of second texts, --label-column that of labels (in "
    "Python: DataFile(path, text=NAME))"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Names the place of a row, such as "line 7 of dev.tsv".

    Attributes:
        file: the file's name.
        number: the row's number, from 1.
        noun: what a row is called.
    """

    file: str
    number: int
    noun: str = "line"

    def __str__(self) -> str:
        return f"{self.noun} {self.number} of {self.file}"


Row = Mapping[str, Any]
PlacedRows = Iterator[tuple[Place, Row]]


def places_text(places: Sequence[Place]) -> str:
    """Returns the places of one file as "line 7", "lines 7, 9 and 12" or "lines 7, 9, 12 and 4 more"."""
    shown_numbers = [str(place.number) for place in places[:MAX_PLACES_SHOWN]]
    hidden_count = len(places) - len(shown_numbers)
    if len(places) == 1:
        return f"{places[0].noun} {shown_numbers[0]}"
    nouns = "entries" if places[0].noun == "entry" else f"{places[0].noun}s"
    ending = f"{hidden_count:,} more" if hidden_count else shown_numbers.pop()
    return f"{nouns} {', '.join(shown_numbers)} and {ending}"


def require_columns(
    file: str,
    names: Sequence[str],
    required: Sequence[str],
    text_columns: Sequence[str] = (),
    rows: Iterable[Sequence[str]] = (),
) -> None:
    """Raises CodecError for a header that lacks a column, or has one twice: readers differ in which they take.

    Columns without a name are not read.

    Args:
        file: the file's name, for messages.
        names: the columns of the header.
        required: columns that must all exist.
        text_columns: columns of which one must exist; empty: none must.
        rows: some rows below the header. They are read only for a message.
    """
    columns = [*required, *(name for name in text_columns if name not in AMBIGUOUS_COLUMNS)]
    if text_columns and not {*text_columns} & {*names}:
        is_header = looks_like_header(names, rows) or _has_named_columns(file)
        error = CodecError(
            f"the header of {file} names no column {' or '.join(text_columns[:2])}",
            f"{columns_hint(names, columns, is_header)}; {NAMING_HINT}",
        )
        raise with_first_line(error, names, columns, is_header)
    if absent_columns := [name for name in required if name not in names]:
        is_header = looks_like_header(names, rows) or _has_named_columns(file)
        hint = columns_hint(names, required, is_header)
        similar_names = difflib.get_close_matches(absent_columns[0], _shown_columns(names, required, is_header), 1)
        error = CodecError(
            f"the header of {file} names no column {absent_columns[0]}",
            f"is it {similar_names[0]}? {hint}" if similar_names else hint,
        )
        raise with_first_line(error, names, required, is_header)
    for index, name in enumerate(names, 1):
        if name.strip() and (first_index := names.index(name) + 1) < index:
            fault = f"names the column {shown_name(name)} twice, as column {first_index} and as column {index}"
            raise CodecError(f"the header of {file} {fault}", "rename one of them")


def no_text_error(place: Place, names: Collection[str], expected: Collection[str] = ()) -> CodecError:
    """Returns the error for a row in which no column is known to hold the text."""
    error = CodecError(f"{place} has no text", f"{fields_hint(place, names, expected)}; {NAMING_HINT}")
    return with_fields(error, place, names, expected)


def _has_named_columns(file: str) -> bool:
    """Returns whether the format itself names the columns, as JSON and Parquet do."""
    return Path(file).suffix.lower() in (".jsonl", ".json", ".parquet")


def looks_like_header(first_line: Sequence[str], rows: Iterable[Sequence[str]]) -> bool:
    """Returns whether a first line has a name in a column in which all of these rows have a number."""
    full_rows = [row for row in rows if len(row) == len(first_line)]
    if len(full_rows) < MIN_NUMBER_ROWS:
        return False
    return any(
        _WORDS_PATTERN.fullmatch(name.strip()) is not None
        and all(_NUMBER_PATTERN.fullmatch(row[index].strip()) for row in full_rows)
        for index, name in enumerate(first_line)
    )


def repeated_key_error(place: Place, error: RepeatedKey) -> CodecError:
    """Returns the error for a JSON object with a key twice: readers differ in which of the two they take."""
    return CodecError(f"{place} has the key {shown_name(error.key)} twice", "rename one of them")


def columns_hint(names: Collection[str], expected: Collection[str] = (), is_header: bool = False) -> str:
    """Returns a hint such as "the columns there are: id, customer said". Names that may be text are only counted.

    Args:
        names: the cells of the first line, or the names of the columns.
        expected: columns that are looked for, besides USUAL_COLUMNS.
        is_header: whether `names` are known to be names, not text.
    """
    shows_all = _are_names(names, expected, is_header)
    shown_names = _shown_columns(names, expected, is_header)
    hidden_count = len(names) - len(shown_names[:MAX_COLUMNS_SHOWN])
    if len(names) == 1 and not shown_names:
        return (
            "its first line is one cell: remove what stands above the header, or name the sign between cells with "
            "--delimiter, or leave it out"
        )
    if not shown_names:
        return (
            f"its first line has {hidden_count} cells and looks like no header: add one that names the columns; if it "
            "is one, --text-column and --label-column name its columns"
        )
    if not hidden_count:
        return f"the columns there are: {', '.join(shown_names)}"
    reason = "" if shows_all else "; if the first line is text, put a line with names above it"
    return f"the columns there are: {', '.join(shown_names[:MAX_COLUMNS_SHOWN])} and {hidden_count} more{reason}"


def fields_hint(place: Place, row: Collection[str], expected: Collection[str] = ()) -> str:
    """Returns the hint of `columns_hint` for a row: the keys of a JSON object and Parquet's columns are names."""
    return columns_hint(row, expected, _has_named_columns(place.file))


def with_first_line(
    error: AnyCodecError, names: Collection[str], expected: Collection[str] = (), is_header: bool = False
) -> AnyCodecError:
    """Returns the error with the first line of the file for the terminal, if `columns_hint` leaves out cells of it."""
    if len(_shown_columns(names, expected, is_header)) < sum(bool(name.strip()) for name in names):
        cells = [shown_name(name, MAX_CELL_CHARACTERS) for name in [*names][:MAX_COLUMNS_SHOWN]]
        more = f" and {len(names) - len(cells)} more" if len(names) > len(cells) else ""
        error.for_terminal = f"its first line: {' | '.join(cells)}{more}"
    return error


def with_fields(
    error: AnyCodecError, place: Place, row: Collection[str], expected: Collection[str] = ()
) -> AnyCodecError:
    """Returns the error of a row as `with_first_line` does it."""
    return with_first_line(error, row, expected, _has_named_columns(place.file))


def _are_names(names: Collection[str], expected: Collection[str], is_header: bool) -> bool:
    """Returns whether the cells are certainly names of columns, not text. See `columns_hint` for the arguments."""
    sought_names = {_comparable_name(name) for name in (*expected, *USUAL_COLUMNS)} - {""}
    return is_header or any(_comparable_name(name) in sought_names for name in names)


def _shown_columns(names: Collection[str], expected: Collection[str], is_header: bool) -> list[str]:
    """Returns the names that a message may show: all of them, or those that cannot be text."""
    shows_all = _are_names(names, expected, is_header)
    return [shown_name(name) for name in names if name.strip() and (shows_all or _NAME_PATTERN.fullmatch(name))]


def _comparable_name(name: str) -> str:
    """Returns a name for comparison: in small letters, without what is between words."""
    return _SEPARATOR_PATTERN.sub("", name).casefold()


def shown_name(name: str, max_characters: int = MAX_NAME_CHARACTERS) -> str:
    """Returns a name for a message: printable, on one line, of bounded length."""
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in name)
    return line if len(line) <= max_characters else f"{line[:max_characters]}..."


def is_missing(cell: Any) -> bool:
    """Returns whether a cell is empty: null, NaN as a number, or only blanks. The text "nan" is a text."""
    if isinstance(cell, str):
        return not cell.strip()
    return cell is None or (isinstance(cell, float | Decimal) and math.isnan(cell))


def text_of(place: Place, row: Row, column: str) -> str:
    """Returns the text in a column of a row.

    Raises:
        EmptyText: the cell is empty.
        CodecError: the row lacks the column, or the cell is not text.
    """
    if column not in row:
        error = CodecError(f"{place} has no {column}", fields_hint(place, row, (column,)))
        raise with_fields(error, place, row, (column,))
    cell = row[column]
    if is_missing(cell):
        raise EmptyText(f"{place} has an empty {column}", "fill it")
    if not isinstance(cell, str):
        raise CodecError(f"{place} has a {column} that is not a string", "give a string")
    return cell
