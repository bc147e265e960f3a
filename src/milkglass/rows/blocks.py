"""Reads rows in blocks, gives the places of their texts, and writes the rows again: what sanitizers need of a file.

A JSON list is read and written as JSON Lines. Raw rows are read in blocks that depend on the file alone. Messages name
file and line, and never quote them.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.rows.data_file import ALL_TEXTS, KNOWN, refuse_spreadsheet
from milkglass.rows.encoding import raw_lines
from milkglass.rows.lines import BYTE_ORDER_MARK
from milkglass.rows.place import Place, missing, no_text_error, require_columns, shown_name, text_of
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

Kind = Literal["lines", "json", "csv", "tsv"]
KINDS: dict[str, Kind] = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv"}
ROWS_A_BLOCK, CHARACTERS_A_BLOCK = 512, 1 << 18  # rows, and characters, after which a block ends
NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
Slot = tuple[Any, Any]  # a container and the key or index of a text in it


@dataclass(frozen=True)
class Block:
    """Holds consecutive rows of a file.

    Attributes:
        number: from 0.
        lines: the file's line of each row.
        raw: each row as it is in the file.
    """

    number: int
    lines: tuple[int, ...]
    raw: tuple[Any, ...]

    @property
    def size(self) -> int:
        return sum(_size(row) for row in self.raw)


@dataclass(frozen=True)
class RowFormat:
    """Parses and writes rows in the format of a file.

    Attributes:
        kind: the format: "lines", "json", "csv" or "tsv".
        texts: the fields that are sanitized.
        header: of CSV and TSV.
        file: its name, for messages.
        roles: of the messages that are sanitized; empty: all.
        instruction: the beginning of a text that is left unchanged.
        delimiter: of CSV.
        noun: what messages call a row.
        has_mark: whether a table begins with a byte order mark, by which Excel knows UTF-8.
    """

    kind: Kind
    texts: frozenset[str]
    header: tuple[str, ...] = ()
    file: str = ""
    roles: frozenset[str] = frozenset()
    instruction: str = ""
    delimiter: str = ","
    noun: str = "line"
    has_mark: bool = False

    def place(self, line: int) -> Place:
        return Place(self.file, line, self.noun)

    def split_instruction(self, text: str) -> tuple[str, str]:
        """Returns the instruction if the text begins with it, and the part that is sanitized."""
        start = len(self.instruction) if text.startswith(self.instruction) else 0
        return text[:start], text[start:]

    def parse(self, block: Block) -> tuple[list[Any], list[Slot], set[str]]:
        """Returns the rows, the places of the texts in them, and the names of fields that are unchanged."""
        rows: list[Any] = []
        slots: list[Slot] = []
        unchanged_names: set[str] = set()
        for line, raw in zip(block.lines, block.raw, strict=True):
            if self.kind == "lines":
                text = raw.rstrip("\r\n")
                row: Any = [text, raw[len(text) :]]
                slots.append((row, 0))
            elif self.kind == "json":
                place = self.place(line)
                row = json_object(place, raw) if raw.strip() else None
                if row is not None:
                    slots += self._fields(place, row, unchanged_names)
            else:
                row = list(raw)
                slots += [(row, i) for i, name in enumerate(self.header) if name in self.texts]
                unchanged_names.update(name for name in self.header if name not in self.texts)
            rows.append(row)
        return rows, slots, {shown_name(name) for name in unchanged_names}

    def head(self) -> str:
        """Returns what is written before the rows: a table's header, and its mark."""
        return (BYTE_ORDER_MARK if self.has_mark else "") + self.write([self.header]) if self.header else ""

    def write(self, rows: Sequence[Any]) -> str:
        if self.kind == "lines":
            return "".join(text + end for text, end in rows)
        if self.kind == "json":
            return "".join("\n" if row is None else json_line(row) for row in rows)
        if self.kind == "tsv":
            return "".join("\t".join(row) + "\n" for row in rows)
        buffer = io.StringIO()
        writer = csv.writer(buffer, delimiter=self.delimiter, lineterminator="\n")
        quoted = csv.writer(buffer, delimiter=self.delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        for row in rows:  # before Python 3.13 a carriage return alone is no reason to quote a cell
            (quoted if any("\r" in cell for cell in row) else writer).writerow(row)
        return buffer.getvalue()

    def _fields(self, place: Place, row: dict[str, Any], unchanged_names: set[str]) -> list[Slot]:
        slots: list[Slot] = []
        has_empty = False
        for name, cell in row.items():
            if name == "messages":
                slots += _messages(place, cell, unchanged_names, self.roles)
                has_empty = True  # a conversation of calls alone has no text
            elif name not in self.texts:
                unchanged_names.add(name)
            elif isinstance(cell, str):
                slots.append((row, name))
            elif missing(cell):
                has_empty = True  # as the empty cell of a table, which stays as it is
            else:
                text_of(place, row, name)  # raises
        if not slots and not has_empty:
            raise no_text_error(place, row)
        return slots


def shape_of(
    path: Path,
    extra_names: frozenset[str] = frozenset(),
    kept_names: frozenset[str] = frozenset(),
    delimiter: str | None = None,
) -> RowFormat:
    """Returns the format of a file.

    Args:
        extra_names, kept_names: fields that are texts besides the known names, and known names that are not texts.
        delimiter: of a table. None: detected.

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
    kind = KINDS.get(path.suffix.lower(), "lines")
    column_names = sorted(extra_names | kept_names)
    texts = [name for name in (*ALL_TEXTS, *sorted(extra_names)) if name not in kept_names]
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
        return RowFormat(kind, frozenset(texts), file=path.name, noun=noun)
    found_delimiter = delimiter or delimiter_of(path, (*column_names, *KNOWN))
    kind = "tsv" if quotes_are_text(path, found_delimiter) else "csv"
    lines = table_cells(path, found_delimiter, kind == "csv")
    header = tuple(next(lines)[1])
    require_columns(path.name, header, column_names, texts, rows_below(lines))
    with path.open("rb") as file:
        has_mark = file.read(3) == BYTE_ORDER_MARK.encode()
    return RowFormat(kind, frozenset(texts), header, path.name, delimiter=found_delimiter, has_mark=has_mark)


def _require_names(path: Path, absent_names: set[str]) -> None:
    """Raises CodecError for a name that no row has, since a misspelt name would leave its text in the clear."""
    for _, row in json_rows(path) if absent_names else ():
        absent_names -= row.keys()
        if not absent_names:
            return
    if absent_names:
        raise CodecError(
            f"no row of {path.name} has a field {min(absent_names)!r}", "check --text-column and --keep-column"
        )


def require_rows(path: Path, shape: RowFormat) -> None:
    """Reads the whole file once, before anything that takes long.

    Raises:
        CodecError: a row cannot be read, or no text begins with the instruction. A misspelt one would be sanitized.
        EmptyText: there are no rows.
    """
    is_found = not shape.instruction
    for block in blocks_of(path, shape):
        _, slots, _ = shape.parse(block)
        is_found = is_found or any(shape.split_instruction(container[key])[0] for container, key in slots)
    if is_found:
        return
    raise CodecError(f"no text of {path.name} begins with the instruction", "give it as the file has it, blanks too")


def blocks_of(path: Path, shape: RowFormat) -> Iterator[Block]:
    """Yields the file in blocks.

    Raises EmptyText if it has no rows, CodecError with file and line if it is unreadable.
    """
    number, lines, raw, size = 0, list[int](), list[Any](), 0
    for line, row in _raw_rows(path, shape):
        lines.append(line)
        raw.append(row)
        size += _size(row)
        if len(raw) == ROWS_A_BLOCK or size >= CHARACTERS_A_BLOCK:
            yield Block(number, tuple(lines), tuple(raw))
            number, lines, raw, size = number + 1, [], [], 0
    if raw:
        yield Block(number, tuple(lines), tuple(raw))
    elif not number:
        raise EmptyText(f"{path.name} has no rows", "give at least one")


def _raw_rows(path: Path, shape: RowFormat) -> Iterator[tuple[int, Any]]:
    if shape.noun == "entry":
        return ((place.number, json.dumps(entry)) for place, entry in json_list(path))
    if shape.kind in ("lines", "json"):
        return raw_lines(path)
    rows = islice(table_cells(path, shape.delimiter, shape.kind == "csv"), 1, None)
    return ((place.number, tuple(cells)) for place, cells in rows)


def _size(row: Any) -> int:
    return len(row) if isinstance(row, str) else sum(map(len, row))


def _messages(place: Place, messages: Any, unchanged_names: set[str], roles: frozenset[str]) -> list[Slot]:
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
    return [slot for message in sanitized_messages for slot in _contents(message)]


def _shown_role(name: str) -> str:
    return name if NAME.fullmatch(name) else "(a role that is not shown)"


def _has_content(message: dict[str, Any]) -> bool:
    """Returns whether a message has text, parts that are texts, or calls of tools without text."""
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    return isinstance(content, str) or (missing(content) and bool(message.get("tool_calls")))


def _contents(message: dict[str, Any]) -> list[Slot]:
    content = message.get("content")
    if isinstance(content, list):
        return [(part, "text") for part in content]
    return [(message, "content")] if isinstance(content, str) else []
