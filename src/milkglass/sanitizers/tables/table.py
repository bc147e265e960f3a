"""An embedding table: the words that a sanitizer knows, and a vector for each.

Out of scope: where a table comes from (glove.py, vocabulary.py), and any mechanism.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import BadTable

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]
Mask = NDArray[np.bool_]
LARGEST = 1e15  # squares of such values can be summed in fp32


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words with their vectors.

    Attributes:
        words: (n,), each once.
        vectors: (n, d), fp32.
        special: (n,), rows that are neither drawn nor replaced, such as [CLS] and [unused7].
        name: for reports; without a path or a text.
    """

    words: tuple[str, ...]
    vectors: Vectors = field(repr=False)
    special: Mask | None = field(default=None, repr=False)
    name: str = "table"

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or self.vectors.dtype != np.float32 or len(self.vectors) != len(self.words):
            raise BadTable(
                f"{len(self.words)} words do not fit vectors of shape {self.vectors.shape} and {self.vectors.dtype}",
                "give one fp32 vector for each word",
            )
        if not np.abs(self.vectors).max(initial=0) < LARGEST:  # nor is nan
            raise BadTable("the table has values that are not finite, or too large", "make or fetch it again")
        if self.special is not None and self.special.shape != (len(self.words),):
            raise BadTable(f"the mask of special rows has shape {self.special.shape}", "give one entry for each word")
        if len(self.candidates) < 2:
            raise BadTable(
                f"the table has {len(self.candidates)} words to draw from, at least 2 are needed", "give a larger table"
            )

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def candidates(self) -> Ids:
        """(m,) the rows that may be drawn, ascending."""
        return np.arange(len(self)) if self.special is None else np.flatnonzero(~self.special)

    @cached_property
    def places(self) -> Ids:
        """(n,) a row's place among the candidates; -1 for special rows."""
        result = np.full(len(self), -1, np.int64)
        result[self.candidates] = np.arange(len(self.candidates))
        return result
