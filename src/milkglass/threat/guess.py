"""Defines a guess: what an attack believes. truth.py, which no attack may import, grades it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.sequences import Ids, Sequences

NO_BELIEF = -1  # the entry where no public id is guessed


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
        if self.probabilities is not None:
            total, k = (0, 0) if self.by_token is None else self.by_token.shape
            if self.probabilities.shape != (total, k + 1):
                raise ValueError(f"probabilities of {self.probabilities.shape} for {total} tokens with {k} ids each")

    def for_tokens(self, tokens: Sequences) -> Ids:
        """Returns (total, k) the guess for each token that was sent, from `by_token` or `by_id`.

        Raises ValueError if `by_token` has more or fewer rows than there are tokens.
        """
        if self.by_token is not None:
            if len(self.by_token) != len(tokens.ids):
                raise ValueError(f"{len(self.by_token)} guesses for {len(tokens.ids)} tokens")
            return self.by_token
        assert self.by_id is not None
        return self.by_id[tokens.ids]
