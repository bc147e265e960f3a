"""Reads and writes rows of texts: JSON Lines, CSV and TSV with a header, or a text a line.

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
from pathlib import Path
from typing import Any, Literal

from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.rows.delimiter import delimiter_of, quotes_are_text
from milkglass.rows.encoding import not_utf8
from milkglass.rows.place import Place, columns_there, missing, repeated, require_unique
from milkglass.rows.tables import is_json_list, json_list
from milkglass.unique_keys import RepeatedKey, unique_keys

Kind = Literal["lines", "json", "csv", "tsv"]
KINDS: dict[str, Kind] = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv"}
TEXTS = frozenset((
    "text", "text_pair", "sentence", "sentence1", "sentence2", "instruction", "input", "output", "prompt", "response",
    "question", "question1", "question2", "answer", "premise", "hypothesis", "dialogue", "summary",
))  # fmt: skip
ROWS_A_BLOCK, CHARACTERS_A_BLOCK = 512, 1 << 18  # rows, and characters, after which a block ends
LINE = 1 << 24  # characters of a line or a field
NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
Slot = tuple[Any, Any]  # a container and the key or index of a text in it


@dataclass(frozen=True)
class Block:
    """Some rows of a file.

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
class FileShape:
    """The format of a file's rows.

    Attributes:
        texts: the fields that are sanitized.
        header: of CSV and TSV.
        file: its name, for messages.
        roles: of the messages that are sanitized; empty: all.
        instruction: the beginning of a text that is left unchanged.
        delimiter: of CSV.
        noun: what messages call a row.
    """

    kind: Kind
    texts: frozenset[str]
    header: tuple[str, ...] = ()
    file: str = ""
    roles: frozenset[str] = frozenset()
    instruction: str = ""
    delimiter: str = ","
    noun: str = "line"

    def divided(self, text: str) -> tuple[str, str]:
        """Returns the instruction if the text begins with it, and the part that is sanitized."""
        at = len(self.instruction) if text.startswith(self.instruction) else 0
        return text[:at], text[at:]

    def parse(self, block: Block) -> tuple[list[Any], list[Slot], set[str]]:
        """Returns the rows, the places of the texts in them, and the names of fields that are unchanged."""
        rows: list[Any] = []
        slots: list[Slot] = []
        left: set[str] = set()
        for line, raw in zip(block.lines, block.raw, strict=True):
            if self.kind == "lines":
                text = raw.rstrip("\r\n")
                row: Any = [text, raw[len(text) :]]
                slots.append((row, 0))
            elif self.kind == "json":
                where = str(Place(self.file, line, self.noun))
                row = _object(where, raw)
                if row is not None:
                    slots += self._fields(where, row, left)
            else:
                row = list(raw)
                slots += [(row, i) for i, name in enumerate(self.header) if name in self.texts]
                left.update(name for name in self.header if name not in self.texts)
            rows.append(row)
        return rows, slots, {name if NAME.fullmatch(name) else "(a name that is not shown)" for name in left}

    def write(self, rows: Sequence[Any]) -> str:
        if self.kind == "lines":
            return "".join(text + end for text, end in rows)
        if self.kind == "json":
            return "".join("\n" if row is None else _dumped(row) + "\n" for row in rows)
        if self.kind == "tsv":
            return "".join("\t".join(row) + "\n" for row in rows)
        out = io.StringIO()
        csv.writer(out, delimiter=self.delimiter, lineterminator="\n").writerows(rows)
        return out.getvalue()

    def _fields(self, where: str, row: dict[str, Any], left: set[str]) -> list[Slot]:
        result: list[Slot] = []
        empty = False
        for name, value in row.items():
            if name == "messages":
                result += _messages(where, value, left, self.roles)
                empty = True  # a conversation of calls alone has no text
            elif name not in self.texts:
                left.add(name)
            elif isinstance(value, str):
                result.append((row, name))
            elif missing(value):
                empty = True  # as the empty cell of a table, which stays as it is
            else:
                raise CodecError(f"{where} has a text field that is not a string", "give strings")
        if not result and not empty:
            raise CodecError(f"{where} has no text", "name its field with --text-column")
        return result


