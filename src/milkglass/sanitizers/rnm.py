"""Draws a substitute for a word by report-noisy-max (RNM) over its nearest words (CMIF, Yu et al., section 3.2).

Every word has a list of the k others of the largest cosine; u is the cosine, normalised to [0, 1] within the list
(equation 3). A word becomes

    argmax over y of its list of  u(x, y) + Lap(1 / eps)                         (equation 2, sensitivity 1)

in integers with exact noise (noise/selection.py). Sensitive words are always replaced, others with probability p
(section 3.2, "Mapping Function").

`guarantee="paper"` is the mechanism of the paper, and **has no guarantee**. The paper's ratio (equation 4) needs both
words to have the same list, but each word has its own and is not in it, so that an outcome of one word can be
impossible for the other. And Lap(1 / eps) suffices for monotone scores only. `guarantee="strict"` partitions the words
into shared lists (those of CUSTEXT, which contain the word itself) and takes Lap(2 / eps): eps-DP between words of one
list if all are replaced. If words are spared with p < 1, a spared x' shows itself: Pr[x' -> x'] = 1 - p + p q(x'|x').
Since x' is the best of its list, q(x'|x') >= 1/K for lists of at most K words, so the ratio is at most
e^eps (1 + (1 - p) K / p).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from milkglass import papers
from milkglass.accounting import format_epsilon
from milkglass.errors import UsageError
from milkglass.models.array_cache import ArrayCache, Arrays, digest_of
from milkglass.nearest.all_rows import nearest
from milkglass.nearest.select import require_k
from milkglass.noise import selection
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.parameters import limited_field
from milkglass.progress import Progress, no_progress
from milkglass.sanitizers.custext import WordGroups, scale_rows
from milkglass.sanitizers.method import SparingMethod
from milkglass.sanitizers.sanitizer import UNKNOWN, Sanitizer, SparingRule
from milkglass.sanitizers.table import Ids, Mask, WordVectors

Guarantee = Literal["paper", "strict"]


@dataclass(frozen=True, eq=False)
class Rnm(Sanitizer):
    """Replaces words by report-noisy-max over a table.

    An unknown word becomes any word of the table, with equal probabilities.

    Attributes:
        k: how many words a list has.
        guarantee_kind: "paper" for the paper's mechanism, "strict" for the one with a guarantee.
        sparing: the rule by which words that are not sensitive are spared. None: every word is always replaced.
        counts: (n,) how often each word occurs, which decides the order of strict lists. None: the table's order.
        given_lists: earlier `nearest_lists` of the same table and k.
        given_groups: earlier `groups` of the same table, k and counts.

    Raises:
        UsageError: epsilon, k or the rule of sparing does not fit, or there is no such guarantee.
    """

    k: int = 30
    guarantee_kind: Guarantee = "paper"
    sparing: SparingRule | None = None
    counts: NDArray[np.int64] | None = field(default=None, repr=False)
    given_lists: tuple[NDArray[np.int32], NDArray[np.float64]] | None = field(default=None, repr=False)
    given_groups: WordGroups | None = field(default=None, repr=False)

    paper: ClassVar[Paper] = papers.CMIF.with_deviations(
        "The published code never finds a token sensitive, takes dot products, normalises over a block of the "
        "vocabulary and replaces [CLS], [SEP] and [PAD]; ours follows the paper.",
        "By words, unknown ones and numbers become any word of the table.",
        "Sensitive are the rarest 20 % of the types that occur, and those that never do: 2.9 % of the running tokens "
        "of SST-2's dev file, 1.1 % of all its rows', so that p decides nearly all; by mass it would be 20 %.",
        "The claim of equation 4 does not hold as built; `strict` has shared lists and twice the noise.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guarantee_kind not in ("paper", "strict"):
            raise UsageError(f"the guarantee is {self.guarantee_kind!r}", "paper or strict")
        if self.sparing is not None:
            self.sparing.check(self.table)
        require_k(self.k, len(self.table.candidates) - (self.guarantee_kind == "paper"))

    @property
    def guarantee(self) -> str | None:
        if self.guarantee_kind == "paper":
            return None
        p = 1.0 if self.sparing is None else self.sparing.p
        epsilon = format_epsilon(self.epsilon)
        if p == 0:
            return f"{epsilon}-DP between sensitive words of one list, for one word; other words have none"
        bound = self.epsilon + math.log1p((1 - p) * self.groups.width / p)
        note = "" if p == 1 else f" (epsilon {epsilon}, but common words are kept with probability 1 - p)"
        total = format_epsilon(math.ceil(bound * 1000 * (1 - 1e-12)) / 1000)  # never below what holds
        return f"{total}-DP between words of one list, for one word{note}; lists and what is sensitive are public"

    @property
    def scale(self) -> float:
        """Returns the scale of the Laplace noise, for scores of sensitivity 1."""
        return (1 if self.guarantee_kind == "paper" else 2) / self.epsilon

    def is_due(self, ids: Ids, stream: Stream) -> Mask:
        return super().is_due(ids, stream) if self.sparing is None else self.sparing.is_due(ids, stream)

    def sensitive_mask(self) -> Mask | None:
        return None if self.sparing is None else self.sparing.sensitive

    def prepare(self) -> None:
        self._scores  # noqa: B018

    def with_lists(self, progress: Progress, folder: Path | None = None) -> tuple[Self, bool]:
        if self.guarantee_kind == "strict":
            if self.counts is not None:  # the user's own: nothing of them is kept
                return replace(self, given_groups=self._shared_groups(progress)), False
            groups, is_reused = WordGroups.from_cache(self.vectors, self.k, "cosine", progress, folder)
            return replace(self, given_groups=groups), is_reused
        cache = ArrayCache("lists", {"near": np.int32, "scores": np.float64}, folder)
        vectors, shape = self.vectors, (len(self.vectors), self.k)

        def make_arrays() -> Arrays:
            return dict(zip(("near", "scores"), self.compute_nearest_lists(progress), strict=True))

        def is_valid(arrays: Arrays) -> bool:
            near, scores = arrays["near"], arrays["scores"]
            return bool(near.shape == scores.shape == shape and near.min() >= 0 and near.max() < len(vectors))

        arrays = cache(digest_of(["milkglass-near-lists/1", self.k, vectors.shape], vectors), make_arrays, is_valid)
        return replace(self, given_lists=(arrays["near"], arrays["scores"])), cache.is_reused

    def draw(self, places: Ids, stream: Stream) -> Ids:
        rows = np.maximum(places, 0)
        best = selection.noisy_max(self._scores[rows], self.scale, stream)
        substitutes = self.substitutes_of(rows)[np.arange(len(places)), best]
        return np.where(places == UNKNOWN, stream.integers(len(self.vectors), len(places)), substitutes)

    def substitutes_of(self, places: Ids) -> Ids:
        """Returns (words, width) the list of each word, as places of the table; -1 beyond the end of a list.

        Args:
            places: (words,) the words' places in the table.
        """
        if self.guarantee_kind == "strict":
            return self.groups.members[self.groups.group[places]]
        return self.nearest_lists[0][places].astype(np.int64)

    @cached_property
    def groups(self) -> WordGroups:
        """Returns the shared lists of the guarantee "strict"."""
        return self._shared_groups(no_progress) if self.given_groups is None else self.given_groups

    def _shared_groups(self, progress: Progress) -> WordGroups:
        return WordGroups.of(self.vectors, self.order(self.counts), self.k, "cosine", progress)

    @cached_property
    def nearest_lists(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Returns (m, k) the lists of the guarantee "paper", by place, and (m, k) normalised cosines (equation 3)."""
        return self.compute_nearest_lists(no_progress) if self.given_lists is None else self.given_lists

    def compute_nearest_lists(self, progress: Progress) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Computes `nearest_lists`. `progress` receives the number of words that are done."""
        ids, cosines = nearest(self.vectors, self.k, progress)
        return ids, scale_rows(cosines)

    @property
    def _scores(self) -> NDArray[np.float64]:
        """Returns (m, width) the scores of each word's list, in [0, 1], -inf beyond its end."""
        return self.groups.scores if self.guarantee_kind == "strict" else self.nearest_lists[1]


@dataclass(frozen=True)
class RnmMethod(SparingMethod):
    """Makes RNM over a table, by default with k and the share of sensitive words of CMIF (section 4.1).

    Attributes:
        k: how many words a list has.
        guarantee: "paper" for the paper's mechanism, "strict" for the one with a guarantee.
    """

    k: int = limited_field(30, least=2)
    guarantee: Guarantee = "paper"

    name: ClassVar[str] = "rnm"
    by_tokens: ClassVar[bool] = True
    has_lists: ClassVar[bool] = True

    def sanitizer(self, table: WordVectors, counts: NDArray[np.int64] | None) -> Rnm:
        return Rnm(table, self.epsilon, self.k, self.guarantee, self.sparing_rule(counts))
