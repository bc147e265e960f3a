"""A prompt's tokens, and which of them the user wrote: these are sanitized, the instruction and the template are not.

A token that shares a character with the user's text counts as the user's. Where the user's text stands in a rendered
conversation is not searched for: a word of the user's may be one of the template's.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.codec.conversation import Message, render, require_ordinary, require_text
from milkglass.errors import CodecError, EmptyText, TooLong

Span = tuple[int, int]


@dataclass(frozen=True)
class PromptTokens:
    """One prompt.

    Attributes:
        ids: (t,)
        private: (t,) whether a token is of the user's text.
    """

    ids: NDArray[np.int64] = field(repr=False)
    private: NDArray[np.bool_] = field(repr=False)

    @property
    def runs(self) -> list[slice]:
        """Where the user's text is: a slice for each part that is not interrupted, as messages of a chat are."""
        edges = np.flatnonzero(np.diff(self.private.astype(np.int8), prepend=0, append=0)).tolist()
        return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]

    def replaced(self, replace: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> NDArray[np.int64]:
        """(t,) the ids, each part of the user's text as `replace` gives it, token for token."""
        ids = self.ids.copy()
        for run in self.runs:
            ids[run] = replace(ids[run])
        return ids


def of_text(tokenizer: Any, text: str, instruction: str, limit: int) -> PromptTokens:
    """Plain text to continue, after an instruction that is not sanitized. Raises CodecError."""
    require_text([text])
    return _tokens(tokenizer, instruction + text, [(len(instruction), len(instruction) + len(text))], limit, True)


def of_chat(tokenizer: Any, messages: Sequence[Message], limit: int, instruction: str = "") -> PromptTokens:
    """A conversation in the model's own template. What users say is sanitized; what the system and the model say is
    not, nor the instruction where a message begins with it. Raises CodecError."""
    require_ordinary(tokenizer, [messages])
    text, spans = _placed(tokenizer, messages)
    private = []
    for number, (start, stop) in spans:
        if messages[number]["role"] == "user":
            kept = len(instruction) if text.startswith(instruction, start, stop) else 0
            private.append((start + kept, stop))
    return _tokens(tokenizer, text, private, limit, False)


def _placed(tokenizer: Any, messages: Sequence[Message]) -> tuple[str, list[tuple[int, Span]]]:
    """The rendered conversation, and where each message stands in it, by its number.

    The template is the provider's, and a short message may be a word of it. So the template is rendered with marks in
    the messages' place, which no template can know, and what it makes of the messages themselves must be the same with
    the messages in the marks' place. A template that alters, repeats in other words or asks what a message holds is
    refused.
    """
    marks = {secrets.token_hex(16): number for number, one in enumerate(messages) if one["content"].strip()}
    names = {number: mark for mark, number in marks.items()}
    marked = [{**one, "content": names.get(number, one["content"])} for number, one in enumerate(messages)]
    pieces = re.split(
        f"({'|'.join(marks)})" if marks else "(?!)", render(tokenizer, marked, add_generation_prompt=True)
    )
    text = render(tokenizer, messages, add_generation_prompt=True)
    for stripped in (True, False):  # some templates strip messages
        contents = [one["content"].strip() if stripped else one["content"] for one in messages]
        parts = [contents[marks[piece]] if piece in marks else piece for piece in pieces]
        if "".join(parts) == text:
            ends = np.cumsum([len(part) for part in parts]).tolist()
            return text, [
                (marks[piece], (end - len(part), end))
                for piece, part, end in zip(pieces, parts, ends, strict=True)
                if piece in marks
            ]
    raise CodecError(
        "the chat template rewrites what a message says, so that its text cannot be told from the template",
        "give --raw, and the instruction with --instruction",
    )


def _tokens(tokenizer: Any, text: str, spans: list[Span], limit: int, special: bool) -> PromptTokens:
    batch = tokenizer(
        text, add_special_tokens=special, return_offsets_mapping=True, truncation=False, verbose=False,
        split_special_tokens=special,
    )  # fmt: skip
    ids = np.asarray(batch["input_ids"], np.int64)
    if not len(ids):
        raise EmptyText("the prompt has no token", "give some text")
    if len(ids) > limit:
        raise TooLong(f"the prompt has {len(ids)} tokens, at most {limit} fit", "shorten it")
    offsets = batch["offset_mapping"]
    private = [any(a < stop and b > start for start, stop in spans) for a, b in offsets]
    return PromptTokens(ids, np.array(private, np.bool_))
