"""What an attacker knows besides the transcript, declared field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.models.view import Model
from milkglass.noise.grid import AddedNoise
from milkglass.noise.responses import RandomisedResponse
from milkglass.sequences import Ids, Sequences
from milkglass.threat.observations import Activations
from milkglass.threat.training_step import SharedStep

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Scrambled ids `rows` (r,) which stand for the public ids `members` (m,), in an unknown order.

    Attributes:
        weights: (r, m) how each row mixes the members, where that was solved, else None.
    """

    rows: Ids
    members: Ids
    weights: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Candidates:
    """What each scrambled id can stand for, and how likely that is from what was seen so far.

    Attributes:
        groups: disjoint in rows.
        likelihood: one (r, m) array a group, logarithms up to a constant for each row.
    """

    groups: tuple[Group, ...]
    likelihood: tuple[NDArray[np.float64], ...]

    def __post_init__(self) -> None:
        for group, values in zip(self.groups, self.likelihood, strict=True):
            if values.shape != (len(group.rows), len(group.members)):
                raise ValueError(f"a likelihood of {values.shape} for {len(group.rows)} x {len(group.members)}")

    @classmethod
    def of_symbols(cls, symbols: Ids) -> Candidates:
        """What a public map says, and no more: the tokens of each symbol, all alike. symbols: (n,) the scrambled id of
        each public one."""
        order = np.argsort(symbols, kind="stable").astype(np.int64)
        rows, starts = np.unique(symbols[order], return_index=True)
        parts = np.split(order, starts[1:])
        groups = tuple(Group(np.array([row]), members) for row, members in zip(rows.tolist(), parts, strict=True))
        return cls(groups, tuple(np.zeros((1, len(members))) for members in parts))

    def exchanged(self, responses: RandomisedResponse) -> Candidates:
        """What ids can stand for that were exchanged with each other where they occur: any token of these ids, and
        likelier one of their own. Of candidates whose groups have one row each."""
        at = [i for i, one in enumerate(self.groups) if np.isin(one.rows, responses.values).all()]
        if not at:
            return self
        own = [self.groups[i].members for i in at]
        ends = np.cumsum([len(one) for one in own])
        likelihood = np.zeros((len(at), int(ends[-1])))
        for row, (end, members) in enumerate(zip(ends.tolist(), own, strict=True)):
            likelihood[row, end - len(members) : end] = responses.advantage
        merged = Group(np.concatenate([self.groups[i].rows for i in at]), np.concatenate(own))
        rest = [i for i in range(len(self.groups)) if i not in {*at}]
        groups = (*(self.groups[i] for i in rest), merged)
        return Candidates(groups, (*(self.likelihood[i] for i in rest), likelihood))

    @property
    def solved(self) -> tuple[Group, ...]:
        """Groups that were worked out; the others are a solver's best guess for what was left over."""
        return tuple(one for one in self.groups if one.weights is not None or len(one.members) == 1)


def required(value: T | None) -> T:
    """A field of the knowledge that an attack assumes: `why_not` has made sure that it is there."""
    if value is None:
        raise UsageError("the attack assumes what this attacker does not know", "ask why_not before an attack is run")
    return value


@dataclass(frozen=True)
class Knowledge:
    """What the adversary has besides the transcript. None: this adversary lacks it.

    Attributes:
        corpus: public text, in public ids, of the same kind as the client's or not.
        pairs: (p, 2) scrambled and public ids that leaked.
        candidates: what an earlier attack worked out.
        simulate: the same scheme under the attacker's own key (Kerckhoffs): for a seed, the scrambled model and its map
            (n,) from public to scrambled ids.
        observe: what the same client half would send for these public ids, with the attacker's own draws from a seed.
        rehearse: what a sanitizer makes of these public ids, with draws from a seed, and (total,) where each of them
            was sent, NO_BELIEF where nowhere.
        aliases: how many scrambled ids each ordinary token has, by the scheme (Kerckhoffs).
        shared: whether an id stands for a cluster instead of a token, by the scheme.
        symbols: (n,) the scrambled id of each public token, where many tokens have one id and that map is known: so the
            attacker can write any public text as it would be sent.
        responses: by which such an id is exchanged for another where it occurs, by the scheme; None: it is not.
        step: the model whose gradients are shared, and its loss.
        labels, lengths: (b,) the class of each text behind the gradients, in their order, and its tokens, special ones
            too.
        noise: what is added to what is sent.
        answers: public ids of the text of each answer, in their order, where the server wrote them itself.
    """

    public_model: Model | None = None
    corpus: Sequences | None = None
    labels: NDArray[np.int64] | None = None
    pairs: Ids | None = None
    candidates: Candidates | None = None
    simulate: Callable[[int], tuple[Model, Ids]] | None = None
    observe: Callable[[Sequences, int], Activations] | None = None
    rehearse: Callable[[Sequences, int], tuple[Sequences, Ids]] | None = None
    aliases: int = 1
    shared: bool = False
    symbols: Ids | None = None
    responses: RandomisedResponse | None = None
    step: SharedStep | None = None
    lengths: Ids | None = None
    noise: AddedNoise | None = None
    answers: Sequences | None = None

    def tokens(self, size: int) -> int:
        """How many public ids there are.

        Args:
            size: n', how many scrambled ones; the same where each token has one of its own.
        """
        return size if self.public_model is None else self.public_model.size
