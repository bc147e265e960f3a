"""Decodes token ids to text as they arrive, without showing text that may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from numpy.typing import NDArray


@dataclass
class StreamDecoder:
    """Decodes ids as they arrive, and shows no text that a later id could change.

    It decodes only a short window of ids at a time; the first `_shown` characters of the window's text are shown
    already. A final U+FFFD may be a character whose last bytes are still to come, so it is held back.
    """

    visible: Callable[[Sequence[int] | NDArray[Any]], list[int]]  # scrambled ids -> the original ones that have text
    text: Callable[[list[int]], str]  # original ids -> text
    by_byte: bool  # a byte-fallback decoder replaces every byte of a broken run; others each broken character, by one
    _window: list[int] = field(default_factory=list, repr=False)
    _read: int = 0  # this many of the window's ids are context, shown in full
    _shown: int = 0

    MAX_WINDOW: ClassVar[int] = 64  # most ids without a clean end: garbage bytes, or ids that end inside a character
    KEPT_IDS: ClassVar[int] = 4  # enough ids to hold the start of an unfinished character, which has at most 4 bytes

    def push(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Adds scrambled ids, and returns the text that became certain."""
        self._window += self.visible(ids)
        if len(self._window) == self._read:
            return ""
        text = self.text(self._window)
        certain = self._certain(text)
        shown = self._show(certain)
        if len(certain) == len(text):
            self._move(self._read, is_complete=True)
        elif len(self._window) > self.MAX_WINDOW:
            if self.by_byte:  # a run of lone bytes is all invalid: no later id repairs it
                shown += self._show(text)
            self._move(len(self._window) - self.KEPT_IDS, is_complete=self.by_byte)
        return shown

    @property
    def is_clean(self) -> bool:
        """Returns whether all text so far is shown."""
        return self._read == len(self._window)

    def flush(self) -> str:
        """Returns the text that was held back, at the end."""
        held_back = self._show(self.text(self._window)) if self._window else ""
        self._window, self._read, self._shown = [], 0, 0
        return held_back

    def _certain(self, text: str) -> str:
        return text.rstrip("\ufffd") if self.by_byte else text.removesuffix("\ufffd")

    def _show(self, text: str) -> str:
        fresh = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return fresh

    def _move(self, start: int, is_complete: bool) -> None:
        """Drops ids before `start`, and counts how much of the rest's text is shown.

        Decoders treat a text's first id specially, so some context stays; a context without text would not help.
        """
        window = self._window[start:]
        text = self.text(window)
        if text or not is_complete:
            self._window = window
            self._shown = len(text if is_complete else self._certain(text))
        self._read = len(self._window)
