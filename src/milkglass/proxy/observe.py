"""Observers receive the ids that the proxy sends and receives: one counts them, another shows them on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[Any]
Received = Callable[[Ids], None]  # called with scrambled ids of an answer, a few at a time


def unheard(ids: Ids) -> None:
    """Ignores the ids of an answer."""


class Observer(Protocol):
    """Receives ids in the event loop. It must not wait."""

    def sent(self, ids: Ids) -> Received:
        """Takes the scrambled ids of a text that is about to be sent, and returns the receiver of its answer's ids."""


class NoObserver:
    """Ignores all ids."""

    def sent(self, ids: Ids) -> Received:
        return unheard


@dataclass(frozen=True)
class Observers:
    """Several observers, which are called in order."""

    observers: Sequence[Observer]

    def sent(self, ids: Ids) -> Received:
        called = [one.sent(ids) for one in self.observers]

        def received(ids: Ids) -> None:
            for one in called:
                one(ids)

        return received
