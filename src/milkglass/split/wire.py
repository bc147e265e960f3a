"""The client's connection to a split server: frames out, logits back. Answers are not trusted.

Out of scope: texts, secrets, methods.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.remote.connection import Connection
from milkglass.errors import RemoteError
from milkglass.split.server_info import HINT, PATH, ServerInfo

HEADERS = {"Content-Type": "application/octet-stream"}


class Wire:
    """One server. Closes with the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def info(self) -> ServerInfo:
        return ServerInfo.of(self._connection.json("GET", PATH))

    def answer(self, frame: bytes) -> NDArray[np.float32]:
        """(texts, outputs). The same bytes may cross again where an answer was lost: nothing is drawn anew."""
        result = self._connection.json("POST", PATH, again=True, content=frame, headers=HEADERS)
        return _logits(result.get("logits"))


def _logits(raw: Any) -> NDArray[np.float32]:
    """Raises RemoteError unless it is a table of finite numbers."""
    try:
        logits = np.asarray(raw, np.float64).astype(np.float32)
    except (TypeError, ValueError, OverflowError):
        logits = np.empty(0, np.float32)
    if logits.ndim != 2 or not logits.size or not np.isfinite(logits).all():
        raise RemoteError("the answer is not a table of numbers", HINT)
    return logits
