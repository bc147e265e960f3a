"""SANTEXT: draws a substitute from the whole vocabulary, the likelier the nearer (Yue et al., Findings of ACL 2021).

    p(y | x) = exp(-eps/2 |x - y|) / sum over y' of exp(-eps/2 |x - y'|)         Euclidean, y = x included

This is the exponential mechanism with the score -|x - y|, and metric local DP: for all words x, x' and y, p(y | x) <=
exp(eps |x - x'|) p(y | x'). SANTEXT+ (Algorithm 2) always replaces sensitive words, and others with probability p; its
y are only the sensitive words of the corpus. santext_heads.py draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from milkglass import papers
from milkglass.accounting import upward
from milkglass.errors import UsageError
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.parameters import limited
from milkglass.sanitizers.method import SanitizerMethod, SparingMethod
from milkglass.sanitizers.sanitizer import Sanitizer, Spared
from milkglass.sanitizers.santext_heads import Heads
from milkglass.sanitizers.tables.table import Ids, Mask, WordVectors


@dataclass(frozen=True, eq=False)
class SanText(Sanitizer):
    """The mechanism. An unknown word is treated as if it lay at the table's mean.

    Attributes:
        epsilon: per unit of embedding distance.
    """

    paper: ClassVar[Paper] = papers.SANTEXT.but(
        "The published code draws from BERT's whole vocabulary; special tokens and [unusedN] are not candidates.",
        "Unknown words and numbers are drawn for as if they lay at the mean of the table.",
        "Published workers share a random state and draw equally; ours are independent.",
    )

    @property
    def guarantee(self) -> str | None:
        budget = f"{upward(self.epsilon)} times the distance of two words"
        return f"metric local DP: {budget}, for one word, down to probabilities of 2^-52"

    def draw(self, places: Ids, stream: Stream) -> Ids:
        return self.heads.draw(places, stream)

    def outputs(self) -> Ids:
        """Returns (s,) the places that may be drawn."""
        return np.arange(len(self.vectors))

    @cached_property
    def heads(self) -> Heads:
        return Heads(self.vectors, self.epsilon, self.outputs())


@dataclass(frozen=True, eq=False)
class SanTextPlus(SanText):
    """The mechanism that replaces words that are not sensitive only with probability p.

    Attributes:
        spared: which words are sensitive, and p.
        occurring: (n,) the words of the corpus. The sensitive ones among them are the substitutes: V_S of Algorithm 2.
    """

    paper: ClassVar[Paper] = papers.SANTEXT.but(
        "Words that are not in the corpus are sensitive, and are drawn for by their distance; the published code takes "
        "a uniform word of the corpus.",
        "Unknown words and numbers are drawn for as if they lay at the mean of the table.",
        "Published workers share a random state and draw equally; ours are independent.",
    )

    spared: Spared = field(kw_only=True)
    occurring: Mask = field(kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spared.check(self.table)
        if self.occurring.shape != (len(self.table),):
            raise UsageError(
                f"the corpus's words have shape {self.occurring.shape}", f"give a mask of {len(self.table)}"
            )
        if not len(self.outputs()):
            raise UsageError(
                "no word of the corpus is sensitive, and SANTEXT+ draws substitutes from those",
                "give a larger share of sensitive words, or a corpus with words of the table",
            )

    @property
    def drawn_from(self) -> int:
        return len(self.outputs())

    def outputs(self) -> Ids:
        return np.flatnonzero((self.spared.sensitive & self.occurring)[self.table.candidates])

    @property
    def guarantee(self) -> str | None:
        return (
            f"{super().guarantee}, between sensitive words only; other words have none, "
            "and which words the corpus has, from which substitutes are drawn, is not covered"
        )

    def due(self, ids: Ids, stream: Stream) -> Mask:
        return self.spared.due(ids, stream)

    def sensitivity(self) -> Mask | None:
        return self.spared.sensitive


def halfway(table: WordVectors) -> float:
    """Returns the epsilon near which every second word of a table is drawn as itself.

    A word x of n stays with probability 1 / sum over y of exp(-eps/2 |x - y|), which is one half if the n others weigh
    1 together. With all of them at the mean distance d: n exp(-eps/2 d) = 1, and eps = 2 ln(n) / d. Distances spread
    around d and near words count most, so the true value is somewhat larger (section 3.2's equation).
    """
    vectors = table.vectors[table.candidates].astype(np.float64)
    distance = np.linalg.norm(vectors - np.roll(vectors, len(vectors) // 2, axis=0), axis=1).mean()
    return float(2 * np.log(len(vectors)) / distance) if distance > 0 else 0.0


@dataclass(frozen=True)
class SanTextMethod(SanitizerMethod):
    """The SANTEXT method."""

    name: ClassVar[str] = "santext"

    def sanitizer(self, table: WordVectors, counts: NDArray[np.int64] | None) -> SanText:
        return SanText(table, self.epsilon)


@dataclass(frozen=True)
class SanTextPlusMethod(SparingMethod):
    """SANTEXT+, by default with the share of sensitive words of ObfusLM's comparison (C.3)."""

    sensitive: float = limited(0.9, above=0, most=1, hint="with 0 no word would be protected; 0.2 is CMIF's choice")

    name: ClassVar[str] = "santext+"

    def document(self) -> dict[str, Any]:
        """Returns the parameters and the law.

        Saved halves whose substitutes came from the whole table are refused by it.
        """
        return {**super().document(), "substitutes": "sensitive words of the corpus"}

    def sanitizer(self, table: WordVectors, counts: NDArray[np.int64] | None) -> SanTextPlus:
        spared = self.spared(counts)
        assert counts is not None  # `spared` refuses that
        return SanTextPlus(table, self.epsilon, spared=spared, occurring=counts > 0)
