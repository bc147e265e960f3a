"""The sanitizers by name, with the papers' parameters where none are given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.sanitizers.custext import CusText
from milkglass.sanitizers.frequency import sensitive_words
from milkglass.sanitizers.rnm import Guarantee, Rnm
from milkglass.sanitizers.sanitizer import Sanitizer, Spared, require_epsilon, require_share
from milkglass.sanitizers.santext import SanText, SanTextPlus
from milkglass.sanitizers.tables.neighbours import Metric
from milkglass.sanitizers.tables.table import WordVectors
from milkglass.sanitizers.text import TextSanitizer

METHODS = ("santext", "santext+", "custext", "custext+", "rnm")
SPARING = {"santext+": 0.9, "rnm": 0.2}  # the share of sensitive words (ObfusLM, C.3; CMIF, 4.1)
LISTS = {"custext": 20, "custext+": 20, "rnm": 30}  # words to a list (ObfusLM, C.3; CMIF, 4.1)
P = 0.3  # both papers


@dataclass(frozen=True)
class Method:
    """A sanitizer but for its table. None: the paper's choice; given where a method has no use for it: refused."""

    name: str
    epsilon: float = 1.0
    k: int | None = None
    p: float | None = None
    sensitive: float | None = None  # the share of words that are
    metric: Metric | None = None
    guarantee: Guarantee | None = None
    keep_stopwords: bool = False
    allow: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise UsageError(f"there is no method {self.name!r}", f"methods: {', '.join((*METHODS, 'ghost'))}")
        require_epsilon(self.epsilon)
        require_share("p", P if self.p is None else self.p, "0.3 is the papers' choice")
        require_share("the share of sensitive words", self.sensitive or 0, "0.2 is CMIF's choice")
        if self.sensitive == 0:
            raise UsageError("no word would be sensitive, and nothing be promised of any", "0.2 is CMIF's choice")
        if self.metric not in (None, "cosine", "euclidean"):
            raise UsageError(f"metric is {self.metric!r}", "cosine or euclidean")
        if self.guarantee not in (None, "paper", "strict"):
            raise UsageError(f"the guarantee is {self.guarantee!r}", "paper or strict")
        uses = {
            "k": self.name in LISTS,
            "p": self.name in SPARING,
            "sensitive": self.name in SPARING,
            "metric": self.name in ("custext", "custext+"),
            "guarantee": self.name == "rnm",
        }
        for option, used in uses.items():
            if getattr(self, option) is not None and not used:
                raise UsageError(f"{self.name} has no use for --{option}", "leave it out")

    @property
    def needs_counts(self) -> bool:
        """Whether a corpus must be counted first, to know what is sensitive. Others use counts if there are any."""
        return self.name in SPARING

    def over(self, table: WordVectors, counts: NDArray[np.int64] | None = None) -> TextSanitizer:
        kept = self.keep_stopwords or self.name == "custext+"
        return TextSanitizer(self._sanitizer(table, counts), kept, self.allow)

    def _sanitizer(self, table: WordVectors, counts: NDArray[np.int64] | None) -> Sanitizer:
        if self.name == "santext":
            return SanText(table, self.epsilon)
        k = LISTS.get(self.name, 0) if self.k is None else self.k
        if self.name in ("custext", "custext+"):
            return CusText(table, self.epsilon, k, self.metric or "cosine", counts)
        spared = self._spared(counts)
        if self.name == "santext+":
            return SanTextPlus(table, self.epsilon, spared=spared)
        return Rnm(table, self.epsilon, k, self.guarantee or "paper", spared)

    def _spared(self, counts: NDArray[np.int64] | None) -> Spared:
        if counts is None:
            raise UsageError(
                f"{self.name} must know how often words occur, to spare common ones", "give a corpus with --corpus"
            )
        share = SPARING[self.name] if self.sensitive is None else self.sensitive
        return Spared(sensitive_words(counts, share), P if self.p is None else self.p)

    def document(self) -> dict[str, object]:
        """The parameters as they are used, for a report. Allowed words are counted: they are the user's."""
        result: dict[str, object] = {"method": self.name, "epsilon": self.epsilon}
        if self.name in LISTS:
            result["k"] = LISTS[self.name] if self.k is None else self.k
        if self.name in SPARING:
            result["p"] = P if self.p is None else self.p
            result["sensitive"] = SPARING[self.name] if self.sensitive is None else self.sensitive
        if self.name in ("custext", "custext+"):
            result["metric"] = self.metric or "cosine"
        kept = self.keep_stopwords or self.name == "custext+"
        return {**result, "stopwords_kept": kept, "allowed_words": len(self.allow)}
