"""What both sides agree on: `GET /v1/split` of a decoder, and the first message of a stream.

Both sides use this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pydantic import Field

from milkglass.errors import RemoteError
from milkglass.server.http.strict_json import RequestBody
from milkglass.server.inference.sampling import SamplingParams
from milkglass.split.server_info import checked

STREAM = "/v1/split/stream"
PATH = "/v1/split"
Dtype = Literal["bfloat16", "float16", "float32"]
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
        sessions: that may be open at a time.
        table: SHA-256 of the embedding table, in hex.
        dtype: of the table as it is stored; vectors cross losslessly in it.
    """

    model: str
    width: int
    vocabulary: int
    max_length: int
    max_new_tokens: int
    sessions: int
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


class OpenRequest(RequestBody):
    """The first message of a stream. Names and limits as of /v1/completions."""

    dtype: Dtype = "bfloat16"
    max_tokens: int = Field(16, ge=1, lt=2**31, strict=True)
    temperature: float = Field(0.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**63)

    def sampling(self, ends: frozenset[int]) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_p, max(0, self.top_k), self.seed, self.max_tokens, ends)
