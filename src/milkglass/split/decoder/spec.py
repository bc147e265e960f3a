"""What both sides agree on: `GET /v1/split` of a decoder, and the first message of a stream.

Both sides use this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from pydantic import Field

from milkglass.errors import RemoteError
from milkglass.server.http.strict_json import RequestBody
from milkglass.server.inference.sampling import SamplingParams

STREAM = "/v1/split/stream"
PATH = "/v1/split"
Dtype = Literal["bfloat16", "float16", "float32"]
MOST = 1 << 40
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
        max_beams: rows of a beam search.
        sessions: that may be open at a time.
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
        kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
        for one in fields(cls):
            value = raw.get(one.name)
            right = isinstance(value, kinds[str(one.type)]) and not isinstance(value, bool)
            if not right or (not isinstance(value, str) and not 0 <= value <= MOST):  # type: ignore[operator]
                raise RemoteError(f"the server's answer has no usable {one.name}", HINT)
        info = cls(**{one.name: raw[one.name] for one in fields(cls)})
        if min(info.width, info.vocabulary, info.max_length) < 1 or info.dtype not in get_args(Dtype):
            raise RemoteError("the server's limits allow no text", HINT)
        return info


class OpenRequest(RequestBody):
    """The first message of a stream: a new session, or one to go on with. Names and limits as of /v1/completions."""

    dtype: Dtype = "bfloat16"
    max_tokens: int = Field(16, ge=1, lt=2**31, strict=True)
    temperature: float = Field(0.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**63)
    beams: int = Field(1, ge=1, le=64, strict=True)
    resume: str | None = Field(None, min_length=1, max_length=128)  # the secret name of a session
    received: int = Field(0, ge=0, lt=2**32, strict=True)  # frames of ids that the client has

    def sampling(self, ends: frozenset[int]) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_p, max(0, self.top_k), self.seed, self.max_tokens, ends)
