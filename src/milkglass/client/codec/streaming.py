"""Decodes token ids to text as they arrive, without showing text that may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from numpy.typing import NDArray


@dataclass
class StreamDecoder:
    """Decodes ids as they arrive, and shows no text that a later id could change.

    It decodes only a short window of ids at a time; the first `_shown_length` characters of the window's text are shown
    already. A final U+FFFD may be a character whose last bytes are still to come, so it is held back.

    Attributes:
        to_visible_ids: returns the original ids of scrambled ones, without those that have no text.
        decode: returns the text of original ids.
        replaces_each_byte: whether the tokenizer writes one U+FFFD for each byte of a broken run of bytes, as a
            byte-fallback decoder does. Others write one for each broken character.
    """

    to_visible_ids: Callable[[Sequence[int] | NDArray[Any]], list[int]]
    decode: Callable[[list[int]], str]
    replaces_each_byte: bool
    _window: list[int] = field(default_factory=list, repr=False)
    _context_count: int = 0  # this many of the window's ids are context, shown in full
    _shown_length: int = 0

    MAX_WINDOW: ClassVar[int] = 64  # most ids without a clean end: garbage bytes, or ids that end inside a character
    KEPT_IDS: ClassVar[int] = 4  # enough ids to hold the start of an unfinished character, which has at most 4 bytes

    def push(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Adds scrambled ids, and returns the text that became certain."""
        self._window += self.to_visible_ids(ids)
        if len(self._window) == self._context_count:
            return ""
        text = self.decode(self._window)
        certain = self._certain_part(text)
        shown_text = self._show(certain)
        if len(certain) == len(text):
            self._drop_before(self._context_count, has_shown_all=True)
        elif len(self._window) > self.MAX_WINDOW:
            if self.replaces_each_byte:  # a run of lone bytes is all invalid: no later id repairs it
                shown_text += self._show(text)
            self._drop_before(len(self._window) - self.KEPT_IDS, has_shown_all=self.replaces_each_byte)
        return shown_text

    @property
    def is_clean(self) -> bool:
        """Returns whether all text so far is shown, but for a sign after MAX_WINDOW ids without a clean end."""
        return self._context_count == len(self._window)

    def flush(self) -> str:
        """Returns the text that was held back, and begins anew."""
        held_back = self._show(self.decode(self._window)) if self._window else ""
        self._window, self._context_count, self._shown_length = [], 0, 0
        return held_back

    def _certain_part(self, text: str) -> str:
        return text.rstrip("\ufffd") if self.replaces_each_byte else text.removesuffix("\ufffd")

    def _show(self, text: str) -> str:
        """Returns the part of the window's text that was not shown yet, and counts it as shown."""
        new_text = text[self._shown_length :]
        self._shown_length = max(self._shown_length, len(text))
        return new_text

    def _drop_before(self, start: int, has_shown_all: bool) -> None:
        """Drops ids before `start` from the window, and counts how much of the remaining text is shown.

        Decoders treat a text's first id specially, so some context stays; a context without text would not help.

        Args:
            has_shown_all: whether all text of the window was shown.
        """
        window = self._window[start:]
        text = self.decode(window)
        if text or not has_shown_all:
            self._window = window
            self._shown_length = len(text if has_shown_all else self._certain_part(text))
        self._context_count = len(self._window)
