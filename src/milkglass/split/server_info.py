"""What a server's half takes, and its limits: `GET /v1/split`.

Both sides use this file. The server is not trusted: its answer is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from milkglass.errors import RemoteError

PATH = "/v1/split"
MAX_TEXTS = 256  # of one frame
MAX_BODY = 64 << 20  # bytes of one frame
SPARE = 4096  # bytes of a frame besides the states: its header, and `about`
MOST = 1 << 40  # the largest number that is accepted from a server
HINT = "is `milkglass split serve` there?"


@dataclass(frozen=True)
class ServerInfo:
    """What the server's half takes.

    Attributes:
        layer: see `threat.observations.Activations`.
        pooled: likewise.
        width: of a state.
        classes: how many.
        max_length: tokens of one text.
        weights: SHA-256 of the half's weights, in hex.
        max_texts: of one frame.
        max_body: of one frame, in bytes.
    """

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
        """From a server's answer; unknown entries are ignored. Raises RemoteError."""
        info = cls(**checked(cls, raw, HINT))
        if min(info.width, info.max_texts, info.max_length) < 1:
            raise RemoteError("the server's limits allow no text", HINT)
        return info


def checked(kind: type, raw: Mapping[str, Any], hint: str) -> dict[str, Any]:
    """The entries of a server's answer that a dataclass of plain fields takes. Raises RemoteError for one that is
    missing, of another type, or a number out of bounds."""
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}
    for one in fields(kind):
        value: Any = raw.get(one.name)
        if type(value) not in kinds[str(one.type)] or (not isinstance(value, str) and not 0 <= value <= MOST):
            raise RemoteError(f"the server's answer has no usable {one.name}", hint)
    return {one.name: raw[one.name] for one in fields(kind)}
