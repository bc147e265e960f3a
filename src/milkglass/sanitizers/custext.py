"""Draws a substitute by CUSTEXT: from a short list that near words share (Chen et al., Findings of ACL 2023).

Mapping: in order of frequency, the first free word and the k - 1 free words nearest to it form a group. Each word of a
group may become any word of it. Sampling: within the list,

    u(x, y) = (s(x, y) - min) / (max - min)  over the list,   p(y | x) ~ exp(eps u(x, y) / 2)

with s the cosine or minus the Euclidean distance. It is the exponential mechanism with a score of sensitivity 1, in
integers (noise/selection.py). A list with equal scores is drawn from evenly. CUSTEXT+ keeps stopwords.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from milkglass import papers
from milkglass.accounting import format_epsilon
from milkglass.errors import UsageError
from milkglass.models.array_cache import ArrayCache, Arrays, digest_of
from milkglass.nearest.all_rows import group_rows
from milkglass.nearest.select import Metric, require_k, unit_rows
from milkglass.noise import selection
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.parameters import limited_field
from milkglass.progress import Progress, no_progress
from milkglass.sanitizers.method import SanitizerMethod
from milkglass.sanitizers.sanitizer import UNKNOWN, Sanitizer
from milkglass.sanitizers.table import Ids, Vectors, WordVectors


@dataclass(frozen=True, eq=False)
class WordGroups:
    """Divides words into groups, and scores all words of a group for each. Words are numbered among the candidates.

    Attributes:
        group: (m,) the number of each word's group.
        members: (groups, width) the words of each group, -1 beyond its end.
        scores: (m, width) for each word the score of each member of its group, in [0, 1], -inf beyond the end.
    """

    group: Ids
    members: Ids = field(repr=False)
    scores: NDArray[np.float64] = field(repr=False)

    @classmethod
    def from_cache(
        cls, vectors: Vectors, k: int, metric: Metric, progress: Progress, folder: Path | None
    ) -> tuple[WordGroups, bool]:
        """Returns the groups of a table's words, taken in the table's order, and whether they were in the cache.

        Args:
            vectors: (n, d) one for each word.
            k: the size of a group.
            metric: which words are near.
            folder: where the groups are cached. None: Milkglass's cache.
        """
        cache = ArrayCache("lists", {"group": np.int64, "members": np.int64, "scores": np.float64}, folder)
        digest = digest_of(["milkglass-shared-lists/1", k, metric, vectors.shape], vectors)
        order = np.arange(len(vectors))

        def is_valid(arrays: Arrays) -> bool:
            groups = cls(**arrays)
            has_shapes = groups.group.shape == (len(vectors),) and groups.scores.shape == (len(vectors), groups.width)
            return has_shapes and bool(np.array_equal(np.sort(groups.members[groups.members >= 0]), order))

        arrays = cache(digest, lambda: vars(cls.of(vectors, order, k, metric, progress)), is_valid)
        return cls(**arrays), cache.is_reused

    @classmethod
    def of(cls, vectors: Vectors, order: Ids, k: int, metric: Metric, progress: Progress = no_progress) -> WordGroups:
        """Groups words: the first free one in `order` with the k - 1 free words nearest to it, and so on.

        Args:
            vectors: (n, d) one for each word.
            order: (n,) the words in the order in which they begin groups.
            k: the size of a group; fewer than k words that remain at the end join the last group.
            metric: which words are near.
        """
        rows_by_group = group_rows(vectors, order, k, metric, progress)
        width = max(len(row) for row in rows_by_group)
        group, members = np.empty(len(vectors), np.int64), np.full((len(rows_by_group), width), -1, np.int64)
        scores = np.full((len(vectors), width), -np.inf)
        rows = unit_rows(vectors) if metric == "cosine" else vectors
        for group_number, row in enumerate(rows_by_group):
            group[row], members[group_number, : len(row)] = group_number, row
            scores[row, : len(row)] = scale_rows(_similarities(rows[row].astype(np.float64), metric))
        return cls(group, members, scores)

    @property
    def width(self) -> int:
        """Returns the size of the largest group."""
        return int(self.members.shape[1])


def _similarities(rows: NDArray[np.float64], metric: Metric) -> NDArray[np.float64]:
    """Returns (k, k) similarities of k words. Each is most similar to itself, even if its vector has no direction."""
    similarities = np.minimum(rows @ rows.T, 1) if metric == "cosine" else -np.linalg.norm(rows[:, None] - rows, axis=2)
    np.fill_diagonal(similarities, 1.0 if metric == "cosine" else 0.0)
    return similarities


def scale_rows(similarity: NDArray[np.floating]) -> NDArray[np.float64]:
    """Returns each row scaled to 0 to 1, or 0 if its values differ by rounding errors only."""
    similarity = similarity.astype(np.float64)
    low, high = similarity.min(1, keepdims=True), similarity.max(1, keepdims=True)
    is_flat = high - low <= 1e-6 * np.maximum(1, np.abs(high))
    return np.where(is_flat, 0, (similarity - low) / np.where(is_flat, 1, high - low))


@dataclass(frozen=True, eq=False)
class CusText(Sanitizer):
    """Replaces words by CUSTEXT over a table. An unknown word becomes any word of the table, with equal probabilities.

    Attributes:
        k: the size of a list.
        metric: which words are near.
        counts: (n,) how often each word occurs, which decides the order. None: the table's order.
        given_groups: earlier `groups` of the same table, k, metric and counts.

    Raises:
        UsageError: epsilon or k does not fit, or there is no such metric.
    """

    k: int = 20
    metric: Metric = "cosine"
    counts: NDArray[np.int64] | None = field(default=None, repr=False)
    given_groups: WordGroups | None = field(default=None, repr=False)

    paper: ClassVar[Paper] = papers.CUSTEXT.with_deviations(
        "Words that are in a list already are left out; the published code sets their vectors to zero, so that "
        "they may be taken again.",
        "What is left at the end, fewer than k words, joins the last list.",
        "Without counts words are visited in the table's order: lists by private counts would tell of them.",
        "Unknown words and numbers become any word of the table; the published code lets unknown words through.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric not in ("cosine", "euclidean"):
            raise UsageError(f"metric is {self.metric!r}", "cosine or euclidean")
        require_k(self.k, len(self.table.candidates))

    @property
    def guarantee(self) -> str | None:
        return f"{format_epsilon(self.epsilon)}-DP between words of one list, for one word; lists are public"

    def prepare(self) -> None:
        self.cumulative  # noqa: B018

    def with_lists(self, progress: Progress, folder: Path | None = None) -> tuple[Self, bool]:
        if self.counts is not None:  # the user's own: nothing of them is kept
            order = self.order(self.counts)
            return replace(self, given_groups=WordGroups.of(self.vectors, order, self.k, self.metric, progress)), False
        groups, is_reused = WordGroups.from_cache(self.vectors, self.k, self.metric, progress, folder)
        return replace(self, given_groups=groups), is_reused

    def draw(self, places: Ids, stream: Stream) -> Ids:
        rows = np.maximum(places, 0)
        substitutes = self.groups.members[self.groups.group[rows], selection.choose(self.cumulative[rows], stream)]
        return np.where(places == UNKNOWN, stream.integers(len(self.vectors), len(places)), substitutes)

    @cached_property
    def groups(self) -> WordGroups:
        """Returns the lists: the given ones, or those that are made of the table."""
        if self.given_groups is not None:
            return self.given_groups
        return WordGroups.of(self.vectors, self.order(self.counts), self.k, self.metric)

    @cached_property
    def cumulative(self) -> NDArray[np.int64]:
        """Returns (m, width) cumulative integer weights over a word's list (noise/selection.py)."""
        return selection.cumulative_weights(self.groups.scores, self.epsilon)


@dataclass(frozen=True)
class CusTextMethod(SanitizerMethod):
    """Makes CUSTEXT over a table, by default with k of ObfusLM's comparison (C.3)."""

    k: int = limited_field(20, least=2)
    metric: Metric = "cosine"

    name: ClassVar[str] = "custext"
    has_lists: ClassVar[bool] = True

    def sanitizer(self, table: WordVectors, counts: NDArray[np.int64] | None) -> CusText:
        return CusText(table, self.epsilon, self.k, self.metric, counts)


@dataclass(frozen=True)
class CusTextPlusMethod(CusTextMethod):
    """Makes CUSTEXT+ over a table: CUSTEXT that leaves stopwords as they are."""

    name: ClassVar[str] = "custext+"

    @property
    def keeps_stopwords(self) -> bool:
        return True
