"""Reads rows of files, one at a time: lines, CSV, TSV, JSON Lines, one JSON list, Parquet.

Errors name the file, the line and the column, and never a cell's content. Common arguments: `on_blank` receives a 1 for
each blank line that is skipped; a header must have all columns of `required`, and one of `text_columns`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.progress import Progress, no_progress
from milkglass.rows.encoding import MAX_LINE_CHARACTERS, UTF8, not_utf8_error, numbered_lines
from milkglass.rows.place import Place, PlacedRows, repeated_key_error, require_columns, text_of
from milkglass.unique_keys import RepeatedKey, unique_keys

DELIMITER_OF_NAME = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
SAMPLE_CHARACTERS, SAMPLE_ROWS = 1 << 16, 20  # characters and rows that show the delimiter
BLOCK_CHARACTERS = 1 << 20  # characters of a JSON list read at a time
BATCH_ROWS = 1024  # rows of Parquet read at a time
MIN_SENTENCE_WORDS = 5
SENTENCE_END_MARKS = (".", ";", "?", "!")
_SURROGATE_PATTERN = re.compile("[\ud800-\udfff]")
_SENTENCE_END_PATTERN = re.compile(r"(?<=[.;?!])\s+")
_DECLARATION_PATTERN = re.compile(r'"?sep=([^"\r\n])"?[\r\n]*', re.IGNORECASE)
_DECLARATION_CHARACTERS = 16  # of the first line, more than a declaration has
_SPACE_PATTERN = re.compile(r"[ \t\r\n]*")


def text_lines(path: Path, on_blank: Progress = no_progress, encoding: str = UTF8, strip: bool = False) -> PlacedRows:
    """Yields every line that is not blank as a row with the column "text".

    Args:
        encoding: the file's encoding.
        strip: whether white space at the ends of a line is removed.
    """
    for number, line in numbered_lines(path, encoding):
        if line.strip():
            yield Place(path.name, number), {"text": line.strip() if strip else line}
        else:
            on_blank(1)


# --- tables -----------------------------------------------------------------------------------------------------------
def table_rows(
    path: Path, required: Sequence[str], delimiter: str = "\t", is_quoted: bool = False,
    header: Sequence[str] | None = None, is_flawed: bool = False, on_blank: Progress = no_progress,
    text_columns: Sequence[str] = (),
) -> PlacedRows:  # fmt: skip
    """Yields rows of CSV, or of TSV without quoting, as GLUE writes it.

    Args:
        required: the columns that the header must have.
        delimiter: the sign between cells.
        is_quoted: whether a cell may be quoted. Quotes are doubled inside quotes.
        header: the columns of a file without a header.
        is_flawed: whether the published file has rows with another number of cells. They become empty rows, for the
            caller to leave out and count.
        text_columns: columns of which the header must have one; empty: none.
    """
    names = header
    lines = table_cells(path, delimiter, is_quoted, header, is_flawed, on_blank)
    for place, cells in lines:
        if names is None:
            names = cells
            require_columns(path.name, names, required, text_columns, rows_below(lines))
        else:
            yield place, dict(zip(names, cells, strict=False))


def rows_below(lines: Iterator[tuple[Place, Sequence[str]]]) -> Iterator[Sequence[str]]:
    """Yields the cells of some rows under a header, up to one that cannot be read."""
    with suppress(CodecError):
        for _, cells in islice(lines, SAMPLE_ROWS):
            yield cells


def table_cells(
    path: Path, delimiter: str, is_quoted: bool, header: Sequence[str] | None = None, is_flawed: bool = False,
    on_blank: Progress = no_progress,
) -> Iterator[tuple[Place, Sequence[str]]]:  # fmt: skip
    """Yields the names of the header, unless `header` has them, and then the cells of each row. See `table_rows`.

    Raises:
        EmptyText: the file is empty.
        CodecError: a row cannot be read, or has another number of cells.
    """
    names = header
    for place, cells in _quoted_lines(path, delimiter) if is_quoted else _unquoted_lines(path, delimiter):
        if not cells:
            on_blank(1)
        elif names is None:
            names = [name.strip() for name in cells]
            yield place, names
        elif len(cells) == len(names):
            yield place, cells
        elif is_flawed:
            yield place, ()
        else:
            hint = (
                "check its quotes: a cell that holds the delimiter needs quotes" if is_quoted
                else "check its tabs: a cell cannot hold one here; a CSV file, with quotes, can"
            )  # fmt: skip
            raise CodecError(f"{place} has {len(cells)} cells, and there are {len(names)} columns", hint)
    if names is None:
        raise EmptyText(f"{path.name} is empty", "give at least one row")


def declared_delimiter(path: Path) -> str | None:
    """Returns the delimiter that the first line declares, as in Excel's `sep=;`. Such a line is not part of the table.

    Returns None if the first line declares none.
    """
    with path.open(encoding=UTF8, errors="replace", newline="") as file:
        declaration = _DECLARATION_PATTERN.fullmatch(file.readline(_DECLARATION_CHARACTERS))
    return declaration[1] if declaration else None


def _unquoted_lines(path: Path, delimiter: str) -> Iterator[tuple[Place, Sequence[str]]]:
    skipped_count = 0 if declared_delimiter(path) is None else 1
    for number, line in islice(numbered_lines(path), skipped_count, None):
        yield Place(path.name, number), line.split(delimiter) if line else ()


def _quoted_lines(path: Path, delimiter: str) -> Iterator[tuple[Place, Sequence[str]]]:
    skipped_count = number = 0 if declared_delimiter(path) is None else 1
    csv.field_size_limit(MAX_LINE_CHARACTERS)  # for the whole process: another thread may be reading a table, too
    try:
        with path.open(encoding=UTF8, newline="") as file:
            if skipped_count:
                file.readline()
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for cells in reader:
                place = Place(path.name, number + 1)  # a row of several lines is named by its first
                number = skipped_count + reader.line_num
                yield place, cells
    except UnicodeDecodeError:
        raise not_utf8_error(path) from None
    except csv.Error:
        raise CodecError(f"{Place(path.name, number + 1)} is not a row", "check its quotes") from None


def parse_delimiter(name: str) -> str:
    """Returns a delimiter, given it or its name. Raises UsageError if it is not one sign."""
    delimiter = DELIMITER_OF_NAME.get(name, "\t" if name == "\\t" else name)
    if len(delimiter) != 1 or delimiter in '"\r\n' or delimiter.isalnum():
        raise UsageError(
            f"the delimiter {name!r} is not one sign",
            f"give a sign such as ';', or one of {', '.join(DELIMITER_OF_NAME)}",
        )
    return delimiter


def delimiter_of(path: Path, column_names: Collection[str]) -> str:
    """Returns the delimiter of a .csv or .tsv file. If the rows do not tell, the file's name decides.

    A first line such as `sep=;` declares it. Else a delimiter gives every first row, the header too, the same number of
    cells, at least two. If several do, or none does because a row is broken, the header decides, by the names of
    columns that the caller knows. csv.Sniffer is not used: it counts characters of the text as well, and takes letters
    for delimiters.

    Text that is not UTF-8 is reported by whoever reads it.

    Args:
        column_names: names of columns that the caller looks for.
    """
    if declared := declared_delimiter(path):
        return declared
    usual_sign = "\t" if path.suffix.lower() == ".tsv" else ","
    signs = [usual_sign, *(sign for sign in DELIMITER_OF_NAME.values() if sign != usual_sign)]
    rows = {sign: _first_rows(path, sign) for sign in signs}
    consistent_signs = [
        sign for sign in signs if len({len(cells) for cells in rows[sign]}) == 1 and len(rows[sign][0]) > 1
    ]

    def known_column_count(sign: str) -> int:
        """Returns how many known columns the header has with this delimiter."""
        return len({cell.strip() for cell in rows[sign][0]} & set(column_names)) if rows[sign] else 0

    return max(consistent_signs or signs, key=known_column_count)  # the first of equals: the file's own


def _first_rows(path: Path, sign: str) -> list[list[str]]:
    """Returns up to SAMPLE_ROWS complete rows from the file's beginning, up to one whose quotes do not fit."""
    with path.open(encoding=UTF8, errors="replace", newline="") as file:
        head = file.read(SAMPLE_CHARACTERS)
        is_cut = bool(file.read(1))
    rows: list[list[str]] = []
    text = io.StringIO(head, newline="")
    without_quotes = quotes_are_text(path, sign)
    reader = csv.reader(text, delimiter=sign, quoting=csv.QUOTE_NONE if without_quotes else csv.QUOTE_MINIMAL)
    try:
        for cells in islice(reader, SAMPLE_ROWS + 1):
            rows += [cells] if cells else []
    except csv.Error:
        return rows[:SAMPLE_ROWS]
    return rows[:-1][:SAMPLE_ROWS] if is_cut and len(rows) > 1 else rows[:SAMPLE_ROWS]  # the last one may be half a row


