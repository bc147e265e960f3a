"""Defines the protocol of a split model: the answer to `GET /v1/split`, its limits, and the first message to a decoder.

The client does not trust the server, and checks its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from milkglass.errors import RemoteError
from milkglass.server.http.routing import RequestBody
from milkglass.server.inference.sampling import SamplingParams

SPLIT_PATH, STREAM_PATH = "/v1/split", "/v1/split/stream"
Dtype = Literal["bfloat16", "float16", "float32"]
MAX_TEXTS = 256  # texts of one frame
MAX_FRAME_BYTES = 64 << 20
MAX_FRAME_OVERHEAD_BYTES = 4096  # bytes that a frame may have besides its states: the header and `about`
MAX_COUNT = 1 << 40  # the largest number that is accepted from a server
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
ENCODER_HINT = "is `milkglass split serve` there?"
DECODER_HINT = "is `milkglass split serve` of a decoder there?"


@dataclass(frozen=True, config=ConfigDict(strict=True))
class EncoderInfo:
    """Describes an encoder's server half: the answer to `GET /v1/split`, whose JSON has these field names.

    Attributes:
        method: the name of the defence by which the client half disturbs its states.
        layer: the number of layers in the client half.
        pooled: whether a text is sent as one state.
        width: the number of dimensions of a state.
        classes: the number of classes.
        max_length: the most tokens of a text.
        weights: SHA-256 of the half's weights, in hex.
        max_texts: the most texts of a frame.
        max_body: the most bytes of a frame.
    """

    method: str
    layer: Count
    pooled: bool
    width: Count
    classes: Count
    max_length: Count
    weights: str
    max_texts: Count = MAX_TEXTS
    max_body: Count = MAX_FRAME_BYTES

    @property
    def max_states(self) -> int:
        """Returns the most states of a frame, of which each number takes 4 bytes and the length of a text 8."""
        return max(1, (self.max_body - MAX_FRAME_OVERHEAD_BYTES - 8 * self.max_texts) // (4 * self.width))

    def document(self) -> dict[str, Any]:
        """Returns the body of the answer, as a JSON object."""
        return {"object": "split", **asdict(self)}

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> EncoderInfo:
        """Reads a server's answer and ignores unknown entries. Raises RemoteError."""
        info = _validated_info(cls, answer, ENCODER_HINT)
        if min(info.width, info.max_texts, info.max_length) < 1:
            raise RemoteError("the server's limits allow no text", ENCODER_HINT)
        return info


@dataclass(frozen=True, config=ConfigDict(strict=True))
class DecoderInfo:
    """Describes a server of a decoder without its embedding layer: the answer to `GET /v1/split`, with these fields.

    Attributes:
        model: the provider's name for the model.
        width: the number of dimensions of a vector.
        vocabulary: the number of rows of the table.
        max_length: the most tokens of a prompt and its answer.
        max_new_tokens: the most tokens of an answer.
        sessions: the most sessions that are open at a time.
        table: SHA-256 of the embedding table, in hex.
        dtype: the stored type of the table. Vectors of this type are sent without loss.
    """

    model: str
    width: Count
    vocabulary: Count
    max_length: Count
    max_new_tokens: Count
    sessions: Count
    table: str
    dtype: str

    def document(self) -> dict[str, Any]:
        """Returns the body of the answer, as a JSON object."""
        return {"object": "split.decoder", **asdict(self)}

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> DecoderInfo:
        """Reads a server's answer and ignores unknown entries. Raises RemoteError."""
        info = _validated_info(cls, answer, DECODER_HINT)
        if min(info.width, info.vocabulary, info.max_length) < 1 or info.dtype not in get_args(Dtype):
            raise RemoteError("the server's limits allow no text", DECODER_HINT)
        return info


Info = TypeVar("Info", EncoderInfo, DecoderInfo)


class OpenRequest(RequestBody):
    """Describes the client's first message on a stream: the vectors' type, and how tokens are drawn.

    The fields for drawing tokens are those of /v1/completions.
    """

    dtype: Dtype = "bfloat16"
    max_tokens: int = Field(16, ge=1, lt=2**31, strict=True)
    temperature: float = Field(0.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**63)

    def sampling(self, stop_ids: frozenset[int]) -> SamplingParams:
        """Returns the engine's parameters for drawing tokens. One of `stop_ids` ends an answer."""
        return SamplingParams(self.temperature, self.top_p, max(0, self.top_k), self.seed, self.max_tokens, stop_ids)


def _validated_info(info_class: type[Info], answer: Mapping[str, Any], hint: str) -> Info:
    """Reads a server's answer into a class. Raises RemoteError, with `hint`, for an entry that is not valid."""
    entries: dict[str, Any] = {field.name: answer.get(field.name) for field in fields(info_class)}
    try:
        return info_class(**entries)
    except ValidationError as error:
        raise RemoteError(f"the server's answer has no usable {error.errors()[0]['loc'][0]}", hint) from None
