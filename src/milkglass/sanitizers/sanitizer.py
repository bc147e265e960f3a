"""What every sanitizer is: word ids in, word ids out, each drawn for itself by a law that its class documents.

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
from milkglass.sanitizers.tables.table import Ids, Mask, Vectors, WordVectors

UNKNOWN = -1  # a word that the table does not have
EPSILON = Limit(1e-9, high=1e6)  # beyond it nothing is ever replaced, and distances times epsilon overflow
SHARE = Limit(0, high=1)
WORDS_AT_A_TIME = 8192  # words drawn at a time, which bounds memory


@dataclass(frozen=True, eq=False)
class Sanitizer(abc.ABC):
    """A mechanism over a table.

    Attributes:
        epsilon: the budget of one word, above 0. A text of t words spends t times that.

    An unknown word, id UNKNOWN, is always replaced, by a law that is the same for all unknown words: what is sent shows
    that there was one, and nothing else about it.
    """

    table: WordVectors = field(repr=False)
    epsilon: float

    paper: ClassVar[Paper]

    def __post_init__(self) -> None:
        EPSILON.require(self.epsilon, "epsilon", "1, 2 and 3 are common")

    @property
    @abc.abstractmethod
    def guarantee(self) -> str | None:
        """What is proved of this mechanism with these parameters, for one word; None: nothing is."""

    @abc.abstractmethod
    def draw(self, places: Ids, stream: Stream) -> Ids:
        """(t,) places, or UNKNOWN, to the places of their substitutes. At most WORDS_AT_A_TIME at a time."""

    def due(self, ids: Ids, stream: Stream) -> Mask:
        """(t,) which of these known words are replaced; all, unless a variant spares some."""
        return np.ones(len(ids), np.bool_)

    def sensitivity(self) -> Mask | None:
        """(n,) the words that the variant always replaces; None where it makes no difference between words."""
        return None

    @property
    def drawn_from(self) -> int | None:
        """How many words substitutes are drawn from, where these are words of the corpus; None: of the whole table."""
        return None

    def prepare(self) -> None:  # noqa: B027
        """Work out now what draws need, where that is not done word by word."""

    def with_lists(self, progress: Progress, folder: Path | None = None) -> tuple[Self, bool]:
        """The same mechanism with its lists of words at hand, and whether they were kept from an earlier run.

        Lists that follow from a table alone are kept in Milkglass's cache (models/array_cache.py), or in `folder`;
        those that private counts decide are not. progress: of n words whose lists are made.
        """
        return self, False

    def sanitize(self, ids: Ids, stream: Stream) -> Ids:
        """(t,) row numbers of the table, or UNKNOWN, to (t,) row numbers. Special rows are unchanged.

        Raises UnknownWord for any other number: it would cross in the clear.
        """
        ids = np.asarray(ids)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise UsageError(f"ids have shape {ids.shape} and type {ids.dtype}", "give one row of whole numbers")
        if ids.size and not UNKNOWN <= ids.min() <= ids.max() < len(self.table):
            raise UnknownWord(
                f"an id is outside the table of {len(self.table)} words: it would cross in the clear",
                f"words that the table does not have are given as {UNKNOWN}",
            )
        return self.replaced(ids.astype(np.int64), stream)[0]

    def replaced(self, ids: Ids, stream: Stream) -> tuple[Ids, Mask]:
        """The same of ids that were checked, and (t,) which of them went through the mechanism. Raises TypeError for
        any other generator than a key stream: no guarantee would hold."""
        if not isinstance(stream, Stream):
            raise TypeError(f"draws come from a noise.stream.Stream, not from a {type(stream).__name__}")
        out, drawn = ids.copy(), np.zeros(len(ids), np.bool_)
        for start in range(0, len(ids), WORDS_AT_A_TIME):
            part = ids[start : start + WORDS_AT_A_TIME]
            places = np.where(part == UNKNOWN, UNKNOWN, self.table.places[part])
            requested = (part == UNKNOWN) | ((places >= 0) & self.due(part, stream))
            out[start : start + WORDS_AT_A_TIME][requested] = self.table.candidates[
                self.draw(places[requested], stream)
            ]
            drawn[start : start + WORDS_AT_A_TIME] = requested
        return out, drawn

    @cached_property
    def vectors(self) -> Vectors:
        """(m, d) by place."""
        return self.table.vectors if self.table.special is None else self.table.vectors[self.table.candidates]

    def order(self, counts: NDArray[np.int64] | None) -> Ids:
        """Places from the commonest word to the rarest; ties, and a table without counts, in the table's order."""
        if counts is None:
            return np.arange(len(self.vectors))
        if counts.shape != (len(self.table),):
            raise UsageError(f"counts have shape {counts.shape}", f"give one for each of {len(self.table)} words")
        return np.argsort(-counts[self.table.candidates], kind="stable")


@dataclass(frozen=True)
class Spared:
    """Words that are not sensitive are replaced with probability p only.

    Attributes:
        sensitive: (n,) by row of the table.
    """

    sensitive: Mask = field(repr=False)
    p: float

    def check(self, table: WordVectors) -> None:
        if self.sensitive.shape != (len(table),) or self.sensitive.dtype != np.bool_:
            raise UsageError(
                f"sensitive words are given as {self.sensitive.dtype} of shape {self.sensitive.shape}",
                f"give a mask of {len(table)} words",
            )
        SHARE.require(self.p, "p", "0.3 is the papers' choice")

    def due(self, ids: Ids, stream: Stream) -> Mask:
        """UNKNOWN is decided elsewhere; a random number is drawn for every word, so that draws don't hang together."""
        return self.sensitive[ids] | (stream.random(len(ids)) < self.p)


# Which words are sensitive: those that are rare in a corpus, or not in it at all (CMIF, section 4.1).
#
# The counts are of the user's own text. What is sensitive hence depends on it, which no guarantee here covers.
def sensitive_words(counts: NDArray[np.int64], share: float) -> Mask:
    """(n,) the rarest `share` of the words that occur, as rare ones as the last of them too, and all that never do."""
    SHARE.require(share, "the share of sensitive words", "0.2 is CMIF's choice")
    seen = np.sort(counts[counts > 0])
    last = round(share * len(seen))
    bound = seen[last - 1] if last else 0
    return counts <= bound
