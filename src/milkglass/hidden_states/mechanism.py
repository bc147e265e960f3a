"""What a method adds to a model that is cut in two: a mechanism on the (t, d) hidden states of one text, and a loss."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from milkglass.hidden_states import halves
from milkglass.hidden_states.halves import Lower
from milkglass.hidden_states.tokens import TokenizedTexts, padded
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.grid import AddedNoise
from milkglass.noise.root import NoiseRoot, NoiseStream
from milkglass.parameters import limited, require
from milkglass.sequences import Ids
from milkglass.threat.defence import Defence


@dataclass(frozen=True)
class HalvesTraining:
    """How both halves are trained: C.3 of the ObfusLM paper, unless a method says otherwise. The learning rate decays
    linearly to zero, as in transformers' Trainer, which trains the models beside these.

    Attributes:
        warmup_ratio: of the steps, over which the learning rate rises first.
        max_steps: None for all epochs.
        max_length: in tokens; longer texts are cut in training, and refused when they are sent.
    """

    learning_rate: float = limited(2e-5, above=0)
    batch_size: int = limited(32, least=1)
    epochs: int = limited(10, least=1)
    max_steps: int | None = limited(None, least=1)
    max_length: int = limited(128, least=1)
    weight_decay: float = limited(0.0)
    warmup_ratio: float = limited(0.0, most=0.99)

    def __post_init__(self) -> None:
        require(self)


@dataclass(frozen=True)
class TrainingStep:
    """What a method sees of one step.

    Attributes:
        numbers: (b,) of the texts in the training data.
    """

    ids: torch.Tensor  # (b, t)
    mask: torch.Tensor  # (b, t), bool
    hidden: torch.Tensor  # (b, t, d), what the lower half gave
    labels: torch.Tensor  # (b,)
    numbers: Ids
    epoch: int


@dataclass(frozen=True)
class Mechanism(Defence):
    """A method and its parameters.

    Attributes:
        layer: layers that the client runs, 0 for the embeddings alone, None for all.
        training: of both halves.
        later: parameters that came later, of the method or its training, with the value that folders without them have.
        trains_lower: whether the client's half learns; if not, it is the public model's.
    """

    layer: int | None = limited(0)
    training: HalvesTraining = field(default_factory=HalvesTraining)

    later: ClassVar[Mapping[str, Any]] = {"warmup_ratio": 0.0}
    trains_lower: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self)

    @abc.abstractmethod
    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        """What is sent for the (t, d) hidden states of one text: (t, d), or (1, d) where the method pools. Gradients
        pass through it in training."""

    @property
    def pooled(self) -> bool:
        return False

    @property
    def added_noise(self) -> AddedNoise | None:
        """What is public of the noise on each text's states; None where none is added."""
        return None

    @property
    def quiet(self) -> bool:
        """Whether nothing is disturbed when texts are sent, in training alone."""
        return False

    def cut(self, base: Checkpoint) -> int:
        """After how many layers of this model."""
        return halves.layers_of(base.config) if self.layer is None else self.layer

    def upper(self, model: Any, base: Checkpoint, classes: int) -> torch.nn.Module:
        """The server's half of a whole classifier."""
        return halves.Upper(model, self.cut(base))

    def aids(self, base: Checkpoint, lower: Lower, encoded: TokenizedTexts, root: NoiseRoot) -> torch.nn.Module:
        """What is trained besides, and discarded."""
        return torch.nn.Module()

    def loss(self, step: TrainingStep, upper: torch.nn.Module, aids: torch.nn.Module, root: NoiseRoot) -> torch.Tensor:
        sent, mask = self.disturbed(step, root)
        result = torch.nn.functional.cross_entropy(upper(sent, mask), step.labels)
        return result + self.extra(step, sent, aids)

    def extra(self, step: TrainingStep, sent: torch.Tensor, aids: torch.nn.Module) -> torch.Tensor:
        """A loss besides the task's."""
        return torch.zeros(())

    # --- the same for all methods -------------------------------------------------------------------------------------
    def disturbed(self, step: TrainingStep, root: NoiseRoot) -> tuple[torch.Tensor, torch.Tensor]:
        """What would be sent for a step's texts, padded again, and its mask. Draws are bound to the states, unless a
        text has one draw for all epochs: its states differ in their last bits from batch to batch, and binding would
        make more draws of it than are counted."""
        sent, once = list[torch.Tensor](), self.drawn_in(0) == self.drawn_in(1)
        for row, mask, ids, number in zip(step.hidden, step.mask, step.ids, step.numbers, strict=True):
            hidden = row[mask]
            draws = root.of_text(ids[mask].numpy(), "train", self.drawn_in(step.epoch), int(number))
            sent.append(self.mechanism(hidden, draws if once else draws.bound(hidden)))
        return padded(sent)

    def drawn_in(self, epoch: int) -> int:
        """Noise is drawn anew where this number is new."""
        return epoch

    def document(self) -> dict[str, Any]:
        """A parameter that came later is left out at the value that folders without it have, so that these open. They
        keep the others as they were made, such as a weight decay of 0.01, which was the default."""
        document = {"name": self.name, **dataclasses.asdict(self)}
        for table in (document, document["training"]):
            for name, value in self.later.items():
                if table.get(name) == value:
                    del table[name]
        return document

    @property
    def salt(self) -> str:
        """The method and all of its parameters."""
        return json.dumps(self.document(), sort_keys=True)

    def root(self, secret: bytes) -> NoiseRoot:
        return NoiseRoot(secret, self.salt)
