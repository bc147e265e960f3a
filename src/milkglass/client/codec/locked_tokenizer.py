"""A tokenizer that several threads use: one of them at a time.

A fast tokenizer keeps settings between calls, among them whether special tokens are read in a text. A call sets them
and then reads the text. Without a lock, the settings of one thread would hold for another thread's text.
"""

from __future__ import annotations

import threading
from typing import Any


class LockedTokenizer:
    """Everything of a tokenizer; what reads or writes a text waits for its turn."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._lock = tokenizer, threading.RLock()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            return self._tokenizer(*arguments, **options)

    def decode(self, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            return self._tokenizer.decode(*arguments, **options)

    def batch_decode(self, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            return self._tokenizer.batch_decode(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
