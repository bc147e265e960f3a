"""Defines what an attacker sees: the observations of a transcript.

A transcript is all that crossed to the server or is stored there. Public ids are the ids of the public tokenizer, and
scrambled ids are those that crossed the wire. A vocabulary has n of each, or n' > n scrambled ids where a token has
several (aliases). Arrays by scrambled id have n' rows, which is written n where it makes no difference.
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


class Observation(abc.ABC):  # noqa: B024 - a closed family: the six below
    """Holds one kind of data that an attacker sees on the server or on the network. The base of all kinds."""


@dataclass(frozen=True)
class Tokens(Observation):
    """Holds scrambled ids that the client sent.

    Attributes:
        ids: a sequence for each text.
        purpose: "train" or "infer", or "" if it is not known.
        token_types: 0 or 1 for each id: whether it belongs to the first or the second text of a pair. None: not sent.
    """

    ids: Sequences
    purpose: str = ""
    token_types: Sequences | None = None


@dataclass(frozen=True)
class Weights(Observation):
    """Holds a model that is stored on the server.

    Attributes:
        model: the model, under scrambled ids.
        tuned: whether the model was fine-tuned; otherwise it is as it was uploaded.
    """

    model: Model
    tuned: bool = False


@dataclass(frozen=True)
class Activations(Observation):
    """Holds hidden states that the client sent.

    Attributes:
        hidden: (total, d) a row for each token of each text.
        lengths: (texts,) how many tokens each text has; 1 each if rows are pooled.
        layer: how many layers have run; with 0 these are embeddings.
        pooled: whether each text has one row alone.
        mixed_row_counts: (texts,) how many rows of `hidden` each text has, if these are linear combinations of the
            text's states and of added rows that stand for no token. None: rows are not mixed, and each stands for a
            token or a pooled text.
    """

    hidden: torch.Tensor
    lengths: Ids
    layer: int
    pooled: bool = False
    mixed_row_counts: Ids | None = None


@dataclass(frozen=True)
class Gradients(Observation):
    """Holds what one client shares of one training step: the gradient of the mean loss of a batch.

    Attributes:
        tensors: the gradient of each parameter, by the parameter's name.
        batch_size: how many texts the batch has.
        round: the index of the federated round, or of the step where there are no rounds, from 0.
    """

    tensors: Mapping[str, torch.Tensor]
    batch_size: int
    round: int


@dataclass(frozen=True)
class Outputs(Observation):
    """Holds scrambled ids that the server generated.

    Attributes:
        ids: a sequence for each answer.
        prompts: the prompt of each answer. None if prompts were not recorded.
    """

    ids: Sequences
    prompts: Sequences | None = None


@dataclass(frozen=True)
class Records(Observation):
    """Holds what anybody on the network sees of encrypted answers: the sizes and times of their TLS records.

    Attributes:
        sizes: the bytes of each record, a sequence for each answer.
        times: the milliseconds from the request to each record, a sequence for each answer.
    """

    sizes: Sequences
    times: Sequences


ObservationT = TypeVar("ObservationT", bound=Observation)


@dataclass(frozen=True)
class Transcript:
    """Holds all that one client sent and the server has.

    Attributes:
        observations: in the order in which they were made.
        vocab_size: n', the number of scrambled ids.
        key_id: the public identifier of the key. None if it was not recorded.

    Raises:
        UsageError: an id lies outside of the vocabulary, or hidden states are no matrix of finite numbers.
    """

    observations: tuple[Observation, ...]
    vocab_size: int
    key_id: str | None = None

    def __post_init__(self) -> None:
        for observation in self.observations:
            if isinstance(observation, Tokens | Outputs) and observation.ids.ids.size:
                low, high = int(observation.ids.ids.min()), int(observation.ids.ids.max())
                if low < 0 or high >= self.vocab_size:
                    raise UsageError(
                        f"an id of {low if low < 0 else high} in a vocabulary of {self.vocab_size}",
                        "the transcript and the model do not belong together",
                    )
            if isinstance(observation, Activations):
                _require_states(observation.hidden)

    def all(self, kind: type[ObservationT]) -> tuple[ObservationT, ...]:
        """Returns the observations of one kind, in order."""
        return tuple(observation for observation in self.observations if isinstance(observation, kind))

    @property
    def kinds(self) -> frozenset[type[Observation]]:
        """Returns the kinds of observations that there are."""
        return frozenset(type(observation) for observation in self.observations)

    @property
    def sends_states(self) -> bool:
        """Returns whether hidden states are sent, not ids."""
        return Activations in self.kinds and Tokens not in self.kinds

    @property
    def tokens(self) -> Sequences:
        """Returns all ids that the client sent, as one list of sequences."""
        return Sequences.of(text for tokens in self.all(Tokens) for text in tokens.ids)

    def last_model(self, tuned: bool) -> Model | None:
        """Returns the last model that was fine-tuned or, with `tuned` false, uploaded. None: there is none."""
        models = [weights.model for weights in self.all(Weights) if weights.tuned == tuned]
        return models[-1] if models else None

    @property
    def outputs(self) -> Sequences:
        """Returns all ids that the server generated, as one list of sequences."""
        return Sequences.of(answer for outputs in self.all(Outputs) for answer in outputs.ids)

    @property
    def id_counts(self) -> Ids:
        """Returns (n',) how often each scrambled id was sent or generated."""
        return self.tokens.counts(self.vocab_size) + self.outputs.counts(self.vocab_size)

    @property
    def prompts(self) -> Sequences:
        """Returns all prompts that were recorded, in the order of their answers."""
        return Sequences.of(prompt for outputs in self.all(Outputs) for prompt in outputs.prompts or ())

    @property
    def table(self) -> torch.Tensor:
        """Returns (n, d) the embedding table of `model`.

        Raises UsageError if there is no model, and IndexError if the model has no table.
        """
        return self.model.table

    @property
    def model(self) -> Model:
        """Returns the last uploaded model, or the last fine-tuned one if none was uploaded: training blurs the table.

        Raises UsageError if there is none.
        """
        model = self.last_model(tuned=False) or self.last_model(tuned=True)
        if model is None:
            raise UsageError("this transcript holds no weights", "ask why_not before an attack is run")
        return model


def _require_states(hidden: torch.Tensor) -> None:
    """Raises UsageError for states that are no matrix of finite numbers: attacks would read none of them."""
    hint = "give a torch.Tensor of (rows, dimensions), a row for each token"
    if not isinstance(hidden, torch.Tensor):
        raise UsageError(f"hidden states are of the type {type(hidden).__name__}, a torch.Tensor is needed", hint)
    if hidden.ndim != 2:
        raise UsageError(f"hidden states have the shape {tuple(hidden.shape)}", hint)
    if not_finite := int((~hidden.isfinite()).sum()):
        raise UsageError(
            f"{not_finite:,} of the {hidden.numel():,} numbers in hidden states are NaN or infinite",
            "find where the client computes them: that attacks read none of them says nothing of it",
        )
