"""What passes through the proxy, for those who count it: under the key, and on the page that shows what crosses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[Any]
Received = Callable[[Ids], None]  # called with scrambled ids of an answer, a few at a time


def unheard(ids: Ids) -> None:
    """Nothing is counted."""


class Observer(Protocol):
    """Called in the event loop: it must not wait."""

    def sent(self, ids: Ids) -> Received:
        """Scrambled ids of one text that is about to be sent; returns what is called with its answer."""


class Quiet:
    """Nothing is counted."""

    def sent(self, ids: Ids) -> Received:
        return unheard


@dataclass(frozen=True)
class Several:
    """Attributes: observers: that are all called, in order."""

    observers: Sequence[Observer]

    def sent(self, ids: Ids) -> Received:
        called = [one.sent(ids) for one in self.observers]

        def received(ids: Ids) -> None:
            for one in called:
                one(ids)

        return received
