"""What an attacker guesses. A guess is graded in truth.py, which no attack may import."""

from __future__ import annotations

from dataclasses import dataclass

from milkglass.sequences import Ids, Sequences

NO_BELIEF = -1  # a guess that names no public id


@dataclass(frozen=True)
class Guess:
    """What an attack believes. One of its four fields is there.

    Attributes:
        table: (n, k) for each scrambled id the public ids it may stand for, likeliest first, NO_BELIEF where there is
            none.
        running: the same for each token that was sent, (total, k), where the attack reads places and not ids.
        bags: for each text the set of public ids in it, where the attack reads no order.
        texts: public ids of whole texts, for each of `Gradients` as many as its batch has, in any order.
    """

    table: Ids | None = None
    running: Ids | None = None
    bags: tuple[Ids, ...] | None = None
    texts: Sequences | None = None

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.table, self.running, self.bags, self.texts)) != 1:
            raise ValueError("a guess is about ids, about places, about bags of words or about whole texts")

    def at(self, tokens: Sequences) -> Ids:
        """(total, k): the guess for each token sent."""
        if self.running is not None:
            if len(self.running) != len(tokens.ids):
                raise ValueError(f"{len(self.running)} guesses for {len(tokens.ids)} tokens")
            return self.running
        assert self.table is not None
        return self.table[tokens.ids]
