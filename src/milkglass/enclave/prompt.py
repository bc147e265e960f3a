"""A prompt's tokens, and which of them the user wrote: these are sanitized, the instruction and the template are not.

A token that shares a character with the user's text counts as the user's.
"""

from __future__ import annotations

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
    text = render(tokenizer, messages, add_generation_prompt=True)
    spans, start = [], 0
    for number, message in enumerate(messages):
        content = message["content"].strip()  # templates strip
        place = text.find(content, start)
        if place < 0:
            raise CodecError(
                f"the chat template rewrites message {number + 1}, so that its text cannot be told from the template",
                "give --raw, and the instruction with --instruction",
            )
        start = place + len(content)
        if message["role"] == "user" and content:
            spans.append((place + (len(instruction) if content.startswith(instruction) else 0), start))
    return _tokens(tokenizer, text, spans, limit, False)


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
