"""What a map of symbols is found from, and what a way to find one is: one file of this folder is one way."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from milkglass.parameters import require
from milkglass.progress import Progress
from milkglass.schemes.mixture import Draws, Ids
from milkglass.sequences import Sequences

Floats = NDArray[np.float32]
Vectors = Literal["encoder", "table"]


@dataclass(frozen=True, eq=False)
class TaskTexts:
    """The client's own labelled texts. Nothing of them is kept.

    Attributes:
        texts: in original ids; a pair is one text.
        labels: (b,) numbers of classes from 0, or standardised scores of a regression.
        classes: how many classes there are; 0: a regression.
    """

    texts: Sequences
    labels: NDArray[np.float64]
    classes: int


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a map is found from. It stays with the client.

    Attributes:
        counts: (n,) how often each token occurs: in public text where there is some, else in the client's.
        weights: (n,) of the tokens in the rows of their symbols. Counts of a public text, or all equal: anyone with the
            public table can solve a row for them, so they must not be counts of private text.
        special: ids of special tokens, which keep symbols of their own.
        pinned: ids that must keep their number, since the architecture uses it.
        labelled: None where there are no labels.
        vectors: (n, d) a vector of each token: the public encoder's, or its row of the input table.
    """

    counts: NDArray[np.int64]
    weights: Floats
    special: Ids
    pinned: tuple[int, ...]
    labelled: TaskTexts | None
    vectors: Callable[[Vectors], Floats]


@dataclass(frozen=True, eq=False)
class FoundSymbols:
    """What a way to find a map returns.

    Attributes:
        numbers: (c,) a number from 0 for each token that is clustered.
        points: (c, f) where these lie, which says which symbols are near to each other.
    """

    numbers: Ids
    points: Floats


class MapFinder(abc.ABC):
    """A way to find a map. Final subclasses are frozen dataclasses whose fields are the parameters
    (milkglass/parameters.py); an instance is a field of `Coarse`."""

    def __post_init__(self) -> None:
        require(self)

    @abc.abstractmethod
    def find(
        self, evidence: Evidence, tokens: Ids, mass: NDArray[np.float64], symbols: int,
        draws: Callable[[str], Draws], progress: Progress,
    ) -> FoundSymbols:  # fmt: skip
        """At most `symbols` clusters of these tokens.

        Args:
            tokens: (c,) ids of those that are clustered.
            mass: (c,) how common each is, above 0.
            draws: a stream of the key for each label.
            progress: receives the share of the work that was done since the last call, in thousandths.
        """


def thousandths(done: int, of: int) -> int:
    """How many thousandths of the work its last step was, `done` steps out of `of` being done: their sum is 1000."""
    return 1000 * done // of - 1000 * (done - 1) // of
