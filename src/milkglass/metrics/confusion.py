"""Evaluates a confusion matrix: accuracy, recall and precision of each class, and the share of the commonest class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.metrics.interval import Interval, proportion, quotients


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """Counts how often texts of each class were assigned to each class.

    Attributes:
        names: the name of each class, in the order of `counts`.
        counts: (c, c) a row for each true class, a column for each assigned class.
    """

    names: tuple[str, ...]
    counts: NDArray[np.int64] = field(repr=False)

    @classmethod
    def from_counts(cls, counts: Any, names: Mapping[int, str]) -> ConfusionMatrix | None:
        """Returns the matrix of a server's counts, or None if the counts are not valid or count no text.

        Args:
            counts: a list of rows as in the attribute, from a server that is not trusted.
            names: the name of each class by its number, from 0.
        """
        if not isinstance(counts, list) or not counts or sorted(names) != list(range(len(counts))):
            return None
        if any(not isinstance(row, list) or len(row) != len(counts) for row in counts):
            return None
        if any(type(count) is not int or not 0 <= count < 1 << 53 for row in counts for count in row):
            return None
        matrix = cls(tuple(names[number] for number in range(len(counts))), np.array(counts, np.int64))
        return matrix if matrix.text_count else None

    @property
    def text_count(self) -> int:
        """Returns how many texts were assigned."""
        return int(self.counts.sum())

    def accuracy(self) -> Interval:
        """Returns the accuracy. The bootstrap is seeded, so that the same counts have the same interval."""
        right_count = int(np.trace(self.counts))
        return proportion(np.arange(self.text_count) < right_count, np.random.default_rng(0))

    @property
    def commonest_class(self) -> tuple[str, float]:
        """Returns the name of the class with most texts and its share, which is the accuracy of always naming it."""
        texts_of_class = self.counts.sum(1)
        return self.names[int(texts_of_class.argmax())], float(texts_of_class.max() / texts_of_class.sum())

    @property
    def recall(self) -> NDArray[np.float64]:
        """Returns (c,) the share of each class's texts that were assigned to it; nan for a class without texts."""
        return quotients(np.diag(self.counts), self.counts.sum(1))

    @property
    def precision(self) -> NDArray[np.float64]:
        """Returns (c,) the share of the texts assigned to each class that belong to it; nan if there are none."""
        return quotients(np.diag(self.counts), self.counts.sum(0))
