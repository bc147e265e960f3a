"""Reads the batches of shared gradients one at a time: the base of all gradient inversions."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np
import torch

from milkglass.errors import UsageError
from milkglass.noise.grid import AddedNoise
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Gradients, Transcript
from milkglass.threat.training_step import SharedStep


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """Holds what an attacker knows of one training step.

    Attributes:
        shared: the gradient that the client shared.
        step: the model and its loss.
        labels, lengths: (texts,) the classes and the numbers of tokens, special ones too. None if they are not known.
        corpus: public text. None if the attacker has none.
        noise: the noise that was added to the gradient. None if there is none, or it is not known.
    """

    shared: Gradients
    step: SharedStep
    labels: Ids | None
    lengths: Ids | None
    corpus: Sequences | None
    noise: AddedNoise | None = None

    @property
    def size(self) -> int:
        """Returns how many texts the batch has."""
        return self.shared.batch_size

    def gradient(self, name: str) -> torch.Tensor | None:
        """Returns a parameter's gradient by its full name, on the model's device, or None if it was not shared."""
        gradient = self.shared.tensors.get(name)
        return None if gradient is None else gradient.to(self.step.device)

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns every shared gradient by its parameter's name, on the model's device."""
        return {name: tensor.to(self.step.device) for name, tensor in self.shared.tensors.items()}

    def mask(self) -> torch.Tensor:
        """Returns (b, t) 1 for tokens and 0 for padding, by the lengths, which must be known."""
        lengths = require_known(self.lengths)
        is_token = torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]
        return is_token.long().to(self.step.device)


def require_positive(attack: Attack, *names: str) -> None:
    """Raises UsageError for the first of these parameters that is below 1."""
    for name in names:
        if (value := getattr(attack, name)) < 1:
            raise UsageError(f"{name} is {value}", "give at least 1, or leave the default")


class Inversion(Attack):
    """Reads the batches of `Gradients` one by one. Subclasses implement `invert`."""

    sees = frozenset({Gradients})
    assumes = frozenset({"step"})

    @abc.abstractmethod
    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        """Reads the texts of a batch.

        Args:
            batch: the gradient, and what the attacker knows of the batch.
            budget: ends the attack.
            rng: draws all random numbers.

        Returns:
            The public ids of each text, special ones too, in any order; empty for a text of which nothing is found.
        """

    def why_unreadable(self, batch: SharedBatch) -> str | None:
        """Returns why nothing can be read of a batch, or None if the attack may be tried."""
        return None

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        """Returns why the first unreadable batch cannot be read, or None."""
        return next(filter(None, map(self.why_unreadable, batches(transcript, knowledge))), None)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        all_texts: list[Ids] = []
        all_batches = batches(transcript, knowledge)
        for index, batch in enumerate(all_batches):
            batch_budget = budget.part(1 / (len(all_batches) - index))
            texts = self.invert(batch, batch_budget, rng)
            if len(texts) != batch.size:
                raise ValueError(f"{len(texts)} texts for a batch of {batch.size}")
            all_texts += texts
            budget.progress((index + 1) / len(all_batches))
        return Guess(texts=Sequences.of(all_texts))


def batches(transcript: Transcript, knowledge: Knowledge) -> list[SharedBatch]:
    """Returns a batch for each gradient, with its part of the knowledge.

    Raises:
        UsageError: there is not one label and one length for each text.
    """
    shared = transcript.all(Gradients)
    total = sum(gradients.batch_size for gradients in shared)
    for name, known_values in (("labels", knowledge.labels), ("lengths", knowledge.lengths)):
        if known_values is not None and len(known_values) != total:
            raise UsageError(f"{len(known_values)} {name} for {total} texts", "give one for each text, or none")
    shared_batches, start = [], 0
    for gradients in shared:
        texts_of_batch = slice(start, start + gradients.batch_size)
        labels, lengths = (
            None if known is None else known[texts_of_batch] for known in (knowledge.labels, knowledge.lengths)
        )
        shared_batches.append(
            SharedBatch(gradients, require_known(knowledge.step), labels, lengths, knowledge.corpus, knowledge.noise)
        )
        start += gradients.batch_size
    return shared_batches
