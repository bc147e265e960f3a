"""Computes GHOST's loss: how far the hidden states of many sequences are from those of others.

    loss(t') = sum over layers of the mean, over tokens and width, of (h(t) - h(t'))^2        (section 3.4)

The sum is over what enters each layer, the embeddings first, and the model's output: transformers' own `hidden_states`.
All sequences of a call have one length, so there is no padding and no mask.

Two things save work and change no loss. A sequence whose sum exceeds its bound before the last layer is dropped at
that layer (`losses`). For a causal model the results for a common prefix are reused (`CachedPrefixes`).

Hooks watch the layers, so that masks, positions and attention are the model's own. Numbers are fp32, except for a first
look in bf16 (`screens_in_bf16`). Inputs are moved to the model's device.

Shapes: n sequences of T tokens are the originals; r sequences are compared with them, each with one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from milkglass import device
from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.models.torch_model import body
from milkglass.nearest.products import multiply_by_onednn

CPU_FORWARD_TOKENS = 2048  # tokens of one forward pass on a CPU; more bring no speed
GPU_FORWARD_TOKENS = 32768  # tokens of one forward pass on a GPU
LOSS_SLACK = 1e-5  # the relative change of a loss by rounding in another batch


class _AllDropped(Exception):
    """Stops a forward pass in which every sequence is beyond its bound."""


@dataclass(frozen=True, eq=False)
class CachedPrefixes:
    """Holds the keys and values of the prefixes of n sequences, in a causal model, and their losses so far.

    Attributes:
        keys, values: for each layer (n, heads, length, width).
        losses: (n,) the part of each sequence's loss that comes from its prefix.
        length: tokens of each prefix.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    losses: torch.Tensor
    length: int = 0

    @classmethod
    def empty(cls, count: int) -> CachedPrefixes:
        """Returns `count` prefixes without tokens."""
        return cls((), (), torch.zeros(count, dtype=torch.float64))

    def select(self, rows: torch.Tensor) -> CachedPrefixes:
        """Returns some of the prefixes, in this order."""
        keys, values = (tuple(tensor[rows] for tensor in tensors) for tensors in (self.keys, self.values))
        return CachedPrefixes(keys, values, self.losses[rows], self.length)

    def new_cache(self) -> Any:
        """Returns a new cache for transformers, which the caller may change."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.update(keys, values, layer)
        return cache


@dataclass(frozen=True, eq=False)
class HeadlessModel:
    """Computes hidden states, and losses between them, by a model without its head, in evaluation mode.

    Attributes:
        model: the model without its head, of transformers.
        layers: its layers in order, whose inputs are watched.
        is_causal: whether a token's states depend only on the tokens before it.
        screens_in_bf16: whether the selection may first compute candidates in bf16.
    """

    model: Any
    layers: tuple[Any, ...]
    is_causal: bool
    screens_in_bf16: bool = field(default_factory=device.has_fast_bf16)

    @classmethod
    def open(cls, folder: Path) -> HeadlessModel:
        """Loads a model onto the device, without its head.

        Raises UnsupportedModel for an unknown family, CorruptCheckpoint if weights are missing.
        """
        base = Checkpoint.open(folder)
        kind = architecture_of(base).kind
        return cls.wrap(device.move(body(base)), kind == "decoder")

    @classmethod
    def wrap(cls, model: Any, is_causal: bool) -> HeadlessModel:
        """Wraps a loaded model, and puts it into evaluation mode.

        Raises UnsupportedModel if its layers are not found.
        """
        count = int(model.config.num_hidden_layers)
        layer_lists = [
            module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count
        ]
        if len(layer_lists) != 1:
            raise UnsupportedModel(
                f"{len(layer_lists)} lists of {count} layers were found in the model", "one is needed"
            )
        multiply_by_onednn(model.eval(), device.has_fast_bf16())
        return cls(model, tuple(layer_lists[0]), is_causal, device.has_fast_bf16() and model.device.type == "cpu")

    @property
    def max_forward_tokens(self) -> int:
        """Returns how many tokens go through the model together at most."""
        return CPU_FORWARD_TOKENS if self.model.device.type == "cpu" else GPU_FORWARD_TOKENS

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns (n, layers + 1, t, d) the states of sequences (n, t)."""
        entered: list[torch.Tensor] = []
        with (
            torch.inference_mode(),
            self._before_each_layer(lambda layer, hidden, args, kwargs: entered.append(hidden)),
        ):
            last = self.model(input_ids=ids.to(self.model.device), use_cache=False).last_hidden_state
        return torch.stack([*entered, last], 1)

    def losses(
        self, ids: torch.Tensor, originals: torch.Tensor, original_index: torch.Tensor, bounds: torch.Tensor,
        prefix: CachedPrefixes | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns (r,) the loss of each sequence in fp64, on the CPU; inf if it exceeds its bound.

        Args:
            ids: (r, t) the last t tokens of each sequence.
            originals: (n, layers + 1, T, d) hidden states.
            original_index: (r,) the index of the original with which each sequence is compared.
            bounds: (r,) the bound of each sequence's loss; inf for none.
            prefix: the cached first T - t tokens of the r sequences. None: t is T.
        """
        model_device = self.model.device
        ids, original_index, bounds = (tensor.to(model_device) for tensor in (ids, original_index, bounds))
        prefixes = prefix or CachedPrefixes.empty(len(ids))
        sums = _ForwardSums(originals, original_index, bounds * (1 + LOSS_SLACK), prefixes, len(ids))
        cache = {} if prefix is None or not prefix.length else {"past_key_values": prefix.new_cache()}
        with torch.inference_mode(), self._before_each_layer(sums.enter):
            try:
                last = self.model(input_ids=ids, use_cache=bool(cache), **cache).last_hidden_state
                sums.add_layer(len(self.layers), last)
            except _AllDropped:
                return torch.full((len(ids),), math.inf, dtype=torch.float64)
        return sums.losses().cpu()

    def extend_prefix(
        self, prefix: CachedPrefixes, ids: torch.Tensor, originals: torch.Tensor, original_index: torch.Tensor
    ) -> CachedPrefixes:
        """Returns the prefixes followed by ids (r, s). See `losses` for the other arguments."""
        ids, original_index = ids.to(self.model.device), original_index.to(self.model.device)
        no_bounds = torch.full((len(ids),), math.inf, dtype=torch.float64, device=ids.device)
        sums, cache = _ForwardSums(originals, original_index, no_bounds, prefix, len(ids)), prefix.new_cache()
        with torch.inference_mode(), self._before_each_layer(sums.enter):
            last = self.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        sums.add_layer(len(self.layers), last)
        keys, values = (tuple(getattr(layer, name) for layer in cache.layers) for name in ("keys", "values"))
        return CachedPrefixes(keys, values, sums.sums, prefix.length + ids.shape[1])

    @contextmanager
    def _before_each_layer(self, enter: Any) -> Iterator[None]:
        """Calls enter(layer, hidden, args, kwargs) before each layer; it may return other arguments."""

        def hook_of(layer: int) -> Any:
            def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                return enter(layer, args[0] if args else kwargs["hidden_states"], args, kwargs)

            return hook

        layers = enumerate(self.layers)
        hooks = [layer.register_forward_pre_hook(hook_of(index), with_kwargs=True) for index, layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _ForwardSums:
    """Sums up the losses of the sequences of one forward pass, and drops sequences beyond their bounds.

    Attributes:
        sums: (r,) the loss of each sequence so far.
        rows: the indices of the sequences that are still in the pass.
    """

    def __init__(
        self,
        originals: torch.Tensor,
        original_index: torch.Tensor,
        bounds: torch.Tensor,
        prefix: CachedPrefixes,
        row_count: int,
    ) -> None:
        self._originals, self._original_index, self._bounds = originals, original_index, bounds
        self._prefix_length, self._row_count = prefix.length, row_count
        self.sums = prefix.losses.to(originals.device, copy=True)
        self.rows = torch.arange(row_count, device=originals.device)

    def add_layer(self, layer: int, hidden: torch.Tensor) -> None:
        """Adds what the states that enter a layer, or leave the last one, contribute to the losses."""
        stop = self._prefix_length + hidden.shape[1]
        difference = hidden - self._originals[self._original_index[self.rows], layer, self._prefix_length : stop]
        element_count = self._originals.shape[2] * self._originals.shape[3]
        self.sums[self.rows] += difference.square().sum((1, 2)).double() / element_count

    def enter(self, layer: int, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds what enters a layer, and keeps the rows within their bounds.

        Returns the layer's arguments for these rows; None if no row was dropped.
        """
        self.add_layer(layer, hidden)
        is_within = self.sums[self.rows] <= self._bounds[self.rows]
        if not is_within.any():
            raise _AllDropped
        if not is_within.all():
            self.rows, hidden = self.rows[is_within], hidden[is_within]
        if len(self.rows) == self._row_count:
            return None
        other_arguments = {name: self._narrow(layer, kwargs[name]) for name in kwargs if name != "hidden_states"}
        if args:
            return (hidden, *(self._narrow(layer, argument) for argument in args[1:])), other_arguments
        return args, {"hidden_states": hidden, **other_arguments}

    def _narrow(self, layer: int, argument: Any) -> Any:
        """Returns the part for the remaining rows of what was made for all, such as masks and a layer's cache."""
        if isinstance(argument, torch.Tensor):
            return argument[self.rows] if argument.dim() > 1 and argument.shape[0] == self._row_count else argument
        if isinstance(argument, tuple):
            return tuple(self._narrow(layer, part) for part in argument)
        if hasattr(argument, "layers") and layer < len(argument.layers):
            argument.layers[layer].batch_select_indices(self.rows)  # the layer's cache; this runs once a forward pass
        return argument

    def losses(self) -> torch.Tensor:
        """Returns (r,) the losses, inf for sequences beyond their bounds."""
        losses = torch.full_like(self.sums, math.inf)
        sums = self.sums[self.rows]
        losses[self.rows] = torch.where(sums <= self._bounds[self.rows], sums, math.inf)
        return losses
