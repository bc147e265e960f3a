"""Defines the base of all sanitizers: each word id is replaced by a separate draw from a documented distribution.

A mechanism works on *places*, 0 to m - 1 among the table's candidates, so that special rows cannot be drawn.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UnknownWord, UsageError
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.parameters import Limit
from milkglass.progress import Progress
from milkglass.sanitizers.table import Ids, Mask, Vectors, WordVectors

UNKNOWN = -1  # the id of a word that the table does not have
EPSILON_LIMIT = Limit(1e-9, high=1e6)  # beyond it nothing is ever replaced, and distances times epsilon overflow
SHARE_LIMIT = Limit(0, high=1)
WORDS_AT_A_TIME = 8192  # words drawn at a time, which bounds memory


@dataclass(frozen=True, eq=False)
class Sanitizer(abc.ABC):
    """Replaces words of a table, each by a draw of its own.

    An unknown word, id UNKNOWN, is always replaced, by one distribution for all unknown words. What is sent shows that
    there was one, and nothing else about it.

    Attributes:
        table: the words that are known, and that may be drawn.
        epsilon: the budget of one word, above 0. A text of t words spends t times that.
        paper: the paper that describes the mechanism.
    """

    table: WordVectors = field(repr=False)
    epsilon: float

    paper: ClassVar[Paper]

    def __post_init__(self) -> None:
        EPSILON_LIMIT.require(self.epsilon, "epsilon", "1, 2 and 3 are common")

    @property
    @abc.abstractmethod
    def guarantee(self) -> str | None:
        """Returns what is proved for one word with these parameters, or None if nothing is."""

    @abc.abstractmethod
    def draw(self, places: Ids, stream: Stream) -> Ids:
        """Returns (t,) the places of substitutes for at most WORDS_AT_A_TIME places, of which any may be UNKNOWN."""

    def is_due(self, ids: Ids, stream: Stream) -> Mask:
        """Returns (t,) which of these known words are replaced: all, unless a variant spares some."""
        return np.ones(len(ids), np.bool_)

    def sensitive_mask(self) -> Mask | None:
        """Returns (n,) which words the variant always replaces; None if it treats all words alike."""
        return None

    @property
    def substitute_count(self) -> int | None:
        """Returns from how many words of the corpus substitutes are drawn, or None if from the whole table."""
        return None

    def prepare(self) -> None:  # noqa: B027
        """Computes what draws need, if that is not computed word by word."""

    def with_lists(self, progress: Progress, folder: Path | None = None) -> tuple[Self, bool]:
        """Returns the mechanism with each word's list of substitutes, and whether the lists came from the cache.

        Lists that follow from a table alone are cached (models/array_cache.py). Lists that private counts decide are
        not.

        Args:
            progress: counts the words of the table.
            folder: where the cache lies. None: where all caches lie.
        """
        return self, False

    def sanitize(self, ids: Ids, stream: Stream) -> Ids:
        """Returns (t,) the row numbers of the substitutes. Special rows are unchanged.

        Raises UnknownWord for an id that is outside the table, and would cross in the clear, and UsageError for ids
        that are not one row of whole numbers.
        """
        ids = np.asarray(ids)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise UsageError(f"ids have shape {ids.shape} and type {ids.dtype}", "give one row of whole numbers")
        if ids.size and not UNKNOWN <= ids.min() <= ids.max() < len(self.table):
            raise UnknownWord(
                f"an id is outside the table of {len(self.table)} words: it would cross in the clear",
                f"words that the table does not have are given as {UNKNOWN}",
            )
        return self.sanitize_checked(ids.astype(np.int64), stream)[0]

    def sanitize_checked(self, ids: Ids, stream: Stream) -> tuple[Ids, Mask]:
        """Returns `sanitize` of checked ids, and (t,) which of them went through the mechanism.

        Raises TypeError if `stream` is not a key stream. No guarantee would hold with another generator.
        """
        if not isinstance(stream, Stream):
            raise TypeError(f"draws come from a noise.stream.Stream, not from a {type(stream).__name__}")
        substitutes, is_drawn = ids.copy(), np.zeros(len(ids), np.bool_)
        for start in range(0, len(ids), WORDS_AT_A_TIME):
            block = ids[start : start + WORDS_AT_A_TIME]
            places = np.where(block == UNKNOWN, UNKNOWN, self.table.places[block])
            is_replaced = (block == UNKNOWN) | ((places >= 0) & self.is_due(block, stream))
            substitutes[start : start + WORDS_AT_A_TIME][is_replaced] = self.table.candidates[
                self.draw(places[is_replaced], stream)
            ]
            is_drawn[start : start + WORDS_AT_A_TIME] = is_replaced
        return substitutes, is_drawn

    @cached_property
    def vectors(self) -> Vectors:
        """Returns (m, d) the vectors of the candidates."""
        return self.table.vectors if self.table.special is None else self.table.vectors[self.table.candidates]

    def order(self, counts: NDArray[np.int64] | None) -> Ids:
        """Returns the places from the most frequent word to the rarest. Ties keep the table's order.

        Raises UsageError if there is not one count for each word.
        """
        if counts is None:
            return np.arange(len(self.vectors))
        if counts.shape != (len(self.table),):
            raise UsageError(f"counts have shape {counts.shape}", f"give one for each of {len(self.table)} words")
        return np.argsort(-counts[self.table.candidates], kind="stable")


@dataclass(frozen=True)
class SparingRule:
    """Decides which words are replaced: sensitive ones always, all others with probability p.

    Attributes:
        sensitive: (n,) whether each word of the table is sensitive.
        p: the probability with which a word that is not sensitive is replaced.
    """

    sensitive: Mask = field(repr=False)
    p: float

    def check(self, table: WordVectors) -> None:
        """Raises UsageError if the mask is not one of this table's words, or p is not a probability."""
        if self.sensitive.shape != (len(table),) or self.sensitive.dtype != np.bool_:
            raise UsageError(
                f"sensitive words are given as {self.sensitive.dtype} of shape {self.sensitive.shape}",
                f"give a mask of {len(table)} words",
            )
        SHARE_LIMIT.require(self.p, "p", "0.3 is the papers' choice")

    def is_due(self, ids: Ids, stream: Stream) -> Mask:
        """Returns (t,) which of these known words are replaced. One random number is drawn for every word."""
        return self.sensitive[ids] | (stream.random(len(ids)) < self.p)


def sensitive_words(counts: NDArray[np.int64], share: float) -> Mask:
    """Returns (n,) which words are sensitive: the rarest that occur, and all that never do (CMIF, section 4.1).

    What is sensitive depends on the user's own text, which no guarantee here covers.

    Args:
        counts: (n,) how often each word occurs in the user's own text.
        share: the share of the words that occur. Words as rare as the last of them are sensitive too.

    Raises:
        UsageError: the share is not from 0 to 1.
    """
    SHARE_LIMIT.require(share, "the share of sensitive words", "0.2 is CMIF's choice")
    occurring_counts = np.sort(counts[counts > 0])
    count = round(share * len(occurring_counts))
    max_count = occurring_counts[count - 1] if count else 0
    return counts <= max_count
