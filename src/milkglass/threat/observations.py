"""What an attacker sees: the observations of a transcript.

A transcript is all that crossed to, or rests on, the server's side. Public ids are the ids of the public tokenizer,
scrambled ids those that crossed the wire; a vocabulary has n of each, or more scrambled ones, n', where a token has
several (aliases). What is numbered by scrambled ids has n' rows, n where nothing else is said.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from milkglass.errors import UsageError
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences


class Observation(abc.ABC):  # noqa: B024 - a closed family: these five, and no other
    """One kind of thing that the server's side holds or receives."""


@dataclass(frozen=True)
class Tokens(Observation):
    """Scrambled ids that the client sent.

    Attributes:
        purpose: "train", "infer", or "" where it is not known.
        types: of the same shape, which of two texts each belongs to, where that was sent.
    """

    ids: Sequences
    purpose: str = ""
    types: Sequences | None = None


@dataclass(frozen=True)
class Weights(Observation):
    """A model at rest on the server.

    Attributes:
        tuned: after fine-tuning, else as it was uploaded.
    """

    model: Model
    tuned: bool = False


@dataclass(frozen=True)
class Activations(Observation):
    """Hidden states after `layer` layers (0: the embeddings): `hidden` (total, d), a row a token of `lengths`.

    Attributes:
        pooled: one row a text, and every length is 1.
        mixed: (texts,) how many rows stand for each text, where they are linear combinations of what enters the next
            layer's attention and of rows that stand for nothing; None: a row is a token's.
    """

    hidden: torch.Tensor
    lengths: Ids
    layer: int
    pooled: bool = False
    mixed: Ids | None = None


@dataclass(frozen=True)
class Gradients(Observation):
    """What one client shares of one step: the gradient of the mean loss of a batch, by parameters' names.

    Attributes:
        round: which step of its training this was, from 0.
    """

    tensors: Mapping[str, torch.Tensor]
    batch_size: int
    round: int


@dataclass(frozen=True)
class Outputs(Observation):
    """Scrambled ids that the server generated.

    Attributes:
        prompts: what each followed, where that was recorded.
    """

    ids: Sequences
    prompts: Sequences | None = None


Kind = TypeVar("Kind", bound=Observation)


@dataclass(frozen=True)
class Transcript:
    """All observations of one client, in the order in which they were made.

    Attributes:
        size: n', how many scrambled ids there are.
        key_id: the public identifier of the key, where it was recorded.
    """

    observations: tuple[Observation, ...]
    size: int
    key_id: str | None = None

    def __post_init__(self) -> None:
        for one in self.observations:
            if isinstance(one, Tokens | Outputs) and one.ids.ids.size:
                low, high = int(one.ids.ids.min()), int(one.ids.ids.max())
                if low < 0 or high >= self.size:
                    raise UsageError(
                        f"an id of {low if low < 0 else high} in a vocabulary of {self.size}",
                        "the transcript and the model do not belong together",
                    )

    def all(self, kind: type[Kind]) -> tuple[Kind, ...]:
        return tuple(one for one in self.observations if isinstance(one, kind))

    @property
    def kinds(self) -> frozenset[type[Observation]]:
        return frozenset(type(one) for one in self.observations)

    @property
    def tokens(self) -> Sequences:
        """Everything that the client sent, as one list of sequences."""
        return Sequences.of(part for one in self.all(Tokens) for part in one.ids)

    def weights(self, tuned: bool) -> Model | None:
        """The last model uploaded, or the last one tuned."""
        result = [one.model for one in self.all(Weights) if one.tuned == tuned]
        return result[-1] if result else None

    @property
    def outputs(self) -> Sequences:
        """Everything that the server generated, as one list of sequences."""
        return Sequences.of(part for one in self.all(Outputs) for part in one.ids)

    @property
    def table(self) -> torch.Tensor:
        """(n, d) the scrambled embeddings of `model`."""
        return self.model.table

    @property
    def model(self) -> Model:
        """The scrambled model; as uploaded, if that was seen, since training only blurs it.

        Raises:
            UsageError: there is none.
        """
        model = self.weights(tuned=False) or self.weights(tuned=True)
        if model is None:
            raise UsageError("this transcript holds no weights", "ask why_not before an attack is run")
        return model
