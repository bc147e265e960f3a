"""What a defence of gradients is: it changes the step, how its gradient is taken, or the gradient itself.

    before(step)                         the step that is taken: other parameters trained, dropout on
    take(step, ids, mask, targets)       its gradient; another way only where examples must be kept apart
    after(tensors, texts, stream)        what is shared of it

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
from milkglass.noise.stream import Stream, bound
from milkglass.papers import Paper
from milkglass.parameters import require
from milkglass.threat.observations import Gradients
from milkglass.threat.training_step import SharedStep

Tensors = dict[str, torch.Tensor]


class GradientDefence(abc.ABC):  # noqa: B024 - a method may change one of three things, none of which is abstract
    """Final subclasses are frozen dataclasses whose fields are the parameters. name: as a recipe has it."""

    name: ClassVar[str]
    paper: ClassVar[Paper | None]

    def __post_init__(self) -> None:
        require(self)

    @property
    def guarantee(self) -> str | None:
        """What is proved of one gradient that is shared, in words; None: nothing."""
        return None

    def spent(self, rounds: int) -> str | None:
        """What is proved of all that a site shares in so many rounds of a run, in words; None: it is not accounted."""
        return None

    def added_noise(self, texts: int) -> AddedNoise | None:
        """What is public of the noise on the gradient of so many texts; None where none is added."""
        return None

    def before(self, step: SharedStep) -> SharedStep:
        """The step that is taken in the place of this one. It shares its weights and changes nothing of it."""
        return step

    def take(self, step: SharedStep, ids: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor | None) -> Tensors:
        """Its gradient, for ids (b, t), before `after`."""
        return step.gradient(ids, mask, targets)

    def after(self, tensors: Mapping[str, torch.Tensor], texts: int, stream: Stream) -> Tensors:
        """What is shared of the gradient of `texts` texts. The tensors that are given are not changed."""
        return dict(tensors)


@dataclass(frozen=True)
class NoDefence(GradientDefence):
    """No defence."""

    name: ClassVar[str] = "none"
    paper: ClassVar[Paper | None] = None


def share(
    step: SharedStep, ids: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor | None, defence: GradientDefence,
    round: int, stream: Stream,
) -> Gradients:  # fmt: skip
    """What a client shares of one step. ids, mask: (b, t). targets: as for `SharedStep.gradient`. stream: the keys of
    two streams are drawn from it, for dropout and for the defence; PyTorch's generator is not used. The defence's
    stream depends on the gradient as well (noise/stream.py): no two gradients ever meet the same noise.

    Raises UsageError where the gradient is not finite: what is made of such a one would hide nothing.
    """
    dropping, drawing = stream.child(), stream.child()
    with drawing_from(dropping):
        taken = defence.take(defence.before(step), ids, mask, targets)
    for name, one in taken.items():
        if not torch.isfinite(one).all():
            raise UsageError(f"the gradient of {name} is not finite", "lower the learning rate, or check the weights")
    return Gradients(defence.after(taken, len(ids), bound(drawing, taken)), len(ids), round)


def altered(step: SharedStep, frozen: frozenset[str] = frozenset(), dropout: bool | None = None) -> SharedStep:
    """The same model over the same weights (a change of them is seen in both), but with parameters of its own; those
    named in `frozen` need no gradient."""
    named = dict(step.module.named_parameters())
    memo: dict[int, Any] = {id(one): one for one in step.module.buffers()}
    for name, one in named.items():
        memo[id(one)] = torch.nn.Parameter(one.detach(), requires_grad=one.requires_grad and name not in frozen)
    module = copy.deepcopy(step.module, memo)
    return replace(step, module=module, dropout=step.dropout if dropout is None else dropout)
