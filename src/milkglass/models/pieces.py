"""Tokens of a text that is put together from pieces: in some of them a special token's text is text.

Each piece is tokenized apart, so that no token crosses the edge of a piece, and nothing that a tokenizer does to one
piece depends on another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Offsets = list[tuple[int, int]]


@dataclass(frozen=True)
class TextPiece:
    """A part of a text.

    Attributes:
        text: The part.
        literal: Whether the text of a special token in it is text. Otherwise it is that token.
        ids: What stands for it, where that is known. Otherwise the tokenizer says.
    """

    text: str = field(repr=False)
    literal: bool
    ids: tuple[int, ...] | None = field(default=None, repr=False, kw_only=True)


def tokenize(tokenizer: Any, piece: TextPiece, first: bool) -> tuple[list[int], Offsets]:
    """Return the ids of one piece and each token's (start, stop) in its text.

    Args:
        tokenizer: A fast tokenizer.
        piece: What is tokenized, without special tokens around it.
        first: Whether the text begins with it. Otherwise a tokenizer that writes a space before a text must not: the
            piece is tokenized behind a line feed, whose tokens are left out.
    """
    if piece.ids is not None:
        return list(piece.ids), [(0, len(piece.text))] * len(piece.ids)
    if first or not piece.text:
        return _tokens(tokenizer, piece.text, piece.literal)
    feed, _ = _tokens(tokenizer, "\n", piece.literal)
    ids, offsets = _tokens(tokenizer, "\n" + piece.text, piece.literal)
    if ids[: len(feed)] != feed:  # the line feed and the piece share a token
        return _tokens(tokenizer, piece.text, piece.literal)
    return ids[len(feed) :], [(max(0, start - 1), max(0, stop - 1)) for start, stop in offsets[len(feed) :]]


def tokenize_all(tokenizer: Any, pieces: Sequence[TextPiece]) -> tuple[list[int], Offsets]:
    """Return the ids of all pieces, one after the other, and each token's (start, stop) in the whole text."""
    ids, offsets, start = list[int](), Offsets(), 0
    for piece in pieces:
        more, places = tokenize(tokenizer, piece, start == 0)
        ids += more
        offsets += [(begin + start, end + start) for begin, end in places]
        start += len(piece.text)
    return ids, offsets


def special_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    bare, _ = _tokens(tokenizer, "a", True)
    whole = tokenizer("a", add_special_tokens=True, truncation=False)["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def reads_as(tokenizer: Any, normalize: Callable[[str], str] | None, ids: Sequence[int], text: str) -> bool:
    """Whether the tokens of a text read as the text that `normalize` makes of it, but for white space.

    An added token may be found in the text before it is normalized, and reads as it was written. So what is read may
    also be the same after `normalize`: otherwise a tokenizer's author would choose words of which a text is refused.
    """
    read = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    normalize = normalize or str
    return _letters(normalize(text)) in (_letters(read), _letters(normalize(read)))


def _letters(text: str) -> str:
    """A text without white space, and SentencePiece's sign for it: decoders differ in where they write it."""
    return "".join(text.replace("▁", " ").split())


def _tokens(tokenizer: Any, text: str, literal: bool) -> tuple[list[int], Offsets]:
    batch = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False,
        split_special_tokens=literal,
    )  # fmt: skip
    return list(batch["input_ids"]), [(int(start), int(stop)) for start, stop in batch["offset_mapping"]]
