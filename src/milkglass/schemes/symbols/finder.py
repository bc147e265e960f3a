"""Defines the input of a map of symbols, and the interface of methods that find one: each is one file."""

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
VectorSource = Literal["encoder", "table"]


@dataclass(frozen=True, eq=False)
class TaskTexts:
    """Holds the client's own labelled texts while a map is found. Nothing of them is stored.

    Attributes:
        texts: the texts in original ids; a pair is one text.
        labels: (texts,) numbers of classes from 0, or standardised scores of a regression.
        class_count: the number of classes; 0 for a regression.
    """

    texts: Sequences
    labels: NDArray[np.float64]
    class_count: int


@dataclass(frozen=True, eq=False)
class Evidence:
    """Holds the input from which a map is found. It stays with the client.

    Attributes:
        counts: (n,) how often each token occurs, in public text if there is some, else in the client's.
        weights: (n,) the weights of the tokens in the rows of their symbols: counts of a public text, or all equal.
            Anyone with the public table can solve a row for them, so they must not be counts of private text.
        special: the ids of special tokens, which keep their own symbols.
        pinned: the ids that must keep their number, since the architecture uses it.
        labelled: the client's labelled texts. None if there are none.
        vectors: returns (n, d) a vector of each token: the public encoder's, or its row of the input table.
    """

    counts: NDArray[np.int64]
    weights: Floats
    special: Ids
    pinned: tuple[int, ...]
    labelled: TaskTexts | None
    vectors: Callable[[VectorSource], Floats]


@dataclass(frozen=True, eq=False)
class FoundSymbols:
    """Holds the symbols that a `MapFinder` found.

    Attributes:
        symbol_of_token: (c,) the symbol, from 0, of each token that is clustered.
        points: (c, f) the positions of these tokens, by which symbols are near each other.
    """

    symbol_of_token: Ids
    points: Floats


class MapFinder(abc.ABC):
    """Finds the symbols of tokens. Final subclasses are frozen dataclasses of parameters, and fields of `Coarse`."""

    def __post_init__(self) -> None:
        require(self)

    @abc.abstractmethod
    def find(
        self, evidence: Evidence, tokens: Ids, mass: NDArray[np.float64], symbol_count: int,
        draws_for: Callable[[str], Draws], progress: Progress,
    ) -> FoundSymbols:  # fmt: skip
        """Returns at most `symbol_count` clusters of tokens (c,); `mass` (c,) says how common each is, above 0.

        Args:
            draws_for: returns the draws of a label.
            progress: receives the share of the work done since the last call, in thousandths.
        """


def thousandths(done: int, step_count: int) -> int:
    """Returns the thousandths of all work that the last step was, after `done` of `step_count` steps.

    Over all steps they sum to 1000.
    """
    return 1000 * done // step_count - 1000 * (done - 1) // step_count
