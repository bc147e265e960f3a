"""How long work says how far it is. One set of types, so that any part can be watched by any other.

`Progress` receives how much more is done (rows, bytes, texts), `Stage` names a part of the work and its size and
returns a `Progress`, `Log` receives a line of words. Size 0: unknown; the stage is over at the first call.
"""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int], None]
Stage = Callable[[str, int], Progress]
Log = Callable[[str], None]


def no_progress(amount: int) -> None:
    """Receives how much more is done, and says nothing."""


def no_stage(name: str, size: int) -> Progress:
    """A stage that nobody watches."""
    return no_progress


def no_log(words: str) -> None:
    """Receives a line of words, and drops it."""
