"""Defines a guess: what an attack believes. truth.py, which no attack may import, grades it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.sequences import Ids, Sequences

NO_BELIEF = -1  # the entry where no public id is guessed
ROUNDING = 1e-6  # by which a probability may exceed 1


@dataclass(frozen=True)
class Guess:
    """Holds what an attack believes. Exactly one of the first five fields is set.

    Attributes:
        by_id: (n, k) the public ids for which each scrambled id may stand, the likeliest first, and NO_BELIEF where
            there are no more. For an attack that reads ids.
        by_token: (total, k) the public ids that each sent token may be, as in `by_id`. For an attack that reads tokens
            one by one.
        bags: the set of public ids of each text. For an attack that reads no order.
        texts: the public ids of whole texts, as many as each batch of `Gradients` has, in any order.
        topics: (answers,) the topic of each answer. For an attack that sees only sizes and times.
        token_lengths: beside `topics`, the bytes of each token of each answer. None if they are not guessed.
        probabilities: (total, k + 1) the probability of each id in `by_token`. The last column, multiplied by an id's
            entry in `weights`, is the probability of an id that `by_token` does not list.
        weights: (n,) the factor of each public id by which the last column is multiplied. None: all are 1.

    Raises:
        ValueError: none or several of the first five fields are set, or `probabilities` do not fit `by_token`.
        UsageError: `by_id` or `by_token` is no table of ids, or `probabilities` holds a number that is no probability.
    """

    by_id: Ids | None = None
    by_token: Ids | None = None
    bags: tuple[Ids, ...] | None = None
    texts: Sequences | None = None
    topics: Ids | None = None
    token_lengths: Sequences | None = None
    probabilities: NDArray[np.float64] | None = None
    weights: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if sum(belief is not None for belief in (self.by_id, self.by_token, self.bags, self.texts, self.topics)) != 1:
            raise ValueError(
                "a guess is about ids, about tokens, about bags of words, about whole texts or about topics"
            )
        for name, table in (("by_id", self.by_id), ("by_token", self.by_token)):
            if table is not None:
                _require_ids(name, table)
        if self.probabilities is not None:
            total, k = (0, 0) if self.by_token is None else self.by_token.shape
            if self.probabilities.shape != (total, k + 1):
                raise ValueError(f"probabilities of {self.probabilities.shape} for {total} tokens with {k} ids each")
            _require_probabilities(self.probabilities)

    def for_tokens(self, tokens: Sequences) -> Ids:
        """Returns (total, k) the guess for each token that was sent, from `by_token` or `by_id`.

        Raises UsageError if `by_token` has more or fewer rows than there are tokens.
        """
        if self.by_token is not None:
            if len(self.by_token) != len(tokens.ids):
                raise UsageError(
                    f"by_token of a guess has {len(self.by_token):,} rows for {len(tokens.ids):,} tokens",
                    "give a row for each token of all texts, special ones too",
                )
            return self.by_token
        assert self.by_id is not None
        return self.by_id[tokens.ids]


def _require_ids(name: str, table: Ids) -> None:
    """Raises UsageError if a field of a guess is no table of whole numbers, with one or more ids in each row."""
    hint = "give an array of whole numbers, (ids, ranks) or (tokens, ranks): one guess each is ids[:, None]"
    if not isinstance(table, np.ndarray):
        raise UsageError(f"{name} of a guess is of the type {type(table).__name__}, a NumPy array is needed", hint)
    if table.ndim != 2 or not table.shape[1] or table.dtype.kind not in "iu":
        raise UsageError(f"{name} of a guess has the shape {table.shape} and the type {table.dtype}", hint)
    if table.min(initial=0) < NO_BELIEF:
        raise UsageError(f"{name} of a guess holds the id {table.min()}", f"{NO_BELIEF} says that nothing is guessed")


def _require_probabilities(probabilities: NDArray[np.float64]) -> None:
    """Raises UsageError for a number that is no probability. The last column is one only after `weights`."""
    is_wrong = ~(probabilities >= 0)  # true of NaN
    is_wrong[:, :-1] |= probabilities[:, :-1] > 1 + ROUNDING
    is_wrong |= np.isinf(probabilities)
    if is_wrong.any():
        raise UsageError(
            f"{is_wrong.sum():,} of {probabilities.size:,} probabilities of a guess are NaN, below 0 or above 1",
            "give numbers from 0 to 1",
        )