def quotes_are_text(path: Path, sign: str) -> bool:
    """Returns whether a quotation mark is part of the text, as in the TSV that GLUE writes."""
    return path.suffix.lower() == ".tsv" and sign == "\t"


# --- JSON -------------------------------------------------------------------------------------------------------------
def json_lines(path: Path, on_blank: Progress = no_progress) -> PlacedRows:
    """Yields the rows of JSON Lines. Raises CodecError for a line that is not a JSON object."""
    for number, line in numbered_lines(path):
        if line.strip():
            place = Place(path.name, number)
            yield place, json_object(place, line)
        else:
            on_blank(1)


def json_object(place: Place, text: str) -> dict[str, Any]:
    """Returns the JSON object of a line. Raises CodecError if it is not one, or has a key twice."""
    try:
        parsed = json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKey as error:
        raise repeated_key_error(place, error) from None
    except (ValueError, RecursionError):  # the decoder's own error carries the text
        raise CodecError(f"{place} is not JSON", "write one JSON object a line, or one list of them") from None
    return _object(place, parsed)


def json_sentences(path: Path) -> PlacedRows:
    """Yields the sentences of the column "text" of JSON Lines, whose documents have a paragraph a line.

    Sentences of fewer than MIN_SENTENCE_WORDS, text without a final mark, such as headings, and repeats are left out.
    """
    seen_hashes = set[int]()  # hashes: the corpus has sentences by the million
    for place, row in json_lines(path):
        for paragraph in text_of(place, row, "text").splitlines():
            for sentence in _SENTENCE_END_PATTERN.split(paragraph.strip()):
                if (
                    sentence.endswith(SENTENCE_END_MARKS)
                    and len(sentence.split()) >= MIN_SENTENCE_WORDS
                    and hash(sentence) not in seen_hashes
                ):
                    seen_hashes.add(hash(sentence))
                    yield place, {"text": sentence}


