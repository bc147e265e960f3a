"""Texts as ids of a word table (GloVe), for models without a tokenizer of their own.

A text is split at white space, as SST-2 is published, in small letters. A piece that holds punctuation is the words in
it; punctuation alone is left out, because `sanitizers/tables/glove.py` reads no rows for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from milkglass.sanitizers.tables.glove import read_glove
from milkglass.sanitizers.tables.words import is_word, pattern
from milkglass.sequences import Ids, Sequences

PADDING, UNKNOWN = 0, 1
SPECIAL: tuple[int, ...] = (PADDING, UNKNOWN)
SHOWN = ("", "<unk>")  # how the two are read


@dataclass(frozen=True, eq=False)
class WordTable:
    """The words of a GloVe file and their vectors.

    Attributes:
        words: (n,) by id, SHOWN before the file's own.
        rows: (n, d) fp32; the row of padding is zero, that of the unknown word the mean of all others.
    """

    words: tuple[str, ...]
    rows: torch.Tensor = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> WordTable:
        """Raises BadTable for a file that is not a GloVe text file."""
        table = read_glove(path)
        own = torch.from_numpy(table.vectors)
        rows = torch.cat([torch.zeros(1, own.shape[1]), own.mean(0, keepdim=True), own])
        return cls((*SHOWN, *table.words), rows)

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words) if number not in SPECIAL}

    def ids(self, text: str) -> list[int]:
        """At least one: a text without a word is one unknown word."""
        result = [self._places.get(word, UNKNOWN) for word in split(text)]
        return result or [UNKNOWN]

    def encoded(self, texts: Iterable[str]) -> Sequences:
        return Sequences.of(self.ids(text) for text in texts)

    def text(self, ids: Ids) -> str:
        return " ".join(self.words[one] for one in ids.tolist() if one != PADDING)


def split(text: str) -> list[str]:
    result: list[str] = []
    for piece in text.lower().split():
        result += [piece] if is_word(piece) else pattern(contractions=True).findall(piece)
    return result


def ordinary(size: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """(n,) which ids stand for words."""
    result = np.ones(size, bool)
    result[list(SPECIAL)] = False
    return result
