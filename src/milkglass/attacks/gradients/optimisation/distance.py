"""Computes distances between the gradients of a guess and the shared ones.

    squares   sum over parameters of ||g - g*||^2                                  (DLG, equation 4; TAG adds L1)
    cosine    mean over parameters of 1 - <g, g*> / (||g|| ||g*||)                  (LAMP, section 4.1)
    norms     sum over parameters of ||g - g*||, not squared                        (GRAB, as coded)

Each adds l1 x sum |g - g*| if that weight is not zero. Gradients of linear layers are compared as factors. A linear
layer y = x W' + b with rows x (r, in), and derivatives D (r, out) of the loss by y, has

    dL/dW = D' x,    <dL/dW, G> = sum((D G) * x),    ||dL/dW||^2 = sum((x x') * (D D')),    dL/db = the sum of D's rows

This reads G once and never writes a gradient of W's size, which takes most of a step's time if texts are short. Rows of
many guesses go through the model together, and are separated only here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

DistanceKind = Literal["squares", "cosine", "norms"]
MIN_NORM = 1e-12  # a norm below this is taken as this


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """Describes a linear layer whose gradients are compared as factors.

    Attributes:
        module: the layer's module.
        weight_name, bias_name: the names of the layer's parameters. None for one that is not compared.
        is_transposed: whether the weight is (in, out), as GPT-2's is.
    """

    module: Any
    weight_name: str | None
    bias_name: str | None
    is_transposed: bool


def linear_layers(model: Any, names: tuple[str, ...]) -> tuple[LinearLayer, ...]:
    """Returns the linear layers of a model that have a parameter among `names`."""
    from transformers.pytorch_utils import Conv1D

    parameter_names = {id(parameter): name for name, parameter in model.named_parameters() if name in names}
    layers = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            weight, bias = (parameter_names.get(id(parameter)) for parameter in (module.weight, module.bias))
            if weight or bias:
                layers.append(LinearLayer(module, weight, bias, isinstance(module, Conv1D)))
    return tuple(layers)


class LayerRun(NamedTuple):
    """Records one forward pass of a layer, with its inputs and outputs."""

    layer: LinearLayer
    inputs: torch.Tensor
    outputs: torch.Tensor


@contextmanager
def record_runs(layers: tuple[LinearLayer, ...]) -> Iterator[list[LayerRun]]:
    """Yields a list to which every forward pass of these layers is added while the context is open."""
    runs: list[LayerRun] = []

    def record(layer: LinearLayer, _: Any, inputs: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> None:
        runs.append(LayerRun(layer, inputs[0], outputs))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.module.register_forward_hook(partial(record, layer)))
        yield runs


@dataclass(frozen=True, eq=False)
class InnerProducts:
    """Holds inner products and norms of one parameter's gradients, for h guesses.

    Attributes:
        inner: (h,) the inner products with the shared gradient.
        squared_norms: (h,) the squared norms.
    """

    inner: torch.Tensor
    squared_norms: torch.Tensor


def layer_products(
    layers: Sequence[LinearLayer], runs: Sequence[LayerRun], deltas: tuple[torch.Tensor, ...],
    shared: Mapping[str, torch.Tensor], guess_count: int,
) -> dict[str, InnerProducts]:  # fmt: skip
    """Returns the inner products of each parameter of the layers with its shared gradient, by the parameter's name.

    Args:
        layers: the linear layers.
        runs: their recorded forward passes.
        deltas: the loss's derivatives by the outputs of `runs`. The rows of one guess are adjacent.
        shared: the shared gradients, by name.
        guess_count: h, the number of guesses.
    """
    rows: dict[LinearLayer, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for (layer, inputs, outputs), delta in zip(runs, deltas, strict=True):
        x, d = inputs.reshape(guess_count, -1, inputs.shape[-1]), delta.reshape(guess_count, -1, outputs.shape[-1])
        rows.setdefault(layer, []).append((x, d))
    products_by_name = {}
    for layer in layers:
        x, d = (torch.cat(parts, 1) for parts in zip(*rows[layer], strict=True))
        if layer.weight_name:
            shared_weight = shared[layer.weight_name].T if layer.is_transposed else shared[layer.weight_name]
            squared_norms = ((x @ x.transpose(1, 2)) * (d @ d.transpose(1, 2))).sum((1, 2))
            products_by_name[layer.weight_name] = InnerProducts(((d @ shared_weight) * x).sum((1, 2)), squared_norms)
        if layer.bias_name:
            gradient = d.sum(1)
            products_by_name[layer.bias_name] = InnerProducts(
                gradient @ shared[layer.bias_name], gradient.square().sum(1)
            )
    return products_by_name


@dataclass(frozen=True)
class Distance:
    """Measures the distance between two lists of gradients.

    Attributes:
        kind: the distance without L1: "squares", "cosine" or "norms".
        l1: the weight of the sum of absolute differences, the same for all layers.
    """

    kind: DistanceKind
    l1: float = 0.0

    def __call__(self, dummy: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns () the distance of pairs of tensors of the same shape; 0 if they are equal."""
        distances = [self._of_gradients(a, b) for a, b in zip(dummy, shared, strict=True)]
        total = torch.stack(distances).sum()
        return total / len(distances) if self.kind == "cosine" else total

    def _of_gradients(self, dummy: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """Returns () what one parameter contributes to the distance, from its whole gradients."""
        if self.kind == "cosine":
            distance = 1.0 - (dummy * shared).sum() / (
                dummy.norm().clamp_min(MIN_NORM) * shared.norm().clamp_min(MIN_NORM)
            )
        else:
            gap = dummy - shared
            distance = gap.square().sum() if self.kind == "squares" else gap.norm()
        return distance + self.l1 * (dummy - shared).abs().sum() if self.l1 else distance

    def from_products(
        self, products: Mapping[str, InnerProducts], shared_squared_norms: Mapping[str, float]
    ) -> torch.Tensor:
        """Returns (h,) the distances of h guesses, without L1.

        Args:
            products: the inner products and norms of the guesses' gradients, by the parameter's name.
            shared_squared_norms: the squared norm of each shared gradient, by the parameter's name.
        """
        distances = [self._of_products(product, shared_squared_norms[name]) for name, product in products.items()]
        total = torch.stack(distances).sum(0)
        return total / len(distances) if self.kind == "cosine" else total

    def _of_products(self, products: InnerProducts, shared_squared_norm: float) -> torch.Tensor:
        """Returns (h,) what one parameter contributes to the distances."""
        if self.kind == "cosine":
            return 1.0 - products.inner / (
                products.squared_norms.clamp_min(MIN_NORM**2).sqrt() * max(shared_squared_norm**0.5, MIN_NORM)
            )
        gap = products.squared_norms - 2 * products.inner + shared_squared_norm
        return gap if self.kind == "squares" else gap.clamp_min(MIN_NORM**2).sqrt()


def gradient_products(dummy: torch.Tensor, shared: torch.Tensor) -> InnerProducts:
    """Returns the inner product and the squared norm of one guess's whole gradient."""
    return InnerProducts((dummy * shared).sum()[None], dummy.square().sum()[None])
