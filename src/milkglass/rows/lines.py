"""Reads lines of stdin or of a file as texts, by one rule for all commands.

A line is JSON only if it is an object with "text" or "messages" in it. Any other line is text, also one with braces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.errors import CodecError, EmptyText, UsageError, naming_texts
from milkglass.rows.encoding import numbered_lines
from milkglass.rows.place import Place, is_missing, repeated_key_error, text_of
from milkglass.unique_keys import RepeatedKey, unique_keys

if TYPE_CHECKING:
    from milkglass.rows.messages import Message

BYTE_ORDER_MARK = "\ufeff"  # a byte order mark, which Windows puts before a text


@dataclass(frozen=True)
class InputRow:
    """Holds a text, perhaps with its pair, or a conversation.

    Attributes:
        name: the row's name in messages, such as "text 2" or "line 7 of in.txt".
        output_id: the row's name in the answer: the id or number of a table's row, or "".
    """

    name: str
    text: str = ""
    pair: str | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    output_id: str = ""


def input_lines(source: Path | None, stdin: Iterable[str]) -> Iterator[tuple[Place, str]]:
    """Yields the lines of a file, or of `stdin` if `source` is None, without a byte order mark.

    Raises:
        CodecError: the file is not text in UTF-8, or a line is too long.
    """
    if source is not None:
        yield from ((Place(source.name, number), line) for number, line in numbered_lines(source))
        return
    for number, line in enumerate(stdin, 1):
        if text := line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line:
            yield Place("stdin", number), text.rstrip("\r\n")


def input_row(place: Place, line: str) -> InputRow:
    """Returns the row of a line. Raises CodecError for an object whose texts are not strings, or with a key twice."""
    name, row = str(place), _json_object(place, line)
    if row is None:
        return InputRow(name, line)
    if "messages" in row:
        from milkglass.rows.examples import conversation_at

        messages, tools = conversation_at(place, row, is_trained=False)
        return InputRow(name, messages=messages, tools=tools)
    return InputRow(name, _text(place, row, "text") or "", _text(place, row, "text_pair"))


def _text(place: Place, row: Mapping[str, Any], column: str) -> str | None:
    """Returns a text, which may be blank, or None if there is none."""
    cell = row.get(column)
    return cell if isinstance(cell, str) else None if is_missing(cell) else text_of(place, row, column)


def _json_object(place: Place, line: str) -> dict[str, Any] | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        parsed = json.loads(line)
        if not {"text", "messages"} & parsed.keys():
            return None
        return dict(json.loads(line, object_pairs_hook=unique_keys))
    except RepeatedKey as error:
        raise repeated_key_error(place, error) from None
    except (ValueError, RecursionError):
        return None


def rows_of_arguments(texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[InputRow]:
    """Returns the texts of a command's arguments, each with its second text.

    Raises UsageError for the name of a file with rows: its name would be read in place of its texts.
    """
    from milkglass.rows.data_file import SPREADSHEET_SUFFIXES, SUFFIXES

    suffixes = {*SUFFIXES, *SPREADSHEET_SUFFIXES} - {""}
    for text in texts:
        if Path(text).suffix.lower() in suffixes and os.path.isfile(text):  # noqa: PTH113  (Path.is_file raises for long ones)
            raise UsageError(f"{text} is a file, and its name would be read as the text", "--in FILE reads its texts")
    return [InputRow(f"text {n + 1}", text, pairs[n] if pairs else None) for n, text in enumerate(texts)]


def refusals_naming_rows(rows: Sequence[InputRow]) -> AbstractContextManager[None]:
    """Returns a context in which the error for a refused text gets the name of its row."""
    return naming_texts(lambda index: rows[index].name)


def pairs_of(rows: Sequence[InputRow]) -> list[str] | None:
    """Returns the second texts, or None if no row has one. Raises CodecError if only some rows have one."""
    pairs = [row.pair for row in rows if row.pair is not None]
    if pairs and len(pairs) < len(rows):
        raise CodecError("some rows have a text_pair and some have none", "give one kind of row")
    return pairs or None


def second_texts(rows: Sequence[InputRow], option_pairs: Sequence[str] | None) -> list[str] | None:
    """Returns the second texts: the rows' own, or else what the options give. None: there are none.

    Args:
        rows: the rows of the first texts.
        option_pairs: the second texts that the options give, one for each row.

    Raises:
        UsageError: the numbers of texts and second texts differ.
        CodecError: a second text is blank.
    """
    pairs = pairs_of(rows) or list(option_pairs or ()) or None
    if option_pairs and (len(option_pairs) != len(rows) or pairs != list(option_pairs)):
        raise UsageError(
            f"{len(rows)} texts and {len(option_pairs)} pairs", "give --pair once for each text without one"
        )
    for row, pair in zip(rows, pairs or (), strict=False):
        if not pair.strip():
            raise EmptyText(f"the second text of {row.name} is blank", "give a text, or leave all second texts out")
    return pairs


def require_no_messages(rows: Sequence[InputRow], hint: str) -> None:
    """Raises CodecError for a row that is a conversation."""
    for row in rows:
        if row.messages:
            raise CodecError(f"{row.name} holds messages, not a text", hint)
