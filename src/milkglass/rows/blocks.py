"""Reads rows in blocks, gives the places of their texts, and writes the rows again: what sanitizers need of a file.

A JSON list is read and written as JSON Lines. Raw rows are read in blocks that depend on the file alone. Messages name
file and line, and never quote a row's text.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.rows.data_file import ALL_TEXT_COLUMNS, KNOWN_COLUMNS, refuse_spreadsheet
from milkglass.rows.encoding import lines_with_ends
from milkglass.rows.lines import BYTE_ORDER_MARK
from milkglass.rows.place import Place, is_missing, no_text_error, require_columns, shown_name, text_of
from milkglass.rows.tables import (
    delimiter_of,
    is_json_list,
    json_list,
    json_object,
    json_rows,
    quotes_are_text,
    rows_below,
    table_cells,
)
from milkglass.rows.write import json_line

FileKind = Literal["lines", "json", "csv", "tsv"]
KIND_OF_SUFFIX: dict[str, FileKind] = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv"}
MIN_TEXT_WORDS = 5  # a field looks like texts if most of its values have so many words and differ from each other
BLOCK_ROWS, BLOCK_CHARACTERS = 512, 1 << 18  # the rows, or the characters, after which a block ends
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,40}")
TextSlot = tuple[Any, Any]  # a container and the key or index of a text in it


@dataclass(frozen=True)
class Block:
    """Holds consecutive rows of a file.

    Attributes:
        number: the block's number, from 0.
        lines: the line of the file at which each row begins.
        raw_rows: each row as it is in the file: a line, or the cells of a table's row.
    """

    number: int
    lines: tuple[int, ...]
    raw_rows: tuple[Any, ...]

    @property
    def byte_count(self) -> int:
        """Returns the bytes of all rows in UTF-8, without what separates rows and cells."""
        cells = (cell for row in self.raw_rows for cell in ([row] if isinstance(row, str) else row))
        return sum(len(cell.encode(errors="surrogatepass")) for cell in cells)


@dataclass(frozen=True)
class RowFormat:
    """Parses and writes rows in the format of a file.

    Attributes:
        kind: the format: "lines", "json", "tsv" (cells between tabs, in which quotation marks are text), or "csv" for
            any other table.
        text_fields: the fields that are sanitized, besides the conversations in `messages`.
        kept_fields: fields that are not, although their names are usual for texts or conversations.
        header: the columns of CSV and TSV.
        file_name: the file's name, for messages.
        roles: the roles whose messages are sanitized; empty: all.
        instruction: the beginning of a text that is left unchanged.
        delimiter: the sign between cells of CSV.
        noun: what messages call a row.
        has_byte_order_mark: whether a table begins with a byte order mark, by which Excel knows UTF-8.
    """

    kind: FileKind
    text_fields: frozenset[str]
    kept_fields: frozenset[str] = frozenset()
    header: tuple[str, ...] = ()
    file_name: str = ""
    roles: frozenset[str] = frozenset()
    instruction: str = ""
    delimiter: str = ","
    noun: str = "line"
    has_byte_order_mark: bool = False

    def place(self, line: int) -> Place:
        """Returns the place of a row, for messages."""
        return Place(self.file_name, line, self.noun)

    def split_instruction(self, text: str) -> tuple[str, str]:
        """Returns the instruction if the text begins with it, and the part that is sanitized."""
        start = len(self.instruction) if text.startswith(self.instruction) else 0
        return text[:start], text[start:]

    def parse(self, block: Block) -> tuple[list[Any], list[TextSlot], set[str]]:
        """Returns the rows, the places of the texts in them, and the names of fields that stay unchanged.

        Writing a new text to a place (`TextSlot`) changes the returned row.

        Raises:
            CodecError: a row cannot be read, or has no text.
        """
        rows: list[Any] = []
        slots: list[TextSlot] = []
        unchanged_names: set[str] = set()
        for line, raw in zip(block.lines, block.raw_rows, strict=True):
            if self.kind == "lines":
                text = raw.rstrip("\r\n")
                row: Any = [text, raw[len(text) :]]
                slots.append((row, 0))
            elif self.kind == "json":
                place = self.place(line)
                row = json_object(place, raw) if raw.strip() else None
                if row is not None:
                    slots += self._text_slots(place, row, unchanged_names)
            else:
                row = list(raw)
                slots += [(row, i) for i, name in enumerate(self.header) if name in self.text_fields]
                unchanged_names.update(name for name in self.header if name not in self.text_fields)
            rows.append(row)
        return rows, slots, {shown_name(name) for name in unchanged_names}

    def header_text(self) -> str:
        """Returns what is written before the rows: a table's header, with the byte order mark if it has one."""
        return (BYTE_ORDER_MARK if self.has_byte_order_mark else "") + self.write([self.header]) if self.header else ""

    def write(self, rows: Sequence[Any]) -> str:
        """Returns rows of `parse` as text of the file's format."""
        if self.kind == "lines":
            return "".join(text + end for text, end in rows)
        if self.kind == "json":
            return "".join("\n" if row is None else json_line(row) for row in rows)
        if self.kind == "tsv":
            return "".join("\t".join(row) + "\n" for row in rows)
        buffer = io.StringIO()
        writer = csv.writer(buffer, delimiter=self.delimiter, lineterminator="\n")
        quoting_writer = csv.writer(buffer, delimiter=self.delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        for row in rows:  # before Python 3.13 a carriage return alone is no reason to quote a cell
            (quoting_writer if any("\r" in cell for cell in row) else writer).writerow(row)
        return buffer.getvalue()

    def _text_slots(self, place: Place, row: dict[str, Any], unchanged_names: set[str]) -> list[TextSlot]:
        slots: list[TextSlot] = []
        has_empty = False
        for name, cell in row.items():
            if name == "messages" and name not in self.kept_fields:
                slots += _message_slots(place, cell, unchanged_names, self.roles)
                has_empty = True  # a conversation of calls alone has no text
            elif name not in self.text_fields:
                unchanged_names.add(name)
            elif isinstance(cell, str):
                slots.append((row, name))
            elif is_missing(cell):
                has_empty = True  # as the empty cell of a table, which stays as it is
            else:
                text_of(place, row, name)  # raises
        if not slots and not has_empty:
            raise no_text_error(place, row)
        return slots


def row_format_of(
    path: Path,
    extra_names: frozenset[str] = frozenset(),
    kept_names: frozenset[str] = frozenset(),
    delimiter: str | None = None,
) -> RowFormat:
    """Returns the format of a file.

    Args:
        path: the file.
        extra_names: fields that are texts, besides those with usual names.
        kept_names: fields with usual names that are not texts.
        delimiter: the sign between the cells of a table. None: it is detected.

    Raises:
        UsageError, EmptyText, CodecError: the file cannot be sanitized.
    """
    if not path.stat().st_size:
        raise EmptyText(f"{path.name} is empty", "give at least one row")
    if path.suffix.lower() == ".parquet":
        raise UsageError(
            f"{path.name} is Parquet, which is not sanitized",
            f"milkglass data {path.name} --out NEW.jsonl makes it lines",
        )
    refuse_spreadsheet(path)
    kind = KIND_OF_SUFFIX.get(path.suffix.lower(), "lines")
    column_names = sorted(extra_names | kept_names)
    text_fields = [name for name in (*ALL_TEXT_COLUMNS, *sorted(extra_names)) if name not in kept_names]
    if kind == "lines" and column_names:
        raise UsageError(
            f"{path.name} is read as a text a line, without columns",
            "name a table .csv or .tsv, or leave out --text-column and --keep-column",
        )
    if kind in ("lines", "json"):
        if delimiter is not None:
            raise UsageError(f"{path.name} is not a table with delimiters", "leave out --delimiter")
        _require_names(path, {*column_names})
        noun = "entry" if kind == "json" and is_json_list(path) else "line"
        return RowFormat(kind, frozenset(text_fields), kept_names, file_name=path.name, noun=noun)
    found_delimiter = delimiter or delimiter_of(path, (*column_names, *KNOWN_COLUMNS))
    kind = "tsv" if quotes_are_text(path, found_delimiter) else "csv"
    lines = table_cells(path, found_delimiter, kind == "csv")
    header = tuple(next(lines)[1])
    require_columns(path.name, header, column_names, text_fields, rows_below(lines))
    with path.open("rb") as file:
        has_byte_order_mark = file.read(3) == BYTE_ORDER_MARK.encode()
    return RowFormat(
        kind,
        frozenset(text_fields),
        kept_names,
        header,
        file_name=path.name,
        delimiter=found_delimiter,
        has_byte_order_mark=has_byte_order_mark,
    )


def _require_names(path: Path, names: Collection[str]) -> None:
    """Raises CodecError for a name that no row has, since a misspelt name would leave its text in the clear."""
    absent_names = {*names}
    for _, row in json_rows(path) if absent_names else ():
        absent_names -= row.keys()
        if not absent_names:
            return
    if absent_names:
        raise CodecError(
            f"no row of {path.name} has a field {min(absent_names)!r}", "check --text-column and --keep-column"
        )


def require_rows(path: Path, row_format: RowFormat) -> None:
    """Reads the whole file once, before anything that takes long.

    Raises:
        CodecError: a row cannot be read, no text begins with the instruction, or roles are chosen and no row has a
            conversation. A misspelt instruction would be sanitized.
        EmptyText: there are no rows.
        UsageError: a field of the first block looks like texts, and is neither sanitized nor named as one to keep.
    """
    has_instruction, has_messages = not row_format.instruction, not row_format.roles
    for block in blocks_of(path, row_format):
        rows, slots, _ = row_format.parse(block)
        if not block.number and (names := _unnamed_texts(row_format, rows)):
            shown_names = [shown_name(name) for name in names]
            text_options, keep_options = (
                " ".join(f"{option} {shlex.quote(name)}" for name in shown_names)
                for option in ("--text-column", "--keep-column")
            )
            raise UsageError(
                f"{path.name} has texts in {', '.join(shown_names)} too, which would be left as they are",
                f"sanitize them with {text_options}, or leave them with {keep_options}",
            )
        has_messages = has_messages or any(isinstance(row, dict) and "messages" in row for row in rows)
        has_instruction = has_instruction or any(
            row_format.split_instruction(container[key])[0] for container, key in slots
        )
    if not has_messages:
        raise CodecError(f"no row of {path.name} has messages, so none has a role", "leave out --role")
    if has_instruction:
        return
    raise CodecError(f"no text of {path.name} begins with the instruction", "give it as the file has it, blanks too")


def _unnamed_texts(row_format: RowFormat, rows: Sequence[Any]) -> list[str]:
    """Returns the fields of rows that look like texts, and are neither sanitized nor named as fields to keep."""
    values_of_field: dict[str, list[str]] = {}
    for row in rows if row_format.kind != "lines" else ():
        for name, cell in row.items() if isinstance(row, dict) else zip(row_format.header, row or (), strict=False):
            if isinstance(cell, str) and cell.strip() and name not in row_format.text_fields | row_format.kept_fields:
                values_of_field.setdefault(name, []).append(cell)
    return [
        name
        for name, values in values_of_field.items()
        if 2 * len({value for value in values if len(value.split()) >= MIN_TEXT_WORDS}) > len(values)
    ]


def blocks_of(path: Path, row_format: RowFormat) -> Iterator[Block]:
    """Yields the rows of a file in blocks.

    Raises:
        EmptyText: the file has no rows.
        CodecError: a row cannot be read. The message has the file and the line.
    """
    number, lines, raw, size = 0, list[int](), list[Any](), 0
    for line, row in _raw_rows(path, row_format):
        lines.append(line)
        raw.append(row)
        size += _character_count(row)
        if len(raw) == BLOCK_ROWS or size >= BLOCK_CHARACTERS:
            yield Block(number, tuple(lines), tuple(raw))
            number, lines, raw, size = number + 1, [], [], 0
    if raw:
        yield Block(number, tuple(lines), tuple(raw))
    elif not number:
        raise EmptyText(f"{path.name} has no rows", "give at least one")


def _raw_rows(path: Path, row_format: RowFormat) -> Iterator[tuple[int, Any]]:
    if row_format.noun == "entry":
        return ((place.number, json.dumps(entry)) for place, entry in json_list(path))
    if row_format.kind in ("lines", "json"):
        return lines_with_ends(path)
    rows = islice(table_cells(path, row_format.delimiter, row_format.kind == "csv"), 1, None)
    return ((place.number, tuple(cells)) for place, cells in rows)


def _character_count(row: Any) -> int:
    return len(row) if isinstance(row, str) else sum(map(len, row))


def _message_slots(place: Place, messages: Any, unchanged_names: set[str], roles: frozenset[str]) -> list[TextSlot]:
    """Returns the places of texts in the messages of these roles, or of all roles if none is named.

    Raises CodecError for a cell without messages, or without a message of these roles.
    """
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and _has_content(message) for message in messages
    ):
        raise CodecError(f"{place} has no list of messages", 'give [{"role": "user", "content": "..."}, ...]')
    other_fields = {name for message in messages for name in message} - {"role", "content"}
    unchanged_names |= {f"messages.{name}" for name in other_fields}
    if roles and not all(isinstance(message.get("role"), str) for message in messages):
        raise CodecError(f"{place} has a message without a role", "leave out --role, or give each message one")
    sanitized_messages = [message for message in messages if not roles or message["role"] in roles]
    if messages and not sanitized_messages:
        raise CodecError(f"{place} has no message of the roles {', '.join(sorted(roles))}", "check --role")
    kept_roles = {message["role"] for message in messages} - roles if roles else set()
    unchanged_names |= {f"messages.{_shown_role(role)}" for role in kept_roles}
    return [slot for message in sanitized_messages for slot in _content_slots(message)]


def _shown_role(name: str) -> str:
    """Returns a role's name for a message, or that it is not shown, since it may be text."""
    return name if NAME_PATTERN.fullmatch(name) else "(a role that is not shown)"


def _has_content(message: dict[str, Any]) -> bool:
    """Returns whether a message has text, parts that are texts, or calls of tools without text."""
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    return isinstance(content, str) or (is_missing(content) and bool(message.get("tool_calls")))


def _content_slots(message: dict[str, Any]) -> list[TextSlot]:
    content = message.get("content")
    if isinstance(content, list):
        return [(part, "text") for part in content]
    return [(message, "content")] if isinstance(content, str) else []
