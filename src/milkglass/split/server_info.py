"""What a server says of its half, `GET /v1/split`: what it takes, and its limits.

Both sides read this page. A server is not trusted, so that what arrives is checked like everything else of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from milkglass.errors import RemoteError

MAX_TEXTS = 256  # of one frame
MAX_BODY = 64 << 20  # bytes of one frame
SPARE = 4096  # bytes of a frame that are no states: its header, and about
MOST = 1 << 40  # a number that a server says is no larger


@dataclass(frozen=True)
class ServerInfo:
    """layer, pooled: see `threat.Activations`. width: of a state. classes: how many. max_length: tokens of one text.
    weights: SHA-256 of the half's weights, in hex. max_texts, max_body: of one frame, the latter in bytes."""

    method: str
    layer: int
    pooled: bool
    width: int
    classes: int
    max_length: int
    weights: str
    max_texts: int = MAX_TEXTS
    max_body: int = MAX_BODY

    @property
    def max_rows(self) -> int:
        """States of one frame, where each text's length takes 8 bytes more."""
        return max(1, (self.max_body - SPARE - 8 * self.max_texts) // (4 * self.width))

    def document(self) -> dict[str, Any]:
        return {"object": "split", **asdict(self)}

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> ServerInfo:
        """From what a server answered; entries that are not known are left out. Raises RemoteError."""
        result = {one.name: raw.get(one.name) for one in fields(cls)}
        kinds = {"str": str, "int": int, "bool": bool}
        for one in fields(cls):
            value = result[one.name]
            if type(value) is not kinds[str(one.type)] or (isinstance(value, int) and not 0 <= value <= MOST):
                raise RemoteError(
                    f"the server says nothing of use of its {one.name}", "is `milkglass split serve` there?"
                )
        info = cls(**result)  # type: ignore[arg-type]
        if min(info.width, info.max_texts, info.max_length) < 1:
            raise RemoteError("the server takes no text at all", "is `milkglass split serve` there?")
        return info
