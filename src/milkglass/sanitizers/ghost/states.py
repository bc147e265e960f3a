"""GHOST's measure: how far the hidden states of many sequences are from those of others, with little work.

    loss(t') = sum over layers of the mean, over tokens and width, of (h(t) - h(t'))^2        (section 3.4)

The sum is over what enters each layer, the embeddings first, and the model's output: transformers' own `hidden_states`.
All sequences of a call have one length, so there is no padding and no mask.

Two things save work and change no loss. A sequence whose sum exceeds its bound before the last layer is dropped there
(`losses`). For a causal model the results for a common beginning are reused (`Prefix`).

Hooks watch the layers, so that masks, positions and attention are the model's own. Numbers are fp32. What an encoder is
given is moved to where its model is.
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
from milkglass.nearest.products import has_fast_bf16, multiply_by_onednn

FORWARD_TOKENS = 2048  # more don't make a processor faster
GPU_FORWARD_TOKENS = 32768
LOSS_SLACK = 1e-5  # relative: by how much rounding may move a loss when other sequences are beside it


class _NobodyLeft(Exception):
    """Every sequence of a forward is beyond its bound."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """What a causal model keeps of the beginnings of n sequences of one length.

    Attributes:
        keys, values: for each layer (n, heads, length, width).
        spent: (n,) the part of each loss that comes from the beginning.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    spent: torch.Tensor
    length: int = 0

    @classmethod
    def empty(cls, count: int) -> Prefix:
        return cls((), (), torch.zeros(count, dtype=torch.float64))

    def chosen(self, rows: torch.Tensor) -> Prefix:
        """Returns some of the beginnings, in this order."""
        keys, values = (tuple(tensor[rows] for tensor in tensors) for tensors in (self.keys, self.values))
        return Prefix(keys, values, self.spent[rows], self.length)

    def cache(self) -> Any:
        """Returns a cache for transformers, which may be changed."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.update(keys, values, layer)
        return cache


@dataclass(frozen=True, eq=False)
class Encoder:
    """A model without its head, in evaluation mode.

    Attributes:
        causal: whether a token's states depend only on the tokens before it.
        quick: whether candidates are first computed in bf16.
    """

    model: Any
    layers: tuple[Any, ...]
    causal: bool
    quick: bool = field(default_factory=has_fast_bf16)

    @classmethod
    def open(cls, folder: Path) -> Encoder:
        """Opens a model. Raises UnsupportedModel for an unknown family, CorruptCheckpoint if weights are missing."""
        base = Checkpoint.open(folder)
        kind = architecture_of(base).kind
        return cls.over(device.moved(body(base)), kind == "decoder")

    @classmethod
    def over(cls, model: Any, causal: bool) -> Encoder:
        """Wraps a loaded model. Raises UnsupportedModel if its layers are not found."""
        count = int(model.config.num_hidden_layers)
        lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
        if len(lists) != 1:
            raise UnsupportedModel(f"{len(lists)} lists of {count} layers were found in the model", "one is needed")
        multiply_by_onednn(model.eval(), has_fast_bf16())
        return cls(model, tuple(lists[0]), causal, has_fast_bf16() and model.device.type == "cpu")

    @property
    def tokens(self) -> int:
        """Returns how many tokens go through the model together."""
        return FORWARD_TOKENS if self.model.device.type == "cpu" else GPU_FORWARD_TOKENS

    def traces(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns (n, layers + 1, t, d) the states of sequences (n, t)."""
        entered: list[torch.Tensor] = []
        with torch.inference_mode(), self._watch(lambda layer, hidden, args, kwargs: entered.append(hidden)):
            last = self.model(input_ids=ids.to(self.model.device), use_cache=False).last_hidden_state
        return torch.stack([*entered, last], 1)

    def losses(
        self, ids: torch.Tensor, traces: torch.Tensor, owner: torch.Tensor, bounds: torch.Tensor,
        prefix: Prefix | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns (r,) the loss of each sequence in fp64, on the processor; inf if it exceeds its bound.

        ids (r, t) follow `prefix`, r beginnings of T - t tokens; `owner` (r,) is the trace, of (n, layers + 1, T, d),
        with which each is compared.
        """
        target = self.model.device
        ids, owner, bounds = ids.to(target), owner.to(target), bounds.to(target)
        tally = _ForwardSums(traces, owner, bounds * (1 + LOSS_SLACK), prefix or Prefix.empty(len(ids)), len(ids))
        cache = {} if prefix is None or not prefix.length else {"past_key_values": prefix.cache()}
        with torch.inference_mode(), self._watch(tally.enter):
            try:
                last = self.model(input_ids=ids, use_cache=bool(cache), **cache).last_hidden_state
                tally.count(len(self.layers), last)
            except _NobodyLeft:
                return torch.full((len(ids),), math.inf, dtype=torch.float64)
        return tally.result().cpu()

    def extended(self, prefix: Prefix, ids: torch.Tensor, traces: torch.Tensor, owner: torch.Tensor) -> Prefix:
        """Returns the beginnings followed by ids (n, s). See `losses` for `traces` and `owner`."""
        ids, owner = ids.to(self.model.device), owner.to(self.model.device)
        no_bounds = torch.full((len(ids),), math.inf, dtype=torch.float64, device=ids.device)
        tally, cache = _ForwardSums(traces, owner, no_bounds, prefix, len(ids)), prefix.cache()
        with torch.inference_mode(), self._watch(tally.enter):
            last = self.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        tally.count(len(self.layers), last)
        keys, values = (tuple(getattr(layer, name) for layer in cache.layers) for name in ("keys", "values"))
        return Prefix(keys, values, tally.sums, prefix.length + ids.shape[1])

    @contextmanager
    def _watch(self, enter: Any) -> Iterator[None]:
        """Calls enter(layer, hidden, args, kwargs) before each layer; it may return other arguments."""

        def hook_of(layer: int) -> Any:
            def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                return enter(layer, args[0] if args else kwargs["hidden_states"], args, kwargs)

            return hook

        layers = enumerate(self.layers)
        hooks = [layer.register_forward_pre_hook(hook_of(number), with_kwargs=True) for number, layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _ForwardSums:
    """The sums of one forward, and the rows (a,) still in it, by their numbers at the beginning."""

    def __init__(
        self, traces: torch.Tensor, owner: torch.Tensor, bounds: torch.Tensor, prefix: Prefix, count: int
    ) -> None:
        self.traces, self.owner, self.bounds, self.length = traces, owner, bounds, prefix.length
        self.sums = prefix.spent.to(traces.device, copy=True)
        self.rows, self.all = torch.arange(count, device=traces.device), count

    def count(self, layer: int, hidden: torch.Tensor) -> None:
        stop = self.length + hidden.shape[1]
        error = hidden - self.traces[self.owner[self.rows], layer, self.length : stop]
        number_count = self.traces.shape[2] * self.traces.shape[3]
        self.sums[self.rows] += error.square().sum((1, 2)).double() / number_count

    def enter(self, layer: int, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counts what enters a layer, and keeps the rows within their bounds."""
        self.count(layer, hidden)
        is_within = self.sums[self.rows] <= self.bounds[self.rows]
        if not is_within.any():
            raise _NobodyLeft
        if not is_within.all():
            self.rows, hidden = self.rows[is_within], hidden[is_within]
        if len(self.rows) == self.all:
            return None
        other_arguments = {name: self._narrow(layer, kwargs[name]) for name in kwargs if name != "hidden_states"}
        if args:
            return (hidden, *(self._narrow(layer, argument) for argument in args[1:])), other_arguments
        return args, {"hidden_states": hidden, **other_arguments}

    def _narrow(self, layer: int, argument: Any) -> Any:
        """Returns the part for the remaining rows of what was made for all, such as masks and a layer's cache."""
        if isinstance(argument, torch.Tensor):
            return argument[self.rows] if argument.dim() > 1 and argument.shape[0] == self.all else argument
        if isinstance(argument, tuple):
            return tuple(self._narrow(layer, part) for part in argument)
        if hasattr(argument, "layers") and layer < len(argument.layers):
            argument.layers[layer].batch_select_indices(self.rows)  # a cache's; asked for once in a forward
        return argument

    def result(self) -> torch.Tensor:
        losses = torch.full_like(self.sums, math.inf)
        losses[self.rows] = torch.where(self.sums[self.rows] <= self.bounds[self.rows], self.sums[self.rows], math.inf)
        return losses
