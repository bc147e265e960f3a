"""Defines a defence of gradients, which changes the step, how its gradient is taken, or the gradient itself.

    prepare_step(step)                                the step that is taken: other parameters trained, dropout on
    compute_gradient(step, ids, mask, targets)        the gradient of the step; overridden only if each text has its own
    protect_gradient(tensors, text_count, stream)     what is shared of the gradient

All randomness comes from a ChaCha20 stream (noise/): noise on a grid by exact samples, masks of pruning and of dropout.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from milkglass.errors import UsageError
from milkglass.noise.grid import AddedNoise
from milkglass.noise.operators import drawing_from
from milkglass.noise.stream import Stream, stream_for
from milkglass.papers import Paper
from milkglass.parameters import require
from milkglass.threat.observations import Gradients
from milkglass.threat.training_step import SharedStep

Tensors = dict[str, torch.Tensor]


class GradientDefence(abc.ABC):  # noqa: B024 - a method may change one of three things, none of which is abstract
    """Changes what a client shares of a training step. The base of all defences of gradients.

    Subclasses are frozen dataclasses whose fields are the parameters.

    Attributes:
        name: the name that a recipe gives.
        paper: where the method comes from. None if it is not from a paper.
    """

    name: ClassVar[str]
    paper: ClassVar[Paper | None]

    def __post_init__(self) -> None:
        require(self)

    @property
    def guarantee(self) -> str | None:
        """Returns what is proved for one shared gradient, in words, or None if nothing is."""
        return None

    def guarantee_after(self, rounds: int) -> str | None:
        """Returns what is proved for all that a site shares in so many rounds, in words, or None if nothing is."""
        return None

    def added_noise(self, text_count: int) -> AddedNoise | None:
        """Returns what is public of the noise on the gradient of so many texts, or None if no noise is added."""
        return None

    def prepare_step(self, step: SharedStep) -> SharedStep:
        """Returns the step that is taken in place of this one. It shares the weights of the given step."""
        return step

    def compute_gradient(
        self, step: SharedStep, ids: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor | None
    ) -> Tensors:
        """Returns the gradient of a step, by parameter, which `protect_gradient` receives.

        The arguments are those of `SharedStep.gradient`.
        """
        return step.gradient(ids, mask, targets)

    def protect_gradient(self, tensors: Mapping[str, torch.Tensor], text_count: int, stream: Stream) -> Tensors:
        """Returns what is shared of a gradient.

        Args:
            tensors: the gradient from `compute_gradient`, by parameter. It is not changed.
            text_count: how many texts the gradient is of.
            stream: the source of all randomness.
        """
        return dict(tensors)


@dataclass(frozen=True)
class NoDefence(GradientDefence):
    """Shares each gradient as it is."""

    name: ClassVar[str] = "none"
    paper: ClassVar[Paper | None] = None


def share_gradient(
    step: SharedStep, ids: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor | None, defence: GradientDefence,
    round_index: int, stream: Stream,
) -> Gradients:  # fmt: skip
    """Returns what a client shares of one step.

    The stream of `protect_gradient` depends on the gradient as well (noise/stream.py): no two gradients get the same
    noise. PyTorch's generator is not used.

    Args:
        step: the model and its loss.
        ids: (b, t) the ids of the batch.
        mask: (b, t) the attention mask: 1 for tokens, 0 for padding.
        targets: as in `SharedStep.gradient`.
        defence: what is done to the step and to its gradient.
        round_index: the index of the round, from 0.
        stream: the source of all randomness.

    Raises:
        UsageError: the gradient is not finite, so that noise would not hide it.
    """
    dropout_stream, noise_stream = stream.child(), stream.child()
    with drawing_from(dropout_stream):
        gradients = defence.compute_gradient(defence.prepare_step(step), ids, mask, targets)
    for name, gradient in gradients.items():
        if not torch.isfinite(gradient).all():
            raise UsageError(f"the gradient of {name} is not finite", "lower the learning rate, or check the weights")
    return Gradients(
        defence.protect_gradient(gradients, len(ids), stream_for(gradients, noise_stream)), len(ids), round_index
    )


def copy_step(
    step: SharedStep, frozen_names: frozenset[str] = frozenset(), uses_dropout: bool | None = None
) -> SharedStep:
    """Returns a copy of a step whose model has parameters of its own over the same weights.

    A change of the weights is seen in both.

    Args:
        step: the step that is copied, and stays as it is.
        frozen_names: the names of the parameters that are not trained in the copy.
        uses_dropout: whether the copy applies dropout. None: as the given step does.
    """
    named = dict(step.module.named_parameters())
    memo: dict[int, Any] = {id(buffer): buffer for buffer in step.module.buffers()}
    for name, weight in named.items():
        needs_gradient = weight.requires_grad and name not in frozen_names
        memo[id(weight)] = torch.nn.Parameter(weight.detach(), requires_grad=needs_gradient)
    module = copy.deepcopy(step.module, memo)
    return replace(step, module=module, uses_dropout=step.uses_dropout if uses_dropout is None else uses_dropout)