def shape_of(
    path: Path, also: frozenset[str] = frozenset(), keep: frozenset[str] = frozenset(), delimiter: str | None = None
) -> FileShape:
    """Returns the format of a file.

    Args:
        also, keep: fields that are texts besides the known names, and known names that are not texts.
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
    kind = KINDS.get(path.suffix.lower(), "lines")
    texts = (TEXTS | also) - keep
    if kind == "lines" and also | keep:
        raise UsageError(f"{path.name} has lines of text, and no columns", "leave out --text-column and --keep-column")
    if kind in ("lines", "json"):
        if delimiter is not None:
            raise UsageError(f"{path.name} is not a table with delimiters", "leave out --delimiter")
        _require_names(path, also | keep)
        return FileShape(kind, texts, file=path.name, noun="entry" if kind == "json" and is_json_list(path) else "line")
    sign = delimiter or delimiter_of(path, texts | keep)
    kind = "tsv" if quotes_are_text(path, sign) else "csv"
    with _opened(path) as file:
        try:
            header = tuple(name.strip() for name in _header(_cells(file, kind, path, sign)))
        except UnicodeDecodeError:
            raise not_utf8(path) from None
    if missing := sorted((also | keep) - set(header)):
        hint, there = "check --text-column" if missing[0] in also else "check --keep-column", also | keep
        raise CodecError(
            f"the header of {path.name} has no column {missing[0]!r}", f"{hint}; {columns_there(header, there)}"
        )
    if not texts & set(header):
        raise CodecError(
            f"the header of {path.name} names no column of text",
            f"{columns_there(header)}; name one with --text-column",
        )
    require_unique(path.name, header)
    return FileShape(kind, texts, header, path.name, delimiter=sign)


def _header(cells: Iterator[tuple[int, list[str]]]) -> list[str]:
    return next((row for _, row in cells if row), [])


def _require_names(path: Path, names: frozenset[str]) -> None:
    """Raises CodecError for a name that no line has, since a misspelt name would leave its text in the clear."""
    left = {name: (json.dumps(name), json.dumps(name, ensure_ascii=False)) for name in names}
    with _opened(path) as file:
        while left and (text := file.readline(LINE)):
            left = {name: words for name, words in left.items() if not any(word in text for word in words)}
    if left:
        raise CodecError(f"no row of {path.name} has a field {min(left)!r}", "check --text-column and --keep-column")


def require_rows(path: Path, shape: FileShape) -> None:
    """Reads the whole file once, before anything that takes long.

    Raises:
        CodecError: a row cannot be read, or no text begins with the instruction. A misspelt one would be sanitized.
        EmptyText: there are no rows.
    """
    found = not shape.instruction
    for block in blocks_of(path, shape):
        _, slots, _ = shape.parse(block)
        found = found or any(shape.divided(container[key])[0] for container, key in slots)
    if found:
        return
    raise CodecError(f"no text of {path.name} begins with the instruction", "give it as the file has it, blanks too")


def blocks_of(path: Path, shape: FileShape) -> Iterator[Block]:
    """Yields the file in blocks.

    Raises EmptyText if it has no rows, CodecError with file and line if it is unreadable.
    """
    number, lines, raw, size = 0, list[int](), list[Any](), 0
    with _opened(path) as file:
        try:
            for line, row in _raw(file, shape, path):
                lines.append(line)
                raw.append(row)
                size += _size(row)
                if len(raw) == ROWS_A_BLOCK or size >= CHARACTERS_A_BLOCK:
                    yield Block(number, tuple(lines), tuple(raw))
                    number, lines, raw, size = number + 1, [], [], 0
        except UnicodeDecodeError:
            raise not_utf8(path) from None
    if raw:
        yield Block(number, tuple(lines), tuple(raw))
    elif not number:
        raise EmptyText(f"{path.name} has no rows", "give at least one")


def _opened(path: Path) -> io.TextIOWrapper:
    return path.open(encoding="utf-8-sig", newline="" if KINDS.get(path.suffix.lower()) in ("csv", "tsv") else "\n")


def _raw(file: io.TextIOWrapper, shape: FileShape, path: Path) -> Iterator[tuple[int, Any]]:
    if shape.noun == "entry":
        for place, value in json_list(path):
            yield place.number, json.dumps(value)
        return
    if shape.kind in ("lines", "json"):
        line = 0
        while text := file.readline(LINE):
            line += 1
            if len(text) == LINE:
                raise CodecError(f"line {line} of {path.name} is longer than {LINE:,} characters", "split it")
            yield line, text
        return
    cells = _cells(file, shape.kind, path, shape.delimiter)
    _header(cells)
    for line, row in cells:
        if row and len(row) != len(shape.header):
            hint = "remove tabs from the text" if shape.kind == "tsv" else "quote cells that hold the separator"
            raise CodecError(f"line {line} of {path.name} has {len(row)} cells, the header {len(shape.header)}", hint)
        if row:
            yield line, tuple(row)


def _cells(file: io.TextIOWrapper, kind: Kind, path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    tabs, limit = kind == "tsv", csv.field_size_limit(LINE)
    reader = csv.reader(
        file, delimiter="\t" if tabs else delimiter, quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL, strict=True
    )
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error:
        raise CodecError(f"line {reader.line_num} of {path.name} is not a row", "check its quotes") from None
    finally:
        csv.field_size_limit(limit)


def _size(row: Any) -> int:
    return len(row) if isinstance(row, str) else sum(map(len, row))


def _object(where: str, raw: str) -> dict[str, Any] | None:
    if not raw.strip():
        return None
    try:
        result = json.loads(raw, object_pairs_hook=unique_keys)
    except RepeatedKey as error:
        raise repeated(where, error) from None
    except (ValueError, RecursionError):  # the decoder's own error carries the line's text
        raise CodecError(f"{where} is not JSON", "write one JSON object a line") from None
    if not isinstance(result, dict):
        raise CodecError(f"{where} is not a JSON object", 'write {"text": ...}')
    return result


def _messages(where: str, value: Any, left: set[str], roles: frozenset[str]) -> list[Slot]:
    if not isinstance(value, list) or not all(isinstance(one, dict) and _has_content(one) for one in value):
        raise CodecError(f"{where} has no list of messages", 'give [{"role": "user", "content": "..."}, ...]')
    left.update(f"messages.{name}" for one in value for name in one if name not in ("role", "content"))
    if roles and not all(isinstance(one.get("role"), str) for one in value):
        raise CodecError(f"{where} has a message without a role", "leave out --role, or give each message one")
    kept = [one for one in value if roles and one.get("role") not in roles]
    if kept and len(kept) == len(value):
        raise CodecError(f"{where} has no message of the roles {', '.join(sorted(roles))}", "check --role")
    left.update(f"messages.{one['role']}" for one in kept)
    return [slot for one in value if not any(one is other for other in kept) for slot in _contents(one)]


def _has_content(message: dict[str, Any]) -> bool:
    """Returns whether a message has text, parts that are texts, or calls of tools without text."""
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content)
    return isinstance(content, str) or (missing(content) and bool(message.get("tool_calls")))


def _contents(message: dict[str, Any]) -> list[Slot]:
    content = message.get("content")
    if isinstance(content, list):
        return [(one, "text") for one in content]
    return [(message, "content")] if isinstance(content, str) else []


def _dumped(row: dict[str, Any]) -> str:
    result = json.dumps(row, ensure_ascii=False)
    try:
        result.encode()
    except UnicodeEncodeError:  # half of a pair in an unchanged field
        return json.dumps(row)
    return result
