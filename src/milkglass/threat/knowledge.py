"""Declares what an attacker knows besides the transcript, field by field."""

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
from milkglass.threat.observations import Activations, Records
from milkglass.threat.training_step import SharedStep

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """Holds scrambled ids and the public ids for which they stand. It is unknown which stands for which.

    Attributes:
        rows: (r,) the scrambled ids.
        members: (m,) the public ids.
        weights: (r, m) how the row of each scrambled id mixes those of the members. None if that was not solved.
    """

    rows: Ids
    members: Ids
    weights: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Candidates:
    """Holds the public ids for which each scrambled id can stand, and how likely each is by what was seen so far.

    Attributes:
        groups: the scrambled ids, and the public ids for which they can stand. No scrambled id is in two groups.
        log_likelihoods: for each group (r, m) the log-likelihood that each row stands for each member, up to a constant
            for each row.

    Raises:
        ValueError: the log-likelihoods have other shapes than the groups.
    """

    groups: tuple[Group, ...]
    log_likelihoods: tuple[NDArray[np.float64], ...]

    def __post_init__(self) -> None:
        for group, values in zip(self.groups, self.log_likelihoods, strict=True):
            if values.shape != (len(group.rows), len(group.members)):
                raise ValueError(f"a likelihood of {values.shape} for {len(group.rows)} x {len(group.members)}")

    @classmethod
    def of_symbols(cls, symbols: Ids) -> Candidates:
        """Returns the candidates by a public map: each symbol stands for any of its tokens, all equally likely.

        Args:
            symbols: (n,) the symbol of each token.
        """
        order = np.argsort(symbols, kind="stable").astype(np.int64)
        rows, starts = np.unique(symbols[order], return_index=True)
        parts = np.split(order, starts[1:])
        groups = tuple(Group(np.array([row]), members) for row, members in zip(rows.tolist(), parts, strict=True))
        return cls(groups, tuple(np.zeros((1, len(members))) for members in parts))

    def for_exchanged_ids(self, responses: RandomisedResponse) -> Candidates:
        """Returns the candidates of ids that were exchanged by randomised response.

        An exchanged id can stand for any token of the exchanged ids, and more likely for one of its own. Each group
        must have one row.

        Args:
            responses: the randomised response, whose `values` are the ids that were exchanged.
        """
        exchanged = [number for number, group in enumerate(self.groups) if np.isin(group.rows, responses.values).all()]
        if not exchanged:
            return self
        own_members = [self.groups[number].members for number in exchanged]
        column_ends = np.cumsum([len(members) for members in own_members])
        likelihood = np.zeros((len(exchanged), int(column_ends[-1])))
        for row, (end, members) in enumerate(zip(column_ends.tolist(), own_members, strict=True)):
            likelihood[row, end - len(members) : end] = responses.log_likelihood_ratio
        merged = Group(np.concatenate([self.groups[number].rows for number in exchanged]), np.concatenate(own_members))
        other_numbers = [number for number in range(len(self.groups)) if number not in {*exchanged}]
        groups = (*(self.groups[number] for number in other_numbers), merged)
        return Candidates(groups, (*(self.log_likelihoods[number] for number in other_numbers), likelihood))

    @property
    def solved_groups(self) -> tuple[Group, ...]:
        """Returns the groups with weights or with one member. The others are a solver's guess at what was left over."""
        return tuple(group for group in self.groups if group.weights is not None or len(group.members) == 1)


@dataclass(frozen=True)
class Recordings:
    """Holds encrypted answers to requests of the attacker's own, whose topics are known.

    Attributes:
        records: the sizes and times of what crossed.
        topics: (answers,) the topic of each answer.
        lengths: the bytes of each token of each answer. None if they are not known.
    """

    records: Records
    topics: Ids
    lengths: Sequences | None = None


def require_known(value: Value | None) -> Value:
    """Returns a field of `Knowledge` that an attack assumes. Raises UsageError if the field is None."""
    if value is None:
        raise UsageError("the attack assumes what this attacker does not know", "ask why_not before an attack is run")
    return value


@dataclass(frozen=True)
class Knowledge:
    """Declares what an attacker has besides the transcript. A field is None if this attacker lacks it.

    The attacker knows the scheme and not its secret (Kerckhoffs): `simulate`, `observe` and `rehearse` run it with the
    attacker's own draws.

    Attributes:
        public_model: the model that was scrambled or cut.
        corpus: public text, in public ids, of the client's kind or of another.
        labels: (texts,) the class of each text behind the gradients, in their order.
        pairs: (p, 2) scrambled ids that leaked, each with its public id.
        candidates: the candidates that an earlier attack found.
        simulate: takes a seed, and returns a model scrambled with the attacker's own key and its map (n,) from public
            to scrambled ids.
        observe: takes public ids and a seed, and returns what the client half would send for them.
        rehearse: takes public ids and a seed, and returns what a sanitizer makes of them and (total,) the place at
            which each was sent, NO_BELIEF for one that was not.
        alias_count: how many scrambled ids each ordinary token has.
        has_shared_ids: whether a scrambled id stands for a cluster of tokens and not for one token.
        has_public_ids: whether the ids that are sent are the public model's own, possibly those of other words, and the
            server's table is the public one.
        symbols: (n,) the scrambled id of each public token, if many tokens have one id by a public map. The attacker
            can then write any public text as it would be sent.
        responses: the randomised response by which ids of `symbols` are exchanged where they occur. None if they are
            not exchanged, or the attacker does not know it.
        step: the model whose gradients are shared, with its loss.
        lengths: (texts,) the number of tokens, special ones too, of each text behind the gradients.
        noise: the noise that is added to hidden states or gradients before they are sent.
        answers: the public ids of each answer, in order, if the server chose its text.
        recordings: encrypted answers of the same service to requests of the attacker's own.
    """

    public_model: Model | None = None
    corpus: Sequences | None = None
    labels: NDArray[np.int64] | None = None
    pairs: Ids | None = None
    candidates: Candidates | None = None
    simulate: Callable[[int], tuple[Model, Ids]] | None = None
    observe: Callable[[Sequences, int], Activations] | None = None
    rehearse: Callable[[Sequences, int], tuple[Sequences, Ids]] | None = None
    alias_count: int = 1
    has_shared_ids: bool = False
    has_public_ids: bool = False
    symbols: Ids | None = None
    responses: RandomisedResponse | None = None
    step: SharedStep | None = None
    lengths: Ids | None = None
    noise: AddedNoise | None = None
    answers: Sequences | None = None
    recordings: Recordings | None = None

    def token_count(self, size: int) -> int:
        """Returns n, the number of public ids, or `size`, the number of scrambled ids, without the public model."""
        return size if self.public_model is None else self.public_model.vocab_size
