"""Defines a guess: what an attack believes. It is graded in truth.py, which no attack may import."""

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
        table: (n, k) the public ids for which each scrambled id may stand, the likeliest first, and NO_BELIEF where
            there are no more. For an attack that reads ids.
        running: (total, k) the public ids that each token that was sent may be, as in `table`. For an attack that reads
            places.
        bags: the set of public ids of each text. For an attack that reads no order.
        texts: the public ids of whole texts, as many as each batch of `Gradients` has, in any order.
        topics: (answers,) the topic of each answer. For an attack that sees only sizes and times.
        token_lengths: beside `topics`, the bytes of each token of each answer. None if they are not guessed.
        chances: (total, k + 1) the probability of each token in `running`. The last column is the probability of any
            other token, which is to be multiplied by the token's weight.
        weights: (n,) the weight of each public id, for tokens that `running` does not list. None if all weigh 1.

    Raises:
        ValueError: none or several of the first five fields are set, or `chances` do not fit `running`.
    """

    table: Ids | None = None
    running: Ids | None = None
    bags: tuple[Ids, ...] | None = None
    texts: Sequences | None = None
    topics: Ids | None = None
    token_lengths: Sequences | None = None
    chances: NDArray[np.float64] | None = None
    weights: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.table, self.running, self.bags, self.texts, self.topics)) != 1:
            raise ValueError(
                "a guess is about ids, about places, about bags of words, about whole texts or about topics"
            )
        if self.chances is not None:
            total, k = (0, 0) if self.running is None else self.running.shape
            if self.chances.shape != (total, k + 1):
                raise ValueError(f"chances of {self.chances.shape} for {total} places with {k} tokens each")

    def at(self, tokens: Sequences) -> Ids:
        """Returns (total, k) the guess for each token that was sent, from `running` or `table`.

        Raises ValueError if `running` has more or fewer rows than there are tokens.
        """
        if self.running is not None:
            if len(self.running) != len(tokens.ids):
                raise ValueError(f"{len(self.running)} guesses for {len(tokens.ids)} tokens")
            return self.running
        assert self.table is not None
        return self.table[tokens.ids]
