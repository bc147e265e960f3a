"""The sanitizer in an enclave: report-noisy-max by token (`sanitizers/rnm.py`), with lists that are computed once.

Sensitive are the rarest 20 % of the tokens, by the user's corpus where one was counted. Without one the vocabulary's
order stands in, and it is weak: byte-pair merges are numbered as they were learnt, which is near to frequency for words
of the text that made them, and says nothing of names, numbers and words of other languages, which pieces spell. Pieces
of one byte or one character have the lowest ids of some vocabularies and the highest of others: they count as rare.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.enclave.package import TablePackage
from milkglass.errors import EnclaveError
from milkglass.noise.stream import Stream
from milkglass.sanitizers.rnm import Rnm
from milkglass.sanitizers.sanitizer import EPSILON as EPSILON_LIMIT
from milkglass.sanitizers.sanitizer import SHARE as SHARE_LIMIT
from milkglass.sanitizers.sanitizer import Spared, sensitive_words
from milkglass.sanitizers.tables.table import WordVectors

K, P, SHARE = 30, 0.3, 0.2  # CMIF, section 4.1
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte of a character that has no token (SentencePiece)
EPSILON = 3.0  # the largest of its Table 1; the paper names no default


@dataclass(frozen=True)
class RnmSettings:
    """The sanitizer's parameters (CMIF, section 3.2; p and share as in 4.1).

    Attributes:
        epsilon: the budget of one token; None: nothing is sanitized.
        p: how often a token that is not sensitive is replaced.
        share: the share of tokens that are sensitive.
    """

    epsilon: float | None = EPSILON
    p: float = P
    share: float = SHARE

    def __post_init__(self) -> None:
        """Raises UsageError for a value out of its range."""
        if self.epsilon is not None:
            EPSILON_LIMIT.require(self.epsilon, "epsilon", "1, 2 and 3 are common")
        SHARE_LIMIT.require(self.p, "p", "0.3 is the paper's choice")
        SHARE_LIMIT.require(self.share, "share", "0.2 is the paper's choice")


def with_lists(package: TablePackage, k: int = K) -> TablePackage:
    """Compute the candidate lists: the k others of the largest cosine for each ordinary row, scores by equation 3."""
    table = WordVectors(tuple(map(str, range(len(package.rows)))), package.vectors(), package.special, "the model")
    near, scores = Rnm(table, 1.0, k).nearest_lists
    return package.with_lists(near, scores)


def vocabulary_counts(tokenizer: Any, rows: int) -> NDArray[np.int64]:
    """(rows,) in place of counts: the vocabulary's order, and 0 for tokens of one byte or one character."""
    counts = np.arange(rows, 0, -1)
    known = min(len(tokenizer), rows)
    tokens = tokenizer.convert_ids_to_tokens(range(known))
    counts[:known][[token is not None and (len(token) == 1 or bool(BYTE.fullmatch(token))) for token in tokens]] = 0
    return counts


@dataclass(frozen=True)
class TokenSanitizer:
    """Replaces tokens of one model.

    Attributes:
        package: the table with its lists.
        counts: (n,) how often each token occurs in the user's corpus, or `vocabulary_counts`.
    """

    package: TablePackage = field(repr=False)
    counts: NDArray[np.int64] = field(repr=False)

    def sanitized(self, ids: NDArray[np.int64], settings: RnmSettings, stream: Stream) -> NDArray[np.int64]:
        """(t,) to (t,). Special tokens are unchanged. Raises UsageError for a parameter out of its range."""
        if settings.epsilon is None:
            return ids
        spared = Spared(sensitive_words(self.counts, settings.share), settings.p)
        package = self.package
        if package.near is None or package.scores is None:
            raise EnclaveError("the enclave holds no candidate lists", "build it again")
        lists = (package.near, package.scores)
        mechanism = Rnm(self._table, settings.epsilon, lists[0].shape[1], "paper", spared, given_lists=lists)
        return mechanism.sanitize(ids, stream)

    @cached_property
    def _table(self) -> WordVectors:
        """The rows' numbers without their vectors, which the lists make needless."""
        empty = np.zeros((len(self.package.rows), 0), np.float32)
        return WordVectors(tuple(map(str, range(len(empty)))), empty, self.package.special, "the model")
