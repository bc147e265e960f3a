"""Reads all JSON of a server strictly, so that no command must clean anything again.

The result cannot steer a terminal, and all of its numbers can be computed with: strings are one printable line each,
numbers are finite and fit 64 bits, and depth and number of containers are limited.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from milkglass.errors import RemoteError

MAX_STRING_CHARACTERS = 500  # the characters to which strings are cut
MAX_DEPTH = 32  # levels of nested lists and objects
MAX_CONTAINERS = 200_000  # lists and objects of one answer: each takes 56 bytes or more for 3 bytes of text
INT64_LIMIT = 1 << 63
SERVER_HINT = "is this a milkglass server?"


def parse_object(raw: bytes | str, noun: str = "the answer") -> dict[str, Any]:
    """Returns the JSON object in `raw`.

    Strings are cut to MAX_STRING_CHARACTERS characters, and characters that cannot be printed are replaced. NaN and
    infinities, which JSON does not have, become null.

    Args:
        noun: what error messages call it.

    Raises:
        RemoteError: it is not an object, has more than MAX_CONTAINERS lists and objects, is nested deeper than
            MAX_DEPTH, or has a number beyond 64 bits.
    """
    try:
        text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
        container_count = text.count("{") + text.count("[")
        if container_count > MAX_CONTAINERS:
            raise RemoteError(
                f"{noun} has {container_count} lists and objects, at most {MAX_CONTAINERS} are read", SERVER_HINT
            )
        parsed = _DECODER.decode(text)
    except _OutOfRange:
        raise RemoteError(f"{noun} has a number beyond 64 bits", SERVER_HINT) from None
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RemoteError(f"{noun} is not a JSON object", SERVER_HINT)
    if len(text) <= MAX_STRING_CHARACTERS and container_count <= MAX_DEPTH and "\\" not in text and text.isprintable():
        return parsed  # its strings are parts of the text: nothing is left to clean, as in most events of an answer
    return _clean(parsed, 0, noun)


def error_in(body: bytes) -> dict[str, Any]:
    """Returns the object `error` in the body of an error answer, or {} if it has none, such as a page of HTML."""
    try:
        error = parse_object(body).get("error")
    except RemoteError:
        error = None
    return error if isinstance(error, dict) else {}


class _OutOfRange(Exception):
    """A number is out of range. It is not a ValueError, which the JSON reader raises for its own errors."""


def _read_integer(digits: str) -> int:
    number = int(digits) if len(digits) <= 20 else INT64_LIMIT
    if abs(number) >= INT64_LIMIT:
        raise _OutOfRange
    return number


def _read_finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _OutOfRange
    return number


_DECODER = json.JSONDecoder(parse_int=_read_integer, parse_float=_read_finite, parse_constant=lambda name: None)


def _clean(parsed: Any, depth: int, noun: str) -> Any:
    """Returns parsed JSON with strings of one printable line. Raises RemoteError below MAX_DEPTH levels."""
    if depth > MAX_DEPTH:
        raise RemoteError(f"{noun} is nested more than {MAX_DEPTH} levels deep", SERVER_HINT)
    if isinstance(parsed, str):
        return one_line(parsed, MAX_STRING_CHARACTERS)
    if isinstance(parsed, list):
        return [element if isinstance(element, int | float) else _clean(element, depth + 1, noun) for element in parsed]
    if isinstance(parsed, dict):
        return {
            one_line(name, MAX_STRING_CHARACTERS): _clean(element, depth + 1, noun) for name, element in parsed.items()
        }
    return parsed


REPLACEMENT = "\ufffd"  # replaces a removed character
# Left-to-right and right-to-left marks, embeddings, overrides and isolates: they reorder what a reader sees.
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
# No width, and no use in running text. U+200C and U+200D stay: scripts of India and emoji need them.
_INVISIBLE = "\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_UNSAFE_PATTERN = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{_BIDI}{_INVISIBLE}]")


def one_line(text: str, max_length: int) -> str:
    """Returns the first `max_length` characters, each replaced by REPLACEMENT if it is not printable.

    A character is printable if str.isprintable says so.
    """
    short = text[:max_length]
    return short if short.isprintable() else "".join(c if c.isprintable() else REPLACEMENT for c in short)


def clean_text(text: str) -> str:
    """Returns a text of several lines with REPLACEMENT for characters that could steer a terminal or mislead a reader.

    Tabs, line feeds and the joiners of scripts and emoji stay.
    """
    return _UNSAFE_PATTERN.sub(REPLACEMENT, text)


def escape_unprintable(json_text: str) -> str:
    """Returns the text of an equal JSON document in which all characters that are not printable are escaped.

    The text must be one line, as json.dumps writes it without `indent`.
    """
    if json_text.isprintable():
        return json_text
    return "".join(c if c.isprintable() else _escape(c) for c in json_text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
