"""Names tokens where OpenAI's API does: log-probabilities with real token texts, biases by the tokenizer's ids.

The engine sees scrambled ids for both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from milkglass.client.codec.codec import Codec
from milkglass.engines.engine import IdLogprob
from milkglass.errors import UsageError

BYTE_TOKEN_PATTERN = re.compile(r"<0x([0-9A-F]{2})>")  # a token of SentencePiece for one byte
SPACE_SIGN = "\u2581"  # how SentencePiece writes a space


@dataclass(frozen=True)
class NamedLogprob:
    """Holds the text of a token and its log-probability.

    Attributes:
        token: the token's text, in which bytes that are no character are replaced.
        text_bytes: the bytes of the text.
        logprob: the natural logarithm of the token's probability.
    """

    token: str
    text_bytes: bytes
    logprob: float

    def document(self) -> dict[str, Any]:
        """Returns the entry in OpenAI's format for chats."""
        return {"token": self.token, "logprob": self.logprob, "bytes": list(self.text_bytes)}


@dataclass(frozen=True)
class TokenNames:
    """Translates between scrambled ids and the tokens that applications know.

    Attributes:
        codec: the codec of the key.
    """

    codec: Codec

    def token_bytes(self, original_id: int) -> bytes:
        """Returns the bytes that a token adds to a text, or its name if it has no text."""
        token: str = self.codec.tokenizer.convert_ids_to_tokens(original_id) or ""
        if token in self.codec.tokenizer.added_tokens_encoder:
            return token.encode()
        byte_of_letter = self.codec.tokenizer.byte_of_letter
        if byte_of_letter is not None and all(letter in byte_of_letter for letter in token):
            return bytes(byte_of_letter[letter] for letter in token)
        if byte := BYTE_TOKEN_PATTERN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        if SPACE_SIGN in token:
            return token.replace(SPACE_SIGN, " ").encode()
        return self.codec.tokenizer.decode([original_id], clean_up_tokenization_spaces=False).encode()

    def name_all(self, entries: Sequence[IdLogprob]) -> list[NamedLogprob]:
        """Returns the entries in order. Several ids of one token become one entry with their probabilities added."""
        logprobs: dict[int, float] = {}
        for entry in entries:
            original_id = int(self.codec.inverse[entry.id])
            previous = logprobs.get(original_id)
            logprobs[original_id] = entry.logprob if previous is None else float(np.logaddexp(previous, entry.logprob))
        named_logprobs = []
        for original_id, logprob in logprobs.items():
            text_bytes = self.token_bytes(original_id)
            named_logprobs.append(NamedLogprob(text_bytes.decode("utf-8", "replace"), text_bytes, logprob))
        return named_logprobs

    def drawn_and_best(self, entries: Sequence[IdLogprob]) -> tuple[NamedLogprob, list[NamedLogprob]]:
        """Returns the token that was drawn, and the likeliest ones, from entries in this order."""
        return self.name_all(entries[:1])[0], self.name_all(entries[1:])

    def biases(self, bias_by_token: Mapping[int, float]) -> dict[int, float]:
        """Returns biases by scrambled id for biases by the tokenizer's id. Raises UsageError for an unknown id."""
        is_known = self.codec.is_token
        if unknown_tokens := [token for token in bias_by_token if token >= len(is_known) or not is_known[token]]:
            raise UsageError(
                f"logit_bias names id {unknown_tokens[0]}, which the tokenizer does not have", "give its own ids"
            )
        choices = self.codec.alias_choices
        scrambled_biases: dict[int, float] = {}
        for token, bias in bias_by_token.items():
            start = 0 if choices is None else int(choices.starts[token])
            alias_ids = () if choices is None else choices.ids[start : start + int(choices.counts[token])].tolist()
            scrambled_biases |= {int(scrambled): bias for scrambled in alias_ids or [self.codec.sigma[token]]}
        return scrambled_biases
