"""Sanitizes tokens in an enclave by report-noisy-max (`sanitizers/rnm.py`), with lists that are computed once.

The rarest 20 % of the tokens are sensitive, by the user's corpus if one was counted, or else by a list of English words
(`sanitizers/word_list.py`). The enclave gets the counts from the host: they come from a public list or the user's own
corpus.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from milkglass.enclave.package import TablePackage
from milkglass.errors import EnclaveError
from milkglass.noise.stream import Stream
from milkglass.progress import Stage, no_stage
from milkglass.sanitizers.rnm import Rnm
from milkglass.sanitizers.sanitizer import EPSILON_LIMIT, SHARE_LIMIT, SparingRule, sensitive_words
from milkglass.sanitizers.table import WordVectors

DEFAULT_K, DEFAULT_P, DEFAULT_SENSITIVE_SHARE = 30, 0.3, 0.2  # CMIF, section 4.1
DEFAULT_EPSILON = 3.0  # the largest of CMIF's Table 1; the paper has no default


@dataclass(frozen=True)
class RnmSettings:
    """Holds the parameters of report-noisy-max for tokens (CMIF, section 3.2). Defaults are those of its section 4.1.

    Attributes:
        epsilon: the privacy budget of one token. None: nothing is sanitized.
        p: the probability that a token that is not sensitive is replaced.
        share: the share of the token types in the counts that are sensitive, the rarest ones.
    """

    epsilon: float | None = DEFAULT_EPSILON
    p: float = DEFAULT_P
    share: float = DEFAULT_SENSITIVE_SHARE

    def __post_init__(self) -> None:
        """Raises UsageError for a value out of its range."""
        if self.epsilon is not None:
            EPSILON_LIMIT.require(self.epsilon, "epsilon", "1, 2 and 3 are common")
        SHARE_LIMIT.require(self.p, "p", "0.3 is the paper's choice")
        SHARE_LIMIT.require(self.share, "share", "0.2 is the paper's choice")


def with_candidate_lists(package: TablePackage, k: int = DEFAULT_K, stage: Stage = no_stage) -> TablePackage:
    """Returns the package with candidate lists: for each ordinary row the k others of the largest cosine.

    The scores are those of CMIF's equation 3.

    Args:
        package: the table.
        k: the length of a list.
        stage: reports the progress in rows.
    """
    table = WordVectors(tuple(map(str, range(len(package.rows)))), package.vectors(), package.special, "the model")
    row_count = len(table.candidates)
    near, scores = Rnm(table, 1.0, k).compute_nearest_lists(stage("compute candidate lists", row_count))
    return package.with_lists(near, scores)


@dataclass(frozen=True)
class TokenSanitizer:
    """Replaces tokens of one model's vocabulary by report-noisy-max.

    Attributes:
        package: the table with candidate lists.
        counts: (n,) how often each token occurs in the user's corpus, or else in a list of English words.
    """

    package: TablePackage = field(repr=False)
    counts: NDArray[np.int64] = field(repr=False)

    def sanitize(self, ids: NDArray[np.int64], settings: RnmSettings, stream: Stream) -> NDArray[np.int64]:
        """Returns (t,) the ids after replacement, one for each of `ids`. Special tokens are unchanged.

        Raises UsageError for a wrong parameter, and EnclaveError for a package without candidate lists.
        """
        if settings.epsilon is None:
            return ids
        sparing = SparingRule(sensitive_words(self.counts, settings.share), settings.p)
        package = self.package
        if package.near is None or package.scores is None:
            raise EnclaveError("the enclave holds no candidate lists", "build it again")
        candidate_lists = (package.near, package.scores)
        mechanism = Rnm(
            self._table, settings.epsilon, candidate_lists[0].shape[1], "paper", sparing, given_lists=candidate_lists
        )
        return mechanism.sanitize(ids, stream)

    @cached_property
    def _table(self) -> WordVectors:
        """Returns the rows' names with empty vectors: cosines come from the lists."""
        empty = np.zeros((len(self.package.rows), 0), np.float32)
        return WordVectors(tuple(map(str, range(len(empty)))), empty, self.package.special, "the model")
