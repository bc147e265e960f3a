"""What both sides agree on: `GET /v1/split` of a decoder, and the first message of a stream.

Both sides use this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from milkglass.errors import RemoteError
from milkglass.server.http.strict_json import RequestBody
from milkglass.server.inference.beam_search import BeamParams
from milkglass.server.inference.sampling import SamplingParams
from milkglass.split.server_info import checked

STREAM = "/v1/split/stream"
PATH = "/v1/split"
Dtype = Literal["bfloat16", "float16", "float32"]
MAX_BEAMS = 16
PENALTY = 10.0  # the largest exponent: |y| to this power is still a number
HINT = "is `milkglass split serve` of a decoder there?"


@dataclass(frozen=True)
class DecoderInfo:
    """What a server of a decoder without its embedding layer takes.

    Attributes:
        model: the name that the provider gave.
        width: of a vector.
        vocabulary: rows of the table.
        max_length: tokens of a prompt and its answer.
        max_new_tokens: tokens of an answer.
        max_beams: rows of a beam search; 1: there is none.
        sessions: that may be open at a time; one of a beam search counts as its beams.
        resume: seconds that a session waits for its client after the connection was lost.
        table: SHA-256 of the embedding table, in hex.
        dtype: of the table as it is stored; vectors cross losslessly in it.
    """

    model: str
    width: int
    vocabulary: int
    max_length: int
    max_new_tokens: int
    max_beams: int
    sessions: int
    resume: float
    table: str
    dtype: str

    def document(self) -> dict[str, Any]:
        return {"object": "split.decoder", **asdict(self)}

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> DecoderInfo:
        """From a server's answer; unknown entries are ignored. Raises RemoteError."""
        info = cls(**checked(cls, raw, HINT))
        if min(info.width, info.vocabulary, info.max_length) < 1 or info.dtype not in get_args(Dtype):
            raise RemoteError("the server's limits allow no text", HINT)
        return info


def refused_beams(beams: int, temperature: float, length_penalty: float, early_stopping: bool) -> str:
    """What does not go with a beam search, or without one; "" where all of it does."""
    if beams > 1 and temperature > 0:
        return f"temperature is {temperature:g}, a beam search takes 0: it draws nothing"
    if beams == 1 and (length_penalty != 1.0 or early_stopping):
        return "length_penalty and early_stopping need beams of 2 or more"
    return ""


class OpenRequest(RequestBody):
    """The first message of a stream: a new session, or one to go on with. Names and limits as of /v1/completions."""

    dtype: Dtype = "bfloat16"
    max_tokens: int = Field(16, ge=1, lt=2**31, strict=True)
    temperature: float = Field(0.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**63)
    beams: int = Field(1, ge=1, le=MAX_BEAMS, strict=True)  # 1: none; otherwise a beam search
    length_penalty: float = Field(1.0, ge=-PENALTY, le=PENALTY)
    early_stopping: bool = Field(False, strict=True)
    resume: str | None = Field(None, min_length=1, max_length=128)  # the secret name of a session
    received: int = Field(0, ge=0, lt=2**32, strict=True)  # frames of ids that the client has

    @model_validator(mode="after")
    def _beams_alone(self) -> Self:
        wrong = refused_beams(self.beams, self.temperature, self.length_penalty, self.early_stopping)
        if wrong:
            raise PydanticCustomError("beams", wrong)  # type: ignore[arg-type]  # pydantic wants a literal
        return self

    def search(self, ends: frozenset[int]) -> BeamParams:
        return BeamParams(self.beams, self.max_tokens, ends, self.length_penalty, self.early_stopping)

    def sampling(self, ends: frozenset[int]) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_p, max(0, self.top_k), self.seed, self.max_tokens, ends)
