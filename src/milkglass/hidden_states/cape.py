"""Sends one normalised vector a text with Laplace noise, from an encoder trained against an adversary: CAPE.

Plant et al. 2021, arXiv:2108.12318, section 3:

    z    = (x - min x) / (max x - min x)         x (d,): one vector a text, see below; min and max of this text
    sent = z + Laplace(1 / epsilon)              drawn again for each text, exactly and on a grid (noise/grid.py)
    loss = cross-entropy + w_adv * adversary(reversed gradient(sent))

The client runs all layers, the server a small head. The adversary's gradient reaches the encoder with its sign
reversed: the adversary learns to find private words in what is sent, and the encoder to make that hard. No private
attribute is labelled here, so the adversary names words.

The paper takes 1 for the sensitivity of z. That is one coordinate's sensitivity: replacing a text moves all d
coordinates, so what holds for a text is d times epsilon. `calibration = "strict"` draws Laplace(d / epsilon), for which
epsilon holds; with "paper" no guarantee is printed.

x is the mean of a text's last states, as in the authors' code (github.com/NapierNLP/CAPE, models.py, "mean_embedding",
which also counts the padding). `pooling = "first"` takes the state of [CLS]. The control of both is the method
"undisturbed" (defences/undisturbed.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from milkglass import papers
from milkglass.accounting import format_epsilon
from milkglass.errors import UsageError
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.halves import Head, LowerHalf, Pooling, pool
from milkglass.hidden_states.mechanism import HalvesTraining, TrainingStep
from milkglass.hidden_states.tokens import TokenizedTexts
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise import grid
from milkglass.noise.root import NoiseRoot, NoiseStream
from milkglass.papers import Paper
from milkglass.parameters import limited_field
from milkglass.sequences import Ids

COMMONEST_WORD_COUNT = 150  # the commonest ids, which are left out: function words and marks (`truth.content_tokens`)


class GradientReversal(torch.autograd.Function):
    """Returns its input unchanged, and reverses the sign of the gradient (Ganin and Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


class WordAdversary(torch.nn.Module):
    """Learns which of `words` (w,), public ids, occur in the text of each vector (b, d). A call returns the loss."""

    def __init__(self, width: int, words: Ids, size: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, len(words))
        )
        column = torch.full((size,), -1, dtype=torch.long)
        column[torch.from_numpy(words)] = torch.arange(len(words))
        self.register_buffer("column", column)

    def bag(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns (b, w) 1 if a word is in a text, else 0, for the texts' ids (b, t) and their mask (b, t)."""
        presence = torch.zeros(len(ids), self.net[-1].out_features, device=ids.device)
        for row, text in enumerate(ids):
            columns = self.column[text[mask[row]]]
            presence[row, columns[columns >= 0]] = 1.0
        return presence

    def forward(self, vectors: torch.Tensor, bag: torch.Tensor) -> torch.Tensor:
        return balanced_loss(self.net(vectors), bag)


def balanced_loss(scores: torch.Tensor, bag: torch.Tensor) -> torch.Tensor:
    """Returns the binary cross-entropy of (b, w) scores: half from present words, half from the many absent ones."""
    loss_if_present, loss_if_absent = torch.nn.functional.softplus(-scores), torch.nn.functional.softplus(scores)
    absence = 1 - bag
    present = (loss_if_present * bag).sum() / bag.sum().clamp_min(1)
    return (present + (loss_if_absent * absence).sum() / absence.sum().clamp_min(1)) / 2


def normalise(vector: torch.Tensor) -> torch.Tensor:
    """Returns the vector (d,), scaled so that its smallest entry is 0 and its largest 1; one half if all are equal."""
    low, high = vector.min(), vector.max()
    if float(high.detach()) == float(low.detach()):
        return torch.full_like(vector, 0.5)
    return (vector - low) / (high - low)


@dataclass(frozen=True)
class CAPE(HiddenStateDefence):
    """Sends one noisy vector a text, from an encoder that is trained against an adversary.

    Attributes:
        epsilon: the parameter of the noise, see the module.
        w_adv: the weight of the adversary's loss.
        words: how many words the adversary names.
        calibration: "strict" if epsilon is to hold for a text, "paper" if for one coordinate.
        pooling: the mean of a text's states, or the first of them.

    Raises:
        UsageError: a layer is given: the method sends the last one's states.
    """

    layer: int | None = None
    epsilon: float = limited_field(5.0, above=0)
    w_adv: float = limited_field(0.1)
    words: int = limited_field(2000, least=1)
    calibration: Literal["paper", "strict"] = "paper"
    pooling: Pooling = "mean"
    training: HalvesTraining = field(default_factory=lambda: HalvesTraining(learning_rate=1e-5))

    name: ClassVar[str] = "cape"
    loss_is_mean: ClassVar[bool] = True
    later_parameters: ClassVar[Mapping[str, Any]] = {**HiddenStateDefence.later_parameters, "pooling": "mean"}
    paper: ClassVar[Paper] = papers.CAPE.with_deviations(
        "The adversary names words of the text, commonest ones left out: no private attribute is labelled here.",
        "The adversary's loss weighs words that are there and words that are not alike.",
        "On a processor a step of many tokens is done in parts, and the words are weighed in each part.",
        "Least and greatest are those of one text; the public code takes a whole batch's.",
        "Noise is drawn for each text; the public code draws it once, when its graph is built.",
        "The mean leaves padding out; the public code counts it.",
        "The encoder is trained, as ObfusLM's comparison has it; the public code freezes it, and trains layers above.",
        "The adversary reads what is sent; in the public code it reads two layers above that.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer is not None:
            raise UsageError(f"layer is {self.layer}: this method sends the last layer's", "leave layer out")

    @property
    def guarantee(self) -> str | None:
        if self.calibration == "paper":
            return None  # epsilon is one coordinate's, not a text's
        return (
            f"each text sent is {format_epsilon(self.epsilon)}-DP for one text replaced by any other, and sending more "
            "about it adds up; nothing is claimed for the texts and labels that the halves were trained with"
        )

    @property
    def pooled(self) -> bool:
        return True

    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        """Returns (1, d) the disturbed vector of a text."""
        sensitivity = hidden.shape[1] if self.calibration == "strict" else 1
        z = normalise(pool(hidden, self.pooling))
        return grid.straight_through(z, grid.add_laplace(z, sensitivity / self.epsilon, draws.stream, 1.0))[None]

    def upper(self, model: Any, base: Checkpoint, classes: int) -> torch.nn.Module:
        return Head(int(model.config.hidden_size), classes, centre=0.5)  # z lies around one half

    def make_auxiliary(
        self, base: Checkpoint, lower: LowerHalf, encoded: TokenizedTexts, root: NoiseRoot
    ) -> torch.nn.Module:
        size = int(base.config["vocab_size"])
        return WordAdversary(lower.width, words_present(encoded, size, self.words), size)

    def auxiliary_loss(self, step: TrainingStep, sent: torch.Tensor, auxiliary: torch.nn.Module) -> torch.Tensor:
        assert isinstance(auxiliary, WordAdversary)
        return self.w_adv * auxiliary(GradientReversal.apply(sent[:, 0]), auxiliary.bag(step.ids, step.mask))


def words_present(encoded: TokenizedTexts, size: int, max_count: int) -> Ids:
    """Returns the `max_count` public ids that most texts have, after the commonest 150, or after half of all ids.

    There are fewer if fewer ids occur.
    """
    pairs = np.unique(encoded.ids.sequence_indices * size + encoded.ids.ids) % size
    counts = np.bincount(pairs, minlength=size)
    order = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
    return np.sort(order[min(COMMONEST_WORD_COUNT, len(order) // 2) :][:max_count]).astype(np.int64)
