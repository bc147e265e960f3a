"""A model's own tokenizer: loaded from its folder alone, how many tokens the model and it take, and a lock for threads.

Out of scope: keys, texts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.errors import CodecError, CorruptCheckpoint, ModelError
from milkglass.models.checkpoint import read_model_json, require_readable
from milkglass.models.families import family_of
from milkglass.models.tokenizer_parts import require_known_parts
from milkglass.sequences import Ids


def load_tokenizer(folder: Path, provider: bool = False) -> Any:
    """Load a folder's fast tokenizer.

    Args:
        folder: Its tokenizer.json is read, and no other place.
        provider: Whether the folder came from a provider that must not read the texts (tokenizer_parts.py).

    Raises:
        ModelError: There is none that can be loaded, or it has a part whose effect on a text is not known.
    """
    from transformers import AutoTokenizer

    require_readable(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(
            f"the tokenizer in {folder.name} cannot be loaded ({type(error).__name__})",
            "a tokenizer.json is needed: save it with a fast tokenizer's save_pretrained",
        ) from error
    if not tokenizer.is_fast:
        raise ModelError(f"{folder.name} has no fast tokenizer", "save a tokenizer.json beside the model")
    require_known_parts(tokenizer, folder.name, provider)
    return tokenizer


def is_panic(error: BaseException) -> bool:
    """Whether the tokenizers library panicked, as on some files and texts, with an error that is no Exception."""
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def decodes_by_byte(tokenizer: Any) -> bool:
    """Whether a character that has no token is several tokens, of a byte each (SentencePiece's byte fallback)."""
    return "ByteFallback" in repr(tokenizer.backend_tokenizer.decoder)


def longest(folder: Path, tokenizer: Any) -> int:
    """Tokens at most. A family that counts positions from an id (RoBERTa's padding) loses those up to it."""
    config = read_model_json(folder / "config.json")
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    most = tokenizer.model_max_length
    if not isinstance(most, int | float) or most < 1:
        raise CorruptCheckpoint(
            "model_max_length in tokenizer_config.json is no number of tokens", "set it to what the model takes"
        )
    if positions is None:
        return int(most)
    unused = max(family_of(config).pinned(config), default=-1) + 1
    return min(int(positions) - unused, int(most))


def added(read: Callable[[Ids], str], before: int, one: int) -> tuple[str, bool]:
    """What a token adds to the text after another one, and whether it goes on with the same word. read: text of ids.
    before: the other one; below 0, there is none."""
    alone = read(np.array([one])).strip()
    alone = alone.removeprefix("##") or alone  # a WordPiece that goes on with no word
    if before < 0:
        return alone, False
    head, both = read(np.array([before])), read(np.array([before, one]))
    more = both[len(head) :] if both.startswith(head) else f" {alone}"
    return (more.strip() or alone, not more[:1].isspace()) if more else (alone, False)


class LockedTokenizer:
    """A tokenizer that several threads use: what reads or writes a text waits for its turn.

    A fast tokenizer keeps settings between calls, among them whether special tokens are read in a text. A call sets
    them and then reads the text. Without a lock, the settings of one thread would hold for another thread's text.

    Raises:
        CodecError: The tokenizer panicked, for example where a pattern of its own took too many steps.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._lock = tokenizer, threading.RLock()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except BaseException as error:
                if not is_panic(error):
                    raise
                raise CodecError(
                    "the tokenizer failed on this text", "use the tokenizer that the model was published with"
                ) from None  # its message may quote the text

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with self._turn():
            return self._tokenizer(*arguments, **options)

    def decode(self, *arguments: Any, **options: Any) -> Any:
        with self._turn():
            return self._tokenizer.decode(*arguments, **options)

    def batch_decode(self, *arguments: Any, **options: Any) -> Any:
        with self._turn():
            return self._tokenizer.batch_decode(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
