"""Tokenizes a text piece by piece. In some pieces the text of a special token is text.

Each piece is tokenized separately, so that no token crosses the edge of a piece, and no piece affects another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Offsets = list[tuple[int, int]]


@dataclass(frozen=True)
class TextPiece:
    """Holds a part of a text, which is tokenized separately.

    Attributes:
        is_literal: whether the text of a special token is text in this part. Otherwise it is that token.
        ids: the ids that stand for the part. None: the tokenizer decides.
    """

    text: str = field(repr=False)
    is_literal: bool
    ids: tuple[int, ...] | None = field(default=None, repr=False, kw_only=True)


def tokenize(tokenizer: Any, piece: TextPiece, is_first: bool) -> tuple[list[int], Offsets]:
    """Returns the ids of one piece without special tokens around it, and each token's (start, stop) in its text.

    A tokenizer may write a space before a text, which must not happen in the middle of one. A piece that is not the
    first is therefore tokenized behind a line feed, whose tokens are dropped.

    Args:
        tokenizer: a `Tokenizer` or one of transformers'.
        piece: the piece.
        is_first: whether the text begins with this piece.
    """
    if piece.ids is not None:
        return list(piece.ids), [(0, len(piece.text))] * len(piece.ids)
    if is_first or not piece.text:
        return _tokens(tokenizer, piece.text, piece.is_literal)
    feed_ids, _ = _tokens(tokenizer, "\n", piece.is_literal)
    ids, offsets = _tokens(tokenizer, "\n" + piece.text, piece.is_literal)
    if ids[: len(feed_ids)] != feed_ids:  # the line feed and the piece share a token
        return _tokens(tokenizer, piece.text, piece.is_literal)
    return ids[len(feed_ids) :], [(max(0, start - 1), max(0, stop - 1)) for start, stop in offsets[len(feed_ids) :]]


def tokenize_all(tokenizer: Any, pieces: Sequence[TextPiece]) -> tuple[list[int], Offsets]:
    """Returns the ids of all pieces in order, and each token's (start, stop) in the whole text."""
    ids, offsets, start = list[int](), Offsets(), 0
    for piece in pieces:
        tokens, piece_offsets = tokenize(tokenizer, piece, start == 0)
        ids += tokens
        offsets += [(begin + start, end + start) for begin, end in piece_offsets]
        start += len(piece.text)
    return ids, offsets


def special_ids_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the special tokens that the tokenizer puts before and after a text."""
    without_special, _ = _tokens(tokenizer, "a", True)
    with_special = tokenizer("a", add_special_tokens=True, truncation=False)["input_ids"]
    for start in range(len(with_special) - len(without_special) + 1):
        if with_special[start : start + len(without_special)] == without_special:
            return with_special[:start], with_special[start + len(without_special) :]
    return [], []


def reads_as(tokenizer: Any, normalize: Callable[[str], str] | None, ids: Sequence[int], text: str) -> bool:
    """Returns whether the tokens of a text are read as the text after `normalize`, except for white space.

    `normalize` is the tokenizer's own change of a text, or None if it makes none. An added token may be found in the
    text before it is normalized, and reads as it was written. What is read may therefore also be equal after
    `normalize`: otherwise a tokenizer's author could choose words that make a text refused.
    """
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    normalize = normalize or str
    return _letters(normalize(text)) in (_letters(decoded), _letters(normalize(decoded)))


def _letters(text: str) -> str:
    """Returns a text without white space and SentencePiece's sign for it, which decoders place differently."""
    return "".join(text.replace("▁", " ").split())


def _tokens(tokenizer: Any, text: str, is_literal: bool) -> tuple[list[int], Offsets]:
    batch = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False,
        split_special_tokens=is_literal,
    )  # fmt: skip
    return list(batch["input_ids"]), [(int(start), int(stop)) for start, stop in batch["offset_mapping"]]
