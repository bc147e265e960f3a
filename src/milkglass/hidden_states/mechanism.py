"""Defines what a method adds to a model that is cut in two: a mechanism on a text's hidden states, and a loss."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from milkglass import device
from milkglass.hidden_states import halves
from milkglass.hidden_states.halves import LowerHalf
from milkglass.hidden_states.tokens import TokenizedTexts, pad_states
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.grid import AddedNoise
from milkglass.noise.root import NoiseRoot, NoiseStream
from milkglass.parameters import limited_field, require
from milkglass.sequences import Ids
from milkglass.threat.defence import Defence


@dataclass(frozen=True)
class HalvesTraining:
    """Sets how both halves are trained: as C.3 of the ObfusLM paper says, unless a method says otherwise.

    The learning rate decays linearly to zero, as in transformers' Trainer.

    Attributes:
        learning_rate: the rate at its highest.
        batch_size: how many texts a step has.
        epochs: how often the training texts are gone through.
        max_steps: the most steps. None: the epochs alone limit them.
        max_length: the most tokens of a text. Longer texts are cut in training, and refused when they are sent.
        weight_decay: AdamW's.
        warmup_ratio: the share of the steps over which the learning rate rises first.
    """

    learning_rate: float = limited_field(2e-5, above=0)
    batch_size: int = limited_field(32, least=1)
    epochs: int = limited_field(10, least=1)
    max_steps: int | None = limited_field(None, least=1)
    max_length: int = limited_field(128, least=1)
    weight_decay: float = limited_field(0.0)
    warmup_ratio: float = limited_field(0.0, most=0.99)

    def __post_init__(self) -> None:
        require(self)


@dataclass(frozen=True)
class TrainingStep:
    """Holds what a method sees of one training step.

    Attributes:
        ids: (b, t) the tokens.
        mask: (b, t) bool, where a text has a token.
        hidden: (b, t, d) what the lower half gave.
        labels: (b,) the classes, or the standardised scores of a regression.
        text_indices: (b,) which texts of the training data these are.
        epoch: the index of the epoch, from 0.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    hidden: torch.Tensor
    labels: torch.Tensor
    text_indices: Ids
    epoch: int


def task_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of logits (b, classes), or the mean squared error of scores (b, 1)."""
    if labels.is_floating_point():
        return torch.nn.functional.mse_loss(logits[:, 0], labels.to(logits.dtype))
    return torch.nn.functional.cross_entropy(logits, labels)


@dataclass(frozen=True)
class Mechanism(Defence):
    """Disturbs the states of one text at a time, and adds its own loss to the halves' training.

    Attributes:
        layer: how many layers the client runs: with 0 the embeddings alone, with None all.
        training: how both halves are trained.
        later_parameters: parameters that were added later, with their value in folders that lack them.
        trains_lower: whether the client's half learns. If not, it is the public model's.
        loss_is_mean: whether the loss of a step is a mean over its texts. Such a step may go through the halves in
            parts.
    """

    layer: int | None = limited_field(0)
    training: HalvesTraining = field(default_factory=HalvesTraining)

    later_parameters: ClassVar[Mapping[str, Any]] = {"warmup_ratio": 0.0}
    trains_lower: ClassVar[bool] = True
    loss_is_mean: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self)

    @abc.abstractmethod
    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        """Returns what is sent for one text's states: as many rows, or (1, d) if the method pools.

        Gradients pass through it in training.

        Args:
            hidden: (t, d) the states that the lower half gave.
            draws: the noise of this text.
        """

    @property
    def pooled(self) -> bool:
        """Returns whether one row is sent for a text."""
        return False

    @property
    def added_noise(self) -> AddedNoise | None:
        """Returns what is public of the noise on each text's states, or None if no noise is added."""
        return None

    @property
    def disturbs_only_in_training(self) -> bool:
        """Returns whether states are disturbed only in training, and not when texts are sent."""
        return False

    def cut_layer(self, base: Checkpoint) -> int:
        """Returns the number of layers below the cut, which the client runs."""
        return halves.layer_count(base.config) if self.layer is None else self.layer

    def upper(self, model: Any, base: Checkpoint, classes: int) -> torch.nn.Module:
        """Returns the server's half of a whole classifier. A regression has one class."""
        return halves.UpperHalf(model, self.cut_layer(base))

    def make_auxiliary(
        self, base: Checkpoint, lower: LowerHalf, encoded: TokenizedTexts, root: NoiseRoot
    ) -> torch.nn.Module:
        """Returns a module that is trained besides the halves and then discarded.

        Args:
            base: the public model.
            lower: the client's half.
            encoded: the training texts.
            root: the source of all draws.
        """
        return torch.nn.Module()

    def loss(
        self, step: TrainingStep, upper: torch.nn.Module, auxiliary: torch.nn.Module, root: NoiseRoot
    ) -> torch.Tensor:
        """Returns the loss of one step: the task's, and what the method adds.

        Args:
            step: the texts, and what the lower half gave for them.
            upper: the server's half.
            auxiliary: what `make_auxiliary` returned.
            root: the source of all draws.
        """
        sent, mask = self.disturb(step, root)
        return task_loss(upper(sent, mask), step.labels) + self.auxiliary_loss(step, sent, auxiliary)

    def auxiliary_loss(self, step: TrainingStep, sent: torch.Tensor, auxiliary: torch.nn.Module) -> torch.Tensor:
        """Returns the loss that the method adds to the task's.

        Args:
            step: the texts, and what the lower half gave for them.
            sent: (b, s, d) what is sent instead, padded.
            auxiliary: what `make_auxiliary` returned.
        """
        return sent.new_zeros(())

    # --- the same for all methods -------------------------------------------------------------------------------------
    def disturb(self, step: TrainingStep, root: NoiseRoot) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what would be sent for a step's texts, padded again, and its mask.

        A text's draws are bound to its states, unless all epochs share one draw (`draw_number`). The last bits of the
        states differ from batch to batch, so bound draws would be more than the guarantee counts.
        """
        sent, is_drawn_once = list[torch.Tensor](), self.draw_number(0) == self.draw_number(1)
        for row, mask, ids, number in zip(step.hidden, step.mask, step.ids, step.text_indices, strict=True):
            hidden = row[mask]
            draws = root.of_text(device.array(ids[mask]), "train", self.draw_number(step.epoch), int(number))
            sent.append(self.mechanism(hidden, draws if is_drawn_once else draws.bound_to(hidden)))
        return pad_states(sent)

    def draw_number(self, epoch: int) -> int:
        """Returns a number for the draws of an epoch: epochs with one number share their noise."""
        return epoch

    def document(self) -> dict[str, Any]:
        """Returns the name and all parameters.

        One of `later_parameters` is left out at its value there, so that older folders open.
        """
        document = {"name": self.name, **dataclasses.asdict(self)}
        for table in (document, document["training"]):
            for name, left_out in self.later_parameters.items():
                if table.get(name) == left_out:
                    del table[name]
        return document

    @property
    def salt(self) -> str:
        """Returns the method and all of its parameters as one text, which is part of every stream's seed."""
        return json.dumps(self.document(), sort_keys=True)

    def root(self, secret: bytes) -> NoiseRoot:
        """Returns the source of all draws of a half with this secret."""
        return NoiseRoot(secret, self.salt)
