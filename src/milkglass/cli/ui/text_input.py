"""Reads lines of stdin or of a file as texts, by one rule for all commands.

A line is JSON only if it is an object with "text" or "messages" in it. Any other line is text, also one with braces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.cli.ui.columns import ColumnOptions, say_read, say_skipped
from milkglass.cli.ui.options import require_file
from milkglass.errors import CodecError, EmptyText, UsageError, naming
from milkglass.rows.encoding import lines
from milkglass.rows.place import missing
from milkglass.rows.tables import is_json_list

if TYPE_CHECKING:
    from milkglass.rows.messages import Message


MARK = "\ufeff"  # a byte order mark, which Windows puts before a text


@dataclass(frozen=True)
class InputRow:
    """A text, perhaps with its pair, or a conversation.

    Attributes:
        name: the row's name in messages, such as "text 2" or "line 7 of in.txt".
        mark: the row's name in the answer: the id or number of a table's row. "": it has none.
    """

    name: str
    text: str = ""
    pair: str | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    mark: str = ""


def line_name(number: int, source: Path | None) -> str:
    """Returns the name of a line for messages. Lines count from 1; a source of None is stdin."""
    return f"line {number} of {'stdin' if source is None else source.name}"


def row_of(name: str, line: str) -> InputRow:
    """Reads a line. Raises CodecError for an object whose texts are not strings."""
    text = line.rstrip("\r\n")
    result = _object(text)
    if result is None:
        return InputRow(name, text)
    if "messages" in result:
        from milkglass.rows.messages import conversation_of

        try:
            messages, tools = conversation_of(result, trained=False)
        except (UsageError, EmptyText) as error:
            raise CodecError(f"{name}: {error.message}", error.hint) from None
        return InputRow(name, messages=messages, tools=tools)
    first, pair = result["text"], result.get("text_pair")
    if not all(isinstance(one, str) or missing(one) for one in (first, pair)):
        raise CodecError(f"{name} has a text or a text_pair that is not a string", 'write {"text": "..."}')
    return InputRow(name, first if isinstance(first, str) else "", pair if isinstance(pair, str) else None)


def arguments(texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[InputRow]:
    return [InputRow(f"text {n + 1}", text, pairs[n] if pairs else None) for n, text in enumerate(texts)]


def to_classify(
    texts: Sequence[str] | None, source: Path | None, columns: ColumnOptions, id_column: str | None = None
) -> list[InputRow]:
    """Returns the texts, or each line of a file (None: stdin), or each row of a table.

    A blank line is refused and not skipped, because answers must match the lines.

    Raises:
        CodecError: a row is blank or cannot be read.
        UsageError: the file does not exist, or options name columns of texts that have none.
    """
    if not texts and source is not None and _is_table(source, columns):
        return _rows_of(source, columns, id_column)
    if columns.decides() or id_column is not None:
        raise UsageError("the texts have no columns", "leave out the options of columns, or give a table")
    rows = arguments(texts) if texts else _lines_of(source)
    for row in rows:
        if not row.text.strip() and not row.messages:
            raise EmptyText(f"{row.name} is blank", "remove it: each text gets one answer")
    require_no_messages(rows, 'a classifier reads {"text": ...}')
    return rows


def _lines_of(source: Path | None) -> list[InputRow]:
    if source is None:
        provided = sys.stdin.read().removeprefix(MARK)
        numbered = list(enumerate(provided.removesuffix("\n").split("\n"), 1)) if provided else []
    else:
        numbered = list(lines(source))
    if not numbered:
        raise EmptyText(f"{'stdin' if source is None else source.name} is empty", "write a text a line")
    return [row_of(line_name(number, source), line) for number, line in numbered]


def _is_table(source: Path, columns: ColumnOptions) -> bool:
    """Returns whether a file has rows with columns. Read as lines, its header and labels would become texts."""
    require_file(source, "give a file with a text a line, or a table")
    kind = source.suffix.lower()
    if kind in (".csv", ".tsv", ".parquet"):
        return True
    return kind in (".json", ".jsonl") and (columns.text_column is not None or is_json_list(source))


def _rows_of(source: Path, columns: ColumnOptions, id_column: str | None) -> list[InputRow]:
    from milkglass.rows.examples import ID, read_texts

    file = columns.file(source)
    blank, empty = list[int](), list[int]()
    rows = list(read_texts(file, blank.append, id_column, empty.append))
    say_read(file, False, id_column or (ID if any(one.mark for one in rows) else None))
    say_skipped(file.name, len(blank), len(empty))
    return [InputRow(str(one.place(file)), one.text, one.pair, mark=one.mark or str(one.line)) for one in rows]


def named(rows: Sequence[InputRow]) -> AbstractContextManager[None]:
    """Reports a text that is refused inside the block by its row's name."""
    return naming(lambda place: rows[place].name)


def pairs_of(rows: Sequence[InputRow]) -> list[str] | None:
    """Returns the second texts, or None if no row has one. Raises CodecError if only some rows have one."""
    pairs = [row.pair for row in rows if row.pair is not None]
    if pairs and len(pairs) < len(rows):
        raise CodecError("some rows have a text_pair and some have none", "give one kind of row")
    return pairs or None


def paired(rows: Sequence[InputRow], provided: Sequence[str] | None) -> list[str] | None:
    """Returns the second texts: the rows' own, or else what the options give.

    Raises:
        UsageError: the numbers of texts and second texts differ.
        CodecError: a second text is blank.
    """
    pairs = pairs_of(rows) or list(provided or ()) or None
    if provided and (len(provided) != len(rows) or pairs != list(provided)):
        raise UsageError(f"{len(rows)} texts and {len(provided)} pairs", "give --pair once for each text without one")
    for row, pair in zip(rows, pairs or (), strict=False):
        if not pair.strip():
            raise EmptyText(f"the second text of {row.name} is blank", "give a text, or leave all second texts out")
    return pairs


def require_no_messages(rows: Sequence[InputRow], hint: str) -> None:
    for row in rows:
        if row.messages:
            raise CodecError(f"{row.name} holds messages, not a text", hint)


def _object(text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and ("text" in value or "messages" in value) else None
