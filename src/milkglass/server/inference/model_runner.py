"""What runs a model for the generator, and the one that runs a transformers model.

A runner knows rows of ids and logits, and nothing of prompts' owners, sampling or the web; another engine can take its
place. Rows are padded on the left, so that every row's newest token is in the last column; masks and positions are
explicit, and a row's logits are those that it would get alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


class RunningRows(Protocol):
    """Rows that a model has read, in order, with what it remembers of them."""

    def advance(self, newest: list[int]) -> torch.Tensor:
        """Read one more id of each row. Returns logits (rows, n) of the next."""

    def keep(self, places: list[int]) -> None:
        """Forget all rows but these; at least one stays."""

    def join(self, other: RunningRows) -> None:
        """Append the rows of another group, which the same runner read."""


class ModelRunner(Protocol):
    """Reads prompts. A prompt that cannot be read raises and leaves all other rows unharmed."""

    def read(self, prompts: list[list[int]]) -> tuple[RunningRows, torch.Tensor]:
        """Read whole prompts. Returns a group of rows, and logits (rows, n) of the first id of each answer."""


class TransformersRunner:
    """Runs a transformers model with a key-value cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def read(self, prompts: list[list[int]]) -> tuple[CachedRows, torch.Tensor]:
        from transformers import DynamicCache  # here, so that the server answers before it has loaded a model

        device, width = self._model.device, max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        mask = (torch.arange(width, device=device) >= width - lengths).long()
        rows = CachedRows(self._model, DynamicCache(), mask)
        return rows, rows.forward(ids, (mask.cumsum(-1) - 1).clamp(min=0))


class CachedRows:
    """Keys and values (b, heads, t, d) of each layer, and a mask (b, t) that is 0 where a row is padded."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: torch.Tensor) -> None:
        self._model, self.cache, self.mask = model, cache, mask

    def advance(self, newest: list[int]) -> torch.Tensor:
        self.mask = pad(self.mask, (0, 1), value=1)
        ids = torch.tensor(newest, device=self.mask.device)[:, None]
        return self.forward(ids, self.mask.sum(-1, keepdim=True) - 1)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits

    def keep(self, places: list[int]) -> None:
        """Columns that are padding in all rows that stay are dropped."""
        index = torch.tensor(places, device=self.mask.device)
        self.mask = self.mask[index]
        left = int(self.mask.argmax(-1).min())
        self.mask = self.mask[:, left:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[index, :, left:]
            layer.values = layer.values[index, :, left:]

    def join(self, other: RunningRows) -> None:
        assert isinstance(other, CachedRows)
        mine, theirs = self.mask.shape[1], other.mask.shape[1]
        a, b = max(0, theirs - mine), max(0, mine - theirs)  # columns of padding that each needs on its left
        self.mask = torch.cat([pad(self.mask, (a, 0)), pad(other.mask, (b, 0))])
        for layer, new in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys = torch.cat([pad(layer.keys, (0, 0, a, 0)), pad(new.keys, (0, 0, b, 0))])
            layer.values = torch.cat([pad(layer.values, (0, 0, a, 0)), pad(new.values, (0, 0, b, 0))])
