"""What passes through the proxy, for those who count it: under the key, and on the page that shows what crosses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[Any]


class Observer(Protocol):
    """Called in the event loop: it must not wait."""

    def sent(self, ids: Ids) -> None:
        """Scrambled ids of one text that is about to be sent."""

    def received(self, ids: Ids) -> None:
        """Scrambled ids of an answer, a few at a time."""


class Quiet:
    """Nothing is counted."""

    def sent(self, ids: Ids) -> None:
        pass

    def received(self, ids: Ids) -> None:
        pass
