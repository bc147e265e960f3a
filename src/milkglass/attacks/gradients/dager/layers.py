"""What enters the attention of a model's first layers, and which gradients reveal it.

Nothing is found by its name. The layers are the module list as long as the config says. The query projection is the
first matrix that a layer multiplies its input by; keys, values and adapters are the others that read the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from milkglass.errors import UnsupportedModel
from milkglass.threat.training_step import SharedStep


@dataclass(frozen=True)
class Matrix:
    """One matrix that reads a layer's input.

    Attributes:
        name: of its parameter.
        transposed: whether it is stored (in, out).
        followed: the parameter of an adapter's second half, which reads what this one gives; None where there is none.
    """

    name: str
    transposed: bool
    followed: str | None


@dataclass(frozen=True, eq=False)
class Entrance:
    """What the attention of one layer reads.

    Attributes:
        matrices: the query projection first.
        module: it, as it is called.
    """

    step: SharedStep
    matrices: tuple[Matrix, ...]
    module: nn.Module

    @torch.no_grad()
    def read(self, embeds: Tensor) -> Tensor:
        """(b, t, d) what enters for embeddings (b, t, d) of texts of t tokens each. The model runs no further."""
        seen: list[Tensor] = []

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0].detach())
            raise _Enough

        with _hooked(self.module, stop):
            _run(self.step, embeds)
        return seen[0].reshape(*embeds.shape[:2], -1)


class _Enough(Exception):  # noqa: N818 - not an error: the forward has gone as far as it is needed
    pass


@contextmanager
def _hooked(module: nn.Module, hook: Callable[[nn.Module, tuple[Tensor, ...]], None]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _run(step: SharedStep, embeds: Tensor) -> None:
    step.module.eval()
    try:
        step.module.base_model(inputs_embeds=embeds, attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long))
    except _Enough:
        return


def entrance(step: SharedStep, layer: int) -> Entrance:
    """Of a layer, from 0. Raises UnsupportedModel where the model is not built of layers."""
    every = layers(step.module)
    if layer >= len(every):
        raise UnsupportedModel(f"layer {layer + 1} is asked for, the model has {len(every)}", "give a deeper model")
    calls = _calls(step, every[layer])
    if not calls:
        raise UnsupportedModel(f"layer {layer + 1} multiplies its input by no matrix", "give a model of another family")
    first = calls[0][1]
    readers = [module for module, provided in calls if _same(provided, first)]
    names = {id(one): name for name, one in step.module.named_parameters()}
    matrices = tuple(_matrix(step.module, module, names) for module in readers)
    return Entrance(step, matrices, readers[0])


def layers(module: Any) -> nn.ModuleList:
    """The model's layers. Raises UnsupportedModel where there is no list of so many."""
    count = int(module.config.num_hidden_layers)
    for one in module.modules():
        if isinstance(one, nn.ModuleList) and len(one) == count:
            return one
    raise UnsupportedModel(f"no list of {count} layers is in this model", "give a model of another family")


def _calls(step: SharedStep, layer: nn.Module) -> list[tuple[nn.Module, Tensor]]:
    """The matrices of a layer in the order in which they are used, and what each was given."""
    calls: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append((module, args[0]))

    handles = [one.register_forward_pre_hook(note) for one in layer.modules() if isinstance(one, nn.Linear | Conv1D)]
    try:
        with torch.no_grad():
            _run(step, step.embedded(torch.zeros(1, 2, dtype=torch.long)))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.data_ptr() == other.data_ptr()


def _matrix(model: nn.Module, module: nn.Module, names: dict[int, str]) -> Matrix:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return Matrix(names[id(weight)], isinstance(module, Conv1D), _follower(model, module, names))


def _follower(model: nn.Module, module: nn.Module, names: dict[int, str]) -> str | None:
    """The second half of the adapter of which this module is the first, else None."""
    for one in model.modules():
        first, second = getattr(one, "lora_A", None), getattr(one, "lora_B", None)
        if isinstance(first, nn.ModuleDict) and isinstance(second, nn.ModuleDict):
            for key, half in first.items():
                if half is module:
                    return names[id(second[key].weight)]
    return None
