"""Text that others wrote, made safe to show: no character of it can steer a terminal or hide what it says.

Out of scope: where the text comes from, and where it is shown.
"""

from __future__ import annotations

import re

MARK = "\ufffd"  # stands where a character was taken out
# Left-to-right and right-to-left marks, embeddings, overrides and isolates: they reorder what a reader sees.
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
# No width, and no use in running text. U+200C and U+200D stay: scripts of India and emoji need them.
_INVISIBLE = "\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_UNSAFE = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{_BIDI}{_INVISIBLE}]")


def one_line(text: str, longest: int) -> str:
    """At most `longest` characters, all of them printable in the sense of str.isprintable."""
    short = text[:longest]
    return short if short.isprintable() else "".join(c if c.isprintable() else MARK for c in short)


def running_text(text: str) -> str:
    """Text of several lines. Tabs, line feeds and the joiners of scripts and emoji stay."""
    return _UNSAFE.sub(MARK, text)


def escaped(document: str) -> str:
    """A JSON document in which each character that is not printable is written as an escape: the same document.

    The document must be one line, as json.dumps writes it without `indent`."""
    if document.isprintable():
        return document
    return "".join(c if c.isprintable() else _escape(c) for c in document)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