def json_rows(path: Path, on_blank: Progress = no_progress) -> PlacedRows:
    """Yields rows of JSON Lines, or of one list of objects, whatever the file's name."""
    return json_objects(path) if is_json_list(path) else json_lines(path, on_blank)


def is_json_list(path: Path) -> bool:
    """Returns whether the first character of a file that is not white space begins a JSON list."""
    with path.open(encoding=UTF8, errors="replace") as file:
        while (head := file.read(BLOCK_CHARACTERS)).isspace():
            pass
    return head.lstrip().startswith("[")


def json_objects(path: Path) -> PlacedRows:
    """Yields the entries of a JSON list, which must be objects."""
    for place, element in json_list(path):
        yield place, _object(place, element)


def _object(place: Place, parsed: Any) -> dict[str, Any]:
    if not isinstance(parsed, dict):
        raise CodecError(f"{place} is not a JSON object", 'write one object a row, such as {"text": "..."}')
    if _has_half_surrogate(parsed):
        raise CodecError(
            f"{place} has half of a character: one of two codes such as \\ud83d",
            "text was cut inside an emoji: write that character whole, or leave it out",
        )
    return parsed


def _has_half_surrogate(value: Any) -> bool:
    """Returns whether a text in a JSON value is no Unicode, since it has one of the two codes of a character alone."""
    if isinstance(value, str):
        return not value.isascii() and _SURROGATE_PATTERN.search(value) is not None
    if isinstance(value, dict):
        return any(_has_half_surrogate(part) for item in value.items() for part in item)
    return isinstance(value, list) and any(map(_has_half_surrogate, value))


