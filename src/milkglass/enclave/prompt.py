"""Divides a prompt into pieces and tokens: what the user wrote is sanitized, and nothing else.

The template and the tokenizer are the provider's, which must not read the user's text. So neither decides what is
private:

- The template never sees a text. It renders marks in place of the messages, which the texts then replace.
- Each piece is tokenized separately, so that no rule of the tokenizer can write the user's text into the template's
  tokens. The tokenizer's parts are on a list (models/tokenizer_parts.py), and the tokens of the user's pieces must read
  as the user's text.

The host renders and divides; the enclave tokenizes (handler.py).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.codec.conversation import require_encodable, require_messages
from milkglass.errors import CodecError, EmptyText, EnclaveError, TooLong
from milkglass.models import chat_template
from milkglass.models.pieces import TextPiece, reads_as, special_ids_around, tokenize
from milkglass.rows.messages import Message

# White space that no template strips alone
MARK_SPACES = "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
ROLE_PATTERN = re.compile(r"[a-zA-Z_-]{1,32}")


@dataclass(frozen=True)
class PromptPiece(TextPiece):
    """Holds a part of a prompt.

    Attributes:
        is_private: whether the part is of the user's text, which is sanitized.
    """

    is_private: bool


@dataclass(frozen=True)
class PromptTokens:
    """Holds the tokens of a prompt, and replaces those of the user's text.

    Attributes:
        ids: (t,) the tokens.
        is_private: (t,) whether each token is of the user's text.
    """

    ids: NDArray[np.int64] = field(repr=False)
    is_private: NDArray[np.bool_] = field(repr=False)

    @property
    def runs(self) -> list[slice]:
        """Returns a slice for each uninterrupted part of the user's text, such as a message of a chat."""
        edges = np.flatnonzero(np.diff(self.is_private.astype(np.int8), prepend=0, append=0)).tolist()
        return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]

    def replace_private(self, replace: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> NDArray[np.int64]:
        """Returns the ids (t,) with each part of the user's text replaced, token for token."""
        ids = self.ids.copy()
        for run in self.runs:
            ids[run] = replace(ids[run])
        return ids


def chat_tokens(tokenizer: Any, messages: Sequence[Message], max_tokens: int, instruction: str = "") -> PromptTokens:
    """Returns the tokens of a conversation (`chat_pieces`), at most `max_tokens`. Raises CodecError, EnclaveError."""
    return prompt_tokens(tokenizer, chat_pieces(tokenizer, messages, instruction), max_tokens, adds_special=False)


def text_pieces(text: str, instruction: str) -> list[PromptPiece]:
    """Returns the pieces of plain text to continue, after an instruction that is not sanitized. Raises CodecError."""
    require_encodable([text])
    return _join_pieces([PromptPiece(instruction, True, False), PromptPiece(text, True, True)])


def chat_pieces(tokenizer: Any, messages: Sequence[Message], instruction: str) -> list[PromptPiece]:
    """Returns the pieces of a conversation in the model's own template.

    What users say is private. What the system and the model say is not, nor an instruction with which a message of the
    user begins.

    Raises CodecError if the template refuses the conversation, leaves a message out, or changes a message otherwise
    than by stripping the white space around it.
    """
    require_messages(tokenizer, messages)
    if bad_role := next(
        (number for number, message in enumerate(messages, 1) if not ROLE_PATTERN.fullmatch(message["role"])), 0
    ):
        raise CodecError(f"message {bad_role} has a role that is no word", "one of system, user, assistant, tool")
    layout, second_layout = (_Layout.of(tokenizer, messages, size) for size in (16, 21))
    if layout != second_layout:  # the template wrote something of the marks, such as their length or first letters
        raise _rewritten_error()
    return _join_pieces(layout.pieces(messages, instruction))


def prompt_tokens(tokenizer: Any, pieces: Sequence[PromptPiece], max_tokens: int, adds_special: bool) -> PromptTokens:
    """Tokenizes a prompt, each piece separately.

    Args:
        tokenizer: the provider's tokenizer.
        pieces: the pieces, in order.
        max_tokens: the most tokens of the prompt, special ones included.
        adds_special: whether the tokenizer's special tokens are put around the prompt.

    Raises:
        EmptyText: the prompt has no token.
        TooLong: the prompt has more than `max_tokens`.
        EnclaveError: the tokens of the user's text read as another text.
    """
    prefix, suffix = special_ids_around(tokenizer) if adds_special else ([], [])
    ids, is_private = list(prefix), [False] * len(prefix)
    for number, piece in enumerate(pieces):
        piece_ids, _ = tokenize(tokenizer, piece, is_first=not number)
        if piece.is_private:
            _require_same_text(tokenizer, piece_ids, piece.text)
        ids += piece_ids
        is_private += [piece.is_private] * len(piece_ids)
    if not len(ids) - len(prefix):
        raise EmptyText("the prompt has no token", "give some text")
    ids, is_private = ids + suffix, is_private + [False] * len(suffix)
    if len(ids) > max_tokens:
        raise TooLong(f"the prompt has {len(ids)} tokens, at most {max_tokens} fit", "shorten it")
    return PromptTokens(np.asarray(ids, np.int64), np.array(is_private, np.bool_))


def to_json(pieces: Sequence[PromptPiece]) -> list[list[Any]]:
    """Returns the pieces as lists for JSON, which the enclave gets."""
    return [[piece.text, piece.is_literal, piece.is_private] for piece in pieces]


def from_json(raw: Sequence[Sequence[Any]]) -> list[PromptPiece]:
    """Reads the pieces that `to_json` wrote. Raises TypeError or ValueError for anything else."""
    pieces = [PromptPiece(text, is_literal, is_private) for text, is_literal, is_private in raw]
    if any((type(piece.text), type(piece.is_literal), type(piece.is_private)) != (str, bool, bool) for piece in pieces):
        raise TypeError("a piece is a text and two truth values")
    return pieces


# --- the template -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _MessagePlace:
    """Stands for a message in a layout.

    Attributes:
        message_index: the message's place in the conversation, from 0.
        strips_before: whether the template strips white space before the message.
        strips_after: whether the template strips white space after the message.
    """

    message_index: int
    strips_before: bool
    strips_after: bool


@dataclass(frozen=True)
class _Layout:
    """Holds a rendered conversation: the template's texts and the messages' places, in order."""

    parts: tuple[str | _MessagePlace, ...] = field(repr=False)

    @classmethod
    def of(cls, tokenizer: Any, messages: Sequence[Message], size: int) -> _Layout:
        """Renders a conversation with marks in place of its messages.

        `size` is the number of random bytes in each half of a mark. Raises CodecError if a message is left out.
        """
        marks = {_Mark.draw(size): number for number, message in enumerate(messages) if message["content"]}
        mark_texts = {number: str(mark) for mark, number in marks.items()}
        marked_messages = [
            {**_role_and_content(message), "content": mark_texts.get(number, message["content"])}
            for number, message in enumerate(messages)
        ]
        text = chat_template.render(tokenizer, marked_messages, add_generation_prompt=True)
        if absent := [number for mark, number in marks.items() if mark.core not in text]:
            raise _rewritten_error(f"leaves message {absent[0] + 1} out or rewrites it")
        return cls(tuple(_split(text, marks)))

    def pieces(self, messages: Sequence[Message], instruction: str) -> Iterator[PromptPiece]:
        """Yields the pieces of the conversation with the messages in their places; some may be empty."""
        for part in self.parts:
            if isinstance(part, str):
                yield PromptPiece(part, False, False)
                continue
            message = messages[part.message_index]
            text = str(message["content"])
            text = text.lstrip() if part.strips_before else text
            text = text.rstrip() if part.strips_after else text
            instruction_length = len(instruction) if message["role"] == "user" and text.startswith(instruction) else 0
            yield PromptPiece(text[:instruction_length], True, False)
            yield PromptPiece(text[instruction_length:], True, message["role"] == "user")


@dataclass(frozen=True)
class _Mark:
    """Stands for a message while the template is rendered.

    Attributes:
        core: random letters, with a quotation mark, a line feed and a backslash among them, which a template that
            escapes texts would change.
        before: white space before the core, which a template may strip.
        after: white space after the core, which a template may strip.
    """

    core: str
    before: str
    after: str

    @classmethod
    def draw(cls, size: int) -> _Mark:
        """Returns a random mark with `size` random bytes in each half of its core."""
        core = f'{secrets.token_hex(size)}"\n\\{secrets.token_hex(size)}'
        before, after = ("".join(secrets.choice(MARK_SPACES) for _ in range(8)) for _ in range(2))
        return cls(core, before, after)

    def __str__(self) -> str:
        return f"{self.before}{self.core}{self.after}"


def _role_and_content(message: Message) -> dict[str, str]:
    return {name: message[name] for name in ("role", "content")}


def _split(text: str, marks: Mapping[_Mark, int]) -> Iterator[str | _MessagePlace]:
    """Yields the template's texts and the places of the marks between them.

    Raises CodecError if a text has white space of a mark, which the template moved.
    """
    mark_of = {mark.core: mark for mark in marks}
    parts = re.split(f"({'|'.join(map(re.escape, mark_of))})" if mark_of else "(?!)", text)
    strips_before = True
    for number, part in enumerate(parts):
        if number % 2:
            mark = mark_of[part]
            strips_after = not parts[number + 1].startswith(mark.after)
            yield _MessagePlace(marks[mark], strips_before, strips_after)
            continue
        if number and not strips_after:
            part = part[len(mark_of[parts[number - 1]].after) :]
        if number + 1 < len(parts):
            prefix = mark_of[parts[number + 1]].before
            strips_before = not part.endswith(prefix)
            part = part if strips_before else part[: -len(prefix)]
        if any(mark.before in part or mark.after in part for mark in marks):
            raise _rewritten_error()
        yield part


def _rewritten_error(problem: str = "rewrites what a message says") -> CodecError:
    return CodecError(
        f"the chat template {problem}, so that the message's text cannot be told from the template",
        "give --raw, and the instruction with --instruction",
    )


# --- the tokenizer ----------------------------------------------------------------------------------------------------
def _join_pieces(pieces: Sequence[PromptPiece] | Iterator[PromptPiece]) -> list[PromptPiece]:
    """Returns the nonempty pieces. A space at a piece's end moves to the next piece, to whose word tokenizers join it.

    That piece must be literal, and private if the first is.
    """
    nonempty_pieces = list[PromptPiece]()
    for piece in pieces:
        if not piece.text:
            continue
        previous = nonempty_pieces[-1] if nonempty_pieces else None
        if (
            previous is not None
            and previous.text.endswith(" ")
            and piece.is_literal
            and piece.is_private >= previous.is_private
        ):
            nonempty_pieces.pop()
            if len(previous.text) > 1:
                nonempty_pieces.append(PromptPiece(previous.text[:-1], previous.is_literal, previous.is_private))
            piece = PromptPiece(" " + piece.text, piece.is_literal, piece.is_private)
        nonempty_pieces.append(piece)
    return nonempty_pieces


def _require_same_text(tokenizer: Any, ids: Sequence[int], text: str) -> None:
    """Raises EnclaveError if tokens read as another text than the user's after the tokenizer's normalizer."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    if reads_as(tokenizer, None if normalizer is None else normalizer.normalize_str, ids, text):
        return
    raise EnclaveError(
        "the tokens that the tokenizer makes of your text read as another text",
        "write it without unusual letters, or don't use this provider: its tokenizer may add to what you say",
    )
