"""Finds stop strings in text that arrives in pieces. Text that may begin one is held back.

The engine never sees them; it is asked to end at token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class StopStrings:
    """Text that arrives in pieces, up to the first stop string.

    Attributes:
        stops: none of them empty.
        found: whether one was found. Nothing more comes out then.
    """

    stops: Sequence[str]
    found: bool = False
    _held: str = ""

    def push(self, text: str) -> str:
        """Adds text, and returns what became certain."""
        if self.found or not self.stops:
            return "" if self.found else text
        self._held += text
        places = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            fresh, self._held = self._held[: min(places)], ""
            return fresh
        keep = max(unfinished(self._held, stop) for stop in self.stops)
        cut = len(self._held) - keep
        fresh, self._held = self._held[:cut], self._held[cut:]
        return fresh

    def flush(self) -> str:
        """Returns what was held back, at the end."""
        fresh, self._held = self._held, ""
        return fresh


def unfinished(text: str, mark: str) -> int:
    """Returns how many characters at the end of `text` may be the beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)
