"""Makes conversations, sanitizes them by tokens of the model, and makes prompts of them (CMIF, sections 3.2 and 4.1).

Training uses the text that `milkglass sanitize --by tokens --role user` writes. Prompts are what the enclave of a split
decoder sends: rendered conversations as ids, in which the user's text went through the same mechanism. Which tokens are
sensitive follows from how often each occurs in the users' messages of all training data, without the instruction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass import files
from milkglass.enclave import prompt
from milkglass.errors import UsageError
from milkglass.noise.stream import Stream
from milkglass.rows.blocks import RowFormat
from milkglass.rows.examples import Example
from milkglass.rows.messages import Message
from milkglass.rows.write import example_row
from milkglass.sanitizers.files import report_path, sanitize_file
from milkglass.sanitizers.method import SanitizerMethod
from milkglass.sanitizers.text import TokenReader, TokenTextSanitizer
from milkglass.sequences import Ids

USER_ROLES = frozenset({"user"})


def conversations_of(examples: Sequence[Example], instruction: str, max_words: int | None) -> list[Example]:
    """Returns rows as conversations that begin with the instruction.

    A labelled text becomes a user's message behind the instruction, and its label becomes the assistant's answer.

    Args:
        instruction: the text with which the first message of each conversation begins.
        max_words: the most words of a first message; longer conversations are left out. None: no limit.

    Raises:
        UsageError: there are pairs, plain text, or a conversation that does not begin with the instruction.
    """
    result = []
    for example in examples:
        if example.kind == "labelled" and example.pair is None:
            user = {"role": "user", "content": instruction + example.text}
            answer = {"role": "assistant", "content": str(example.label)}
            example = Example(example.line, "chat", messages=(user, answer))
        if example.kind != "chat" or not example.messages[0]["content"].startswith(instruction):
            raise UsageError(
                f"row {example.line} is not a conversation that begins with the recipe's instruction", "see instruction"
            )
        if max_words is None or len(example.messages[0]["content"].split()) <= max_words:
            result.append(example)
    return result


def draw_rows(examples: Sequence[Example], row_count: int, seed: int, noun: str) -> list[Example]:
    """Draws rows without replacement, in an order that the seed decides.

    Args:
        noun: what error messages call the rows.

    Raises:
        UsageError: there are too few rows.
    """
    if not 0 < row_count <= len(examples):
        raise UsageError(f"{row_count} rows of {noun} are needed, {len(examples)} fit", "lower it, or raise words")
    return [examples[i] for i in np.random.default_rng(seed).permutation(len(examples))[:row_count]]


def write_chats(examples: Sequence[Example], out: Path) -> Path:
    """Writes rows as JSON Lines, and returns the file."""
    files.make_private_dir(out.parent)
    files.write(out, "".join(json.dumps(example_row(example)) + "\n" for example in examples))
    return out


@dataclass(frozen=True)
class SentPrompt:
    """Holds a prompt as it is sent.

    Attributes:
        ids: (tokens,) the ids of the rendered conversation.
        private_count: how many tokens are the user's.
        unchanged_count: how many of these are sent unchanged.
    """

    ids: Ids
    private_count: int
    unchanged_count: int


@dataclass(frozen=True)
class ChatSanitizer:
    """Sanitizes the user's text in conversations, by one mechanism over a model's tokens.

    Attributes:
        sanitizer: sanitizes text.
        instruction: the text with which each of the user's messages begins, and which is not sanitized. "": there is
            none.
        seed: decides the draws, which anyone can repeat: a recipe has no secrets.
    """

    sanitizer: TokenTextSanitizer = field(repr=False)
    instruction: str
    seed: int

    @classmethod
    def of(
        cls, method: SanitizerMethod, reader: TokenReader, counts: NDArray[np.int64], instruction: str, seed: int
    ) -> ChatSanitizer:
        """Returns the sanitizer of a method over a model's tokens. `counts` (n,) says how often each token occurs."""
        sanitizer = method.with_reader(reader, counts)
        assert isinstance(sanitizer, TokenTextSanitizer)  # its reader is of tokens
        return cls(sanitizer, instruction, seed)

    def write(self, source: Path, out: Path) -> Path:
        """Writes a file's conversations to `out` with the user's text sanitized, unless `out` exists. Returns `out`."""
        if not out.is_file():
            report_path(out).unlink(missing_ok=True)  # of a run that was stopped between the two files
            row_format = RowFormat(
                "json", frozenset(), file_name=source.name, roles=USER_ROLES, instruction=self.instruction
            )
            sanitize_file(self.sanitizer, source, row_format, out, self.seed, {})
        return out

    def sent_prompt(self, tokenizer: Any, messages: Sequence[Message], max_tokens: int) -> SentPrompt:
        """Returns the prompt that is sent for a conversation.

        Raises CodecError if it has more than `max_tokens` tokens.
        """
        tokens = prompt.chat_tokens(tokenizer, messages, max_tokens, self.instruction)
        sent = tokens.replace_private(self._substitutes)
        is_private = tokens.is_private
        unchanged = sent[is_private] == tokens.ids[is_private]
        return SentPrompt(sent, int(is_private.sum()), int(unchanged.sum()))

    def _substitutes(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the substitutes of these tokens, whatever stands around them."""
        return self.sanitizer.sanitizer.sanitize(ids, Stream.of_seed("prompts", self.seed, ids.tobytes()))


def token_counts(reader: TokenReader, examples: Sequence[Example], instruction: str) -> NDArray[np.int64]:
    """Returns (n,) how often each of the model's tokens occurs in the users' messages, without the instruction."""
    user_texts = (
        message["content"] for example in examples for message in example.messages if message["role"] == "user"
    )
    return reader.counts(text.removeprefix(instruction) for text in user_texts)
