"""Lines of stdin or of a file, as texts: one rule for every command that reads them.

A line is JSON only if it is an object with "text" or "messages" in it; anything else is text, braces and all. What this
module does not know: the codec, and what becomes of a row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from milkglass.errors import CodecError

if TYPE_CHECKING:
    from milkglass.client.conversation import Message


@dataclass(frozen=True)
class Row:
    """`number` counts from 1, for messages; a text, perhaps with its pair, or a conversation."""

    number: int
    text: str = ""
    pair: str | None = None
    messages: tuple[Message, ...] = ()


def row_of(number: int, line: str) -> Row:
    """Raises CodecError for an object whose texts are none."""
    text = line.rstrip("\r\n")
    found = _object(text)
    if found is None:
        return Row(number, text)
    if "messages" in found:
        return Row(number, messages=_turns(number, found["messages"]))
    pair = found.get("text_pair")
    if not isinstance(found["text"], str) or not isinstance(pair, str | None):
        raise CodecError(f"line {number} has a text or a text_pair that is no string", 'write {"text": "..."}')
    return Row(number, found["text"], pair)


def pairs_of(rows: Sequence[Row]) -> list[str] | None:
    """The second texts; None where there are none. Raises CodecError where only some rows have one."""
    pairs = [row.pair for row in rows if row.pair is not None]
    if pairs and len(pairs) < len(rows):
        raise CodecError("some rows have a text_pair and some have none", "give one kind of row")
    return pairs or None


def require_no_messages(rows: Sequence[Row], hint: str) -> None:
    for row in rows:
        if row.messages:
            raise CodecError(f"line {row.number} holds messages, not a text", hint)


def _object(text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and ("text" in value or "messages" in value) else None


def _turns(number: int, value: Any) -> tuple[Message, ...]:
    turns = value if isinstance(value, list) else []
    if not turns or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in turns
    ):
        raise CodecError(f"line {number} has no list of messages", 'give [{"role": "user", "content": "..."}, ...]')
    return tuple({"role": one["role"], "content": one["content"]} for one in turns)