def json_list(path: Path) -> Iterator[tuple[Place, Any]]:
    """Yields the entries of a file that is one JSON list. Only a block and an entry are in memory.

    Raises:
        CodecError: the file is no JSON list, an entry is not JSON, or something follows the list.
    """
    try:
        with path.open(encoding=UTF8) as file:
            buffer = file.read(BLOCK_CHARACTERS)
            while buffer.isspace():
                buffer = file.read(BLOCK_CHARACTERS)
            position = _skip_white_space(buffer, 0)
            if buffer[position : position + 1] != "[":
                raise CodecError(f"{path.name} is not a JSON list", 'write [{"instruction": ...}, ...]')
            position, number, block_size, line = _skip_white_space(buffer, position + 1), 1, BLOCK_CHARACTERS, 1
            while True:
                place = Place(path.name, number, "entry")
                try:
                    entry = _read_entry(buffer, position)
                except RepeatedKey as error:
                    raise repeated_key_error(place, error) from None
                if entry is None:  # the block ends inside the entry, or this is not JSON: only more text can tell
                    more_text = file.read(block_size)
                    if not more_text:
                        line += buffer.count("\n", 0, _break_in(buffer, position))
                        hint = f"it is cut off or broken at line {line}: mend it there, or save the list again"
                        raise CodecError(f"{place} is not JSON", hint)
                    line += buffer.count("\n", 0, position)
                    buffer, block_size = buffer[position:] + more_text, block_size * 2
                    position = _skip_white_space(buffer, 0)
                    continue
                element, position, is_last = entry
                if element is not _END:
                    yield place, element
                if is_last:
                    _require_end(file, buffer[position:], path.name)
                    return
                number, block_size = number + 1, BLOCK_CHARACTERS
    except UnicodeDecodeError:
        raise not_utf8_error(path) from None


def _require_end(file: TextIO, text: str, name: str) -> None:
    """Raises CodecError if anything but white space follows a list, since its rows would be lost.

    Args:
        file: the open file, read up to the end of `text`.
        text: what has been read of the file behind the list.
        name: the file's name.
    """
    for part in chain([text], iter(lambda: file.read(BLOCK_CHARACTERS), "")):
        if part.strip():
            raise CodecError(f"more text follows the JSON list of {name}", "put all entries into one list")


_END = object()
_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


def _read_entry(buffer: str, position: int) -> tuple[Any, int, bool] | None:
    """Returns the entry at a position, where the next begins, and whether it is the last; None if it is incomplete."""
    if buffer[position : position + 1] == "]":
        return _END, position + 1, True
    try:
        element, end = _DECODER.raw_decode(buffer, position)
    except RepeatedKey:
        raise
    except (ValueError, RecursionError):
        return None
    end = _skip_white_space(buffer, end)
    mark = buffer[end : end + 1]
    return (element, _skip_white_space(buffer, end + 1), mark == "]") if mark in (",", "]") else None


def _break_in(buffer: str, position: int) -> int:
    """Returns where the entry at a position stops being JSON."""
    try:
        end = _DECODER.raw_decode(buffer, position)[1]
        return _skip_white_space(buffer, end)  # another mark than "," or "]" follows
    except json.JSONDecodeError as error:
        return error.pos
    except RecursionError:
        return position


def _skip_white_space(buffer: str, position: int) -> int:
    match = _SPACE_PATTERN.match(buffer, position)
    assert match is not None  # it matches nothing as well
    return match.end()


# --- Parquet ----------------------------------------------------------------------------------------------------------
def parquet_rows(path: Path, required: Sequence[str], text_columns: Sequence[str] = ()) -> PlacedRows:
    """Yields the rows of a Parquet file with all columns. Raises CodecError for another file, or without a column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid:
        raise CodecError(f"{path.name} is not a Parquet file", "give .parquet, .jsonl, .csv or .tsv") from None
    except (pa.ArrowException, OSError) as error:
        raise _damaged_parquet_error(path, 0, error) from None
    with file:
        require_columns(path.name, file.schema_arrow.names, required, text_columns)
        number, batches = 0, file.iter_batches(BATCH_ROWS)
        while (rows := _next_parquet_rows(path, batches, number)) is not None:
            for row in rows:
                number += 1
                yield Place(path.name, number, "row"), row


def _next_parquet_rows(path: Path, batches: Iterator[Any], count: int) -> list[dict[str, Any]] | None:
    """Returns the rows of the next batch, or None at the end. Raises CodecError for bytes that cannot be read.

    Args:
        count: how many rows were read before.
    """
    import pyarrow as pa

    try:
        batch = next(batches, None)
        return None if batch is None else batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise _damaged_parquet_error(path, count, error) from None


def _damaged_parquet_error(path: Path, count: int, error: Exception) -> CodecError:
    """Returns the error for bytes that Arrow cannot read after `count` rows. Raises an error of the system itself."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    return CodecError(
        f"{path.name} cannot be read beyond row {count:,}",
        "it is damaged, or uses what this reader lacks: write it again, or as .jsonl or .csv",
    )
