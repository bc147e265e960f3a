"""Generates text with an enclave and a split decoder, for `milkglass generate --split` and for programs.

`milkglass split serve` runs the other layers, or a stock engine that takes vectors as a prompt (engines.py). The
enclave sanitizes the prompt. The server can read the answer's ids, hence its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from milkglass.client.codec.streaming import StreamDecoder
from milkglass.client.results import Answer, Conversation
from milkglass.enclave.enclave import Enclave, SanitizedPrompt
from milkglass.enclave.token_sanitizer import RnmSettings
from milkglass.errors import KeyForOtherModel
from milkglass.rows.messages import Message
from milkglass.split.decoder.client import SplitSampling, VectorOf
from milkglass.split.decoder.frames import DTYPES
from milkglass.split.spec import DecoderInfo

ANSWER_WARNING = "the server reads the answer: nothing but the prompt can be sanitized (CMIF has no way around this)"
NARROWER_DTYPE = {"float32": "float16"}  # the type in which vectors of an fp32 table are sent, unless `is_exact` is set


class IdStream(Protocol):
    """Sends one prompt and reads its answer, and counts the bytes that were sent and received."""

    sent_bytes: int
    received_bytes: int

    def ids(self, prompt: torch.Tensor, vector_of: VectorOf) -> Iterator[int]:
        """Yields the ids of the answer to a prompt (t, d).

        `vector_of` returns the vector (1, d) of an id; not every server calls it.
        """


class VectorServer(Protocol):
    """Runs the layers behind the embedding layer: `DecoderClient` or `PromptEmbedsEngine`."""

    def stream(self, info: DecoderInfo, sampling: SplitSampling, dtype: str) -> IdStream:
        """Returns a stream for one prompt whose vectors have type `dtype`."""


@dataclass
class SplitTextGenerator:
    """Generates text with an enclave and a server of one model.

    Attributes:
        enclave: the open enclave.
        server: runs the layers behind the embedding layer.
        info: what the server says of the model.
        settings: how prompts are sanitized.
        is_exact: whether vectors are sent in the table's own type, even if that is fp32.
        streams: the streams of all prompts so far, the newest last.
    """

    enclave: Enclave
    server: VectorServer
    info: DecoderInfo
    settings: RnmSettings
    is_exact: bool = False
    streams: list[IdStream] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.enclave.table_info["table"] != self.info.table:
            raise KeyForOtherModel(
                "the server has another model than this enclave", "build the enclave for this server"
            )

    def sanitize_text(self, text: str, instruction: str, sampling: SplitSampling) -> SanitizedPrompt:
        """Sanitizes a plain text that the model will continue. Raises CodecError, EnclaveError."""
        return self.enclave.sanitize_text(text, instruction, self._max_prompt_tokens(sampling), self.settings)

    def sanitize_chat(
        self, messages: Sequence[Message], sampling: SplitSampling, instruction: str = ""
    ) -> SanitizedPrompt:
        """Sanitizes what users say in a conversation, in the model's chat template.

        An instruction with which a message of the user begins is not sanitized.

        Raises CodecError, EnclaveError.
        """
        return self.enclave.sanitize_chat(messages, self._max_prompt_tokens(sampling), self.settings, instruction)

    def _max_prompt_tokens(self, sampling: SplitSampling) -> int:
        """Returns how many tokens a prompt may have. Raises UsageError for an answer that the server does not make."""
        sampling.require_supported(self.info)
        return self.info.max_length - sampling.max_tokens

    def generate_ids(self, prompt: SanitizedPrompt, sampling: SplitSampling) -> Iterator[int]:
        """Returns the ids of the answer, as they come. Iteration raises RemoteError, EnclaveError."""
        dtype = self.info.dtype if self.is_exact else NARROWER_DTYPE.get(self.info.dtype, self.info.dtype)
        stream = self.server.stream(self.info, sampling, dtype)
        self.streams.append(stream)
        return stream.ids(self._vectors(prompt.vectors, dtype), lambda token: self._row(token, dtype))

    def generate_text(self, prompt: SanitizedPrompt, sampling: SplitSampling) -> Iterator[str]:
        """Yields the answer's text in pieces that no later id can change."""
        decoder = StreamDecoder(
            lambda ids: [int(token) for token in ids], self.enclave.decode, self.enclave.table_info["by_byte"]
        )
        for token in self.generate_ids(prompt, sampling):
            if piece := decoder.push([token]):
                yield piece
        if piece := decoder.flush():
            yield piece

    def chat(self, system: str | None, sampling: SplitSampling) -> Conversation:
        """Starts a conversation, whose first message is `system` if it is not empty.

        Each turn sends the whole conversation; a message gets the same substitutes each time.
        """

        def ask(turns: list[Message]) -> Answer:
            prompt = self.sanitize_chat(turns, sampling)
            return Answer(self.generate_text(prompt, sampling), prompt.token_count)

        return Conversation(ask, [{"role": "system", "content": system}] if system else [])

    def _row(self, token: int, dtype: str) -> torch.Tensor:
        """Returns the vector (1, d) of an id."""
        return self._vectors(self.enclave.vectors((token,)), dtype)

    def _vectors(self, content: bytes, dtype: str) -> torch.Tensor:
        """Returns the vectors (t, d) of `content`, which is in the table's type, as `dtype`."""
        table_dtype: Any = DTYPES[self.info.dtype]
        return torch.frombuffer(bytearray(content), dtype=table_dtype).reshape(-1, self.info.width).to(DTYPES[dtype])
