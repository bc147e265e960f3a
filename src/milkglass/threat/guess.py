"""What an attacker guesses. A guess is graded in truth.py, which no attack may import."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.sequences import Ids, Sequences

NO_BELIEF = -1  # a guess that names no public id


@dataclass(frozen=True)
class Guess:
    """What an attack believes. One of the first four fields is there.

    Attributes:
        table: (n, k) for each scrambled id the public ids it may stand for, likeliest first, NO_BELIEF where there is
            none.
        running: the same for each token that was sent, (total, k), where the attack reads places and not ids.
        bags: for each text the set of public ids in it, where the attack reads no order.
        texts: public ids of whole texts, for each of `Gradients` as many as its batch has, in any order.
        chances: beside `running`, (total, k + 1), how likely each listed token is, and last how likely each other one,
            up to its weight.
        weights: (n,) of each public id that is not listed; None: all weigh 1.
    """

    table: Ids | None = None
    running: Ids | None = None
    bags: tuple[Ids, ...] | None = None
    texts: Sequences | None = None
    chances: NDArray[np.float64] | None = None
    weights: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.table, self.running, self.bags, self.texts)) != 1:
            raise ValueError("a guess is about ids, about places, about bags of words or about whole texts")
        if self.chances is not None:
            total, k = (0, 0) if self.running is None else self.running.shape
            if self.chances.shape != (total, k + 1):
                raise ValueError(f"chances of {self.chances.shape} for {total} places with {k} tokens each")

    def at(self, tokens: Sequences) -> Ids:
        """(total, k): the guess for each token sent."""
        if self.running is not None:
            if len(self.running) != len(tokens.ids):
                raise ValueError(f"{len(self.running)} guesses for {len(tokens.ids)} tokens")
            return self.running
        assert self.table is not None
        return self.table[tokens.ids]
