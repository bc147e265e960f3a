"""Text in, text out, over an enclave and a split decoder: what `milkglass generate --split` and programs use.

The other layers are run by `milkglass split serve`, or by a stock engine that takes vectors as a prompt (engines.py).

The prompt is sanitized in the enclave. The answer's ids, hence its text, are readable by the server in this mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from milkglass.client.codec.conversation import Message
from milkglass.client.codec.streaming import StreamDecoder
from milkglass.client.results import Answer, Conversation
from milkglass.enclave.enclave import Enclave, SanitizedPrompt
from milkglass.enclave.lists import RnmSettings
from milkglass.errors import KeyForOtherModel
from milkglass.split.decoder.client import RowOf, SplitSampling
from milkglass.split.decoder.frames import DTYPES
from milkglass.split.spec import DecoderInfo

READABLE = "the server reads the answer: nothing but the prompt can be sanitized (CMIF has no way around this)"
HALF = {"float32": "float16"}  # how vectors of a table in fp32 cross, unless fp32 is asked for


class IdStream(Protocol):
    """One prompt and its answer.

    Attributes:
        sent: bytes that were sent.
        received: bytes that came.
    """

    sent: int
    received: int

    def ids(self, prompt: torch.Tensor, row_of: RowOf) -> Iterator[int]:
        """The ids of the answer, as they come. row_of: gives the vector of an id, where the server wants it."""
        ...


class VectorServer(Protocol):
    """What runs the other layers: `DecoderServer` or `PromptEmbedsEngine`."""

    def stream(self, info: DecoderInfo, sampling: SplitSampling, dtype: str) -> IdStream: ...


@dataclass
class SplitText:
    """An enclave and a server of one model.

    Attributes:
        enclave: open.
        server: where the other layers are.
        info: what the server takes.
        settings: of the sanitizer.
        exact: whether vectors cross in the table's own type, even if that is fp32.
        streams: of all prompts so far, the newest last.
    """

    enclave: Enclave
    server: VectorServer
    info: DecoderInfo
    settings: RnmSettings
    exact: bool = False
    streams: list[IdStream] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.enclave.about["table"] != self.info.table:
            raise KeyForOtherModel(
                "the server has another model than this enclave", "build the enclave for this server"
            )

    def prompt(self, text: str, instruction: str, sampling: SplitSampling) -> SanitizedPrompt:
        """Plain text to continue. Raises CodecError, EnclaveError."""
        return self.enclave.text(text, instruction, self._room(sampling), self.settings)

    def conversation(
        self, messages: Sequence[Message], sampling: SplitSampling, instruction: str = ""
    ) -> SanitizedPrompt:
        """A conversation in the model's chat template. instruction: what is not sanitized where a message begins so."""
        return self.enclave.chat(messages, self._room(sampling), self.settings, instruction)

    def _room(self, sampling: SplitSampling) -> int:
        """Tokens that a prompt may have. Raises UsageError for an answer that the server does not make."""
        sampling.require(self.info)
        return self.info.max_length - sampling.max_tokens

    def ids(self, prompt: SanitizedPrompt, sampling: SplitSampling) -> Iterator[int]:
        """The ids of the answer as they come. Raises RemoteError, EnclaveError."""
        dtype = self.info.dtype if self.exact else HALF.get(self.info.dtype, self.info.dtype)
        stream = self.server.stream(self.info, sampling, dtype)
        self.streams.append(stream)
        return stream.ids(self._vectors(prompt.vectors, dtype), lambda one: self._row(one, dtype))

    def text(self, prompt: SanitizedPrompt, sampling: SplitSampling) -> Iterator[str]:
        """The answer's text, a piece at a time that no later id can change."""
        decoder = StreamDecoder(
            lambda ids: [int(one) for one in ids], self.enclave.decode, self.enclave.about["by_byte"]
        )
        for one in self.ids(prompt, sampling):
            if piece := decoder.push([one]):
                yield piece
        if piece := decoder.flush():
            yield piece

    def chat(self, system: str | None, sampling: SplitSampling) -> Conversation:
        """A conversation that can be gone on with. Each turn sends all of it; a message has the same substitutes in
        each."""

        def ask(turns: list[Message]) -> Answer:
            prompt = self.conversation(turns, sampling)
            return Answer(self.text(prompt, sampling), prompt.tokens)

        return Conversation(ask, [{"role": "system", "content": system}] if system else [])

    def _row(self, token: int, dtype: str) -> torch.Tensor:
        return self._vectors(self.enclave.rows((token,)), dtype)

    def _vectors(self, content: bytes, dtype: str) -> torch.Tensor:
        """Bytes of (t, d) in the table's type, as the type that crosses."""
        stored: Any = DTYPES[self.info.dtype]
        return torch.frombuffer(bytearray(content), dtype=stored).reshape(-1, self.info.width).to(DTYPES[dtype])
