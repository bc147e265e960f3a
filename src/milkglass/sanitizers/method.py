"""Defines a sanitizer without its table, as commands and recipes name it with parameters."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.parameters import limited_field, parameters_of, require
from milkglass.sanitizers.sanitizer import EPSILON_LIMIT, Sanitizer, SparingRule, sensitive_words
from milkglass.sanitizers.table import WordVectors
from milkglass.sanitizers.text import Splitting, TextSanitizer, TokenReader, TokenTextSanitizer, WordReader

Reader = WordReader | TokenReader
TEXT_PARAMETERS = ("keep_stopwords", "allow")  # those of `TextSanitizer`, not of the mechanism


@dataclass(frozen=True)
class SanitizerMethod(abc.ABC):
    """Makes a sanitizer over a table. Subclasses are frozen dataclasses whose fields are the parameters.

    Attributes:
        epsilon: the privacy budget of a word, or of a token.
        keep_stopwords: whether STOPWORDS cross unchanged.
        allow: further words that cross unchanged.
        needs_counts: whether a corpus must be counted first. Other methods use counts if there are any.
        by_tokens: whether the paper replaces tokens of the model, not words.
        has_lists: whether lists of words are made before the first word is drawn, which takes time.
    """

    epsilon: float = limited_field(1.0, least=EPSILON_LIMIT.low, most=EPSILON_LIMIT.high, hint="1, 2 and 3 are common")
    keep_stopwords: bool = False
    allow: frozenset[str] = frozenset()

    name: ClassVar[str]
    needs_counts: ClassVar[bool] = False
    by_tokens: ClassVar[bool] = False
    has_lists: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self)

    @abc.abstractmethod
    def sanitizer(self, table: WordVectors, counts: NDArray[np.int64] | None) -> Sanitizer:
        """Returns the mechanism over a table.

        Args:
            table: the words, and their vectors.
            counts: (n,) how often each word occurs. None: not counted.
        """

    @property
    def keeps_stopwords(self) -> bool:
        """Returns whether stopwords cross unchanged: as the user says, or because the method demands it."""
        return self.keep_stopwords

    def text_sanitizer(
        self, table: WordVectors, counts: NDArray[np.int64] | None = None, splitting: Splitting = "pieces"
    ) -> TextSanitizer:
        """Returns the mechanism over a table in front of text, which is split into words."""
        return TextSanitizer(self.sanitizer(table, counts), self.keeps_stopwords, self.allow, splitting)

    def with_reader(
        self, reader: Reader, counts: NDArray[np.int64] | None = None
    ) -> TextSanitizer | TokenTextSanitizer:
        """Returns the mechanism in front of text, which the reader splits into words or tokens of its table.

        Raises UsageError for tokens if the method keeps some words.
        """
        if isinstance(reader, WordReader):
            return self.text_sanitizer(reader.table, counts, reader.splitting)
        self.require_by_tokens()
        return TokenTextSanitizer(self.sanitizer(reader.table, counts), reader)

    def require_by_tokens(self) -> None:
        """Raises UsageError for a method that keeps some words."""
        if self.keeps_stopwords or self.allow:
            raise UsageError(f"{self.name} keeps some words, and tokens are to be replaced", "replace words instead")

    def document(self) -> dict[str, Any]:
        """Returns the parameters for a report. Allowed words are only counted: they are the user's."""
        parameters = {name: getattr(self, name) for name in parameters_of(type(self)) if name not in TEXT_PARAMETERS}
        texts = {"stopwords_kept": self.keeps_stopwords, "allowed_words": len(self.allow)}
        return {"method": self.name, **parameters, **texts}


@dataclass(frozen=True)
class SparingMethod(SanitizerMethod):
    """Makes a sanitizer that always replaces sensitive words, the rarest ones, and others with probability p.

    Attributes:
        p: the probability with which a word that is not sensitive is replaced; 0.3 in both papers.
        sensitive: the share of the words that are sensitive.
    """

    p: float = limited_field(0.3, most=1, hint="0.3 is the papers' choice")
    sensitive: float = limited_field(
        0.2, above=0, most=1, hint="with 0 no word would be protected; 0.2 is CMIF's choice"
    )

    needs_counts: ClassVar[bool] = True

    def sparing_rule(self, counts: NDArray[np.int64] | None) -> SparingRule:
        """Returns which words are always replaced, by how often each occurs. Raises UsageError without counts."""
        if counts is None:
            raise UsageError(
                f"{self.name} must know how often words occur, to spare common ones", "give a corpus with --corpus"
            )
        return SparingRule(sensitive_words(counts, self.sensitive), self.p)
