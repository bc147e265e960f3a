"""Runs a model for the generator: the interface of a runner, one for transformers models, and one with a cache.

A runner handles rows of ids and logits alone, not sampling, users or the web, so that another engine can replace it.
Rows are padded on the left, so that every row's newest token is in the last column. Masks and positions are explicit: a
row's logits are those that it would get alone. A token is an id, or its vector from the embedding layer, if a client
has this layer.

`CachingRunner` keeps keys and values of finished conversations, because the next turn's prompt begins with their ids. A
new prompt reuses them for its longest common prefix with a cached row, and runs only the rest. Only equal ids of one
model match. Rows keep every position, even if a model uses sliding-window attention, so that they can be cut anywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

import torch
from torch.nn.functional import pad

from milkglass.sequences import common_prefix_length

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


Prompt: TypeAlias = "Sequence[int] | torch.Tensor"  # ids, or vectors (t, d)
Token: TypeAlias = "int | torch.Tensor"  # an id, or a vector (d,)
MIN_PREFIX_IDS = 32  # shorter prefixes are computed again, together with other prompts


class RunningRows(Protocol):
    """Holds the rows that a model has read, in order, with their key-value cache, and runs their next tokens."""

    def advance(self, newest_tokens: Sequence[Token]) -> torch.Tensor:
        """Runs one more token of each row. Returns logits (rows, vocabulary) of the next token."""

    def keep(self, indices: list[int]) -> None:
        """Keeps these rows, at least one, in this order. A row may be named twice."""

    def take(self, indices: list[int]) -> RunningRows:
        """Returns copies of some of the rows as a new group."""

    def join(self, other: RunningRows) -> None:
        """Appends the rows of another group of the same runner."""


class ModelRunner(Protocol):
    """Runs prompts. It raises for a prompt that cannot be run; other rows are not affected."""

    def prefill(self, prompts: Sequence[Prompt]) -> tuple[RunningRows, torch.Tensor]:
        """Runs whole prompts. Returns a group of rows, and logits (rows, vocabulary) of the first id of each answer."""


class TransformersRunner:
    """Runs a transformers model with a key-value cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def prefill(self, prompts: Sequence[Prompt]) -> tuple[TransformersRows, torch.Tensor]:
        from transformers import DynamicCache  # here, so that the server answers before it has loaded a model

        device, width = self._model.device, max(map(len, prompts))
        lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        mask = (torch.arange(width, device=device) >= width - lengths).long()
        rows = TransformersRows(self._model, DynamicCache(), mask)
        return rows, rows.forward(model_inputs(prompts, self._model), (mask.cumsum(-1) - 1).clamp(min=0))


def model_inputs(prompts: Sequence[Prompt], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the model's inputs, padded on the left: ids (b, t) or vectors (b, t, d). All prompts are of one kind."""
    width = max(map(len, prompts))
    if isinstance(prompts[0], torch.Tensor):
        vectors = [pad(torch.as_tensor(prompt), (0, 0, width - len(prompt), 0)) for prompt in prompts]
        scale = getattr(model.get_input_embeddings(), "embed_scale", None)  # some layers scale what they look up
        stacked = torch.stack(vectors).to(model.device, model.dtype)
        return {"inputs_embeds": stacked if scale is None else stacked * scale.to(stacked)}
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids, device=model.device)}


class TransformersRows:
    """Holds the rows that a transformers model has read, and implements `RunningRows`.

    Attributes:
        cache: keys and values (b, heads, t, d) of each layer.
        mask: (b, t), 0 at padding.
    """

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: torch.Tensor) -> None:
        self._model, self.cache, self.mask = model, cache, mask

    def advance(self, newest_tokens: Sequence[Token]) -> torch.Tensor:
        self.mask = pad(self.mask, (0, 1), value=1)
        token_rows = [token[None] if isinstance(token, torch.Tensor) else [token] for token in newest_tokens]
        return self.forward(model_inputs(token_rows, self._model), self.mask.sum(-1, keepdim=True) - 1)

    def forward(self, tokens: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
        """Runs tokens at `positions` (b, t). Returns the logits (b, vocabulary) of the last column."""
        options: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        output = self._model(**tokens, attention_mask=self.mask, position_ids=positions, **options)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def take(self, indices: list[int]) -> TransformersRows:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer_index, layer in enumerate(self.cache.layers):
            cache.update(layer.keys, layer.values, layer_index)
        rows = TransformersRows(self._model, cache, self.mask)
        rows.keep(indices)  # copies what it keeps
        return rows

    def keep(self, indices: list[int]) -> None:
        """Keeps these rows, and drops columns that are padding in all of them."""
        index = torch.tensor(indices, device=self.mask.device)
        self.mask = self.mask[index]
        padding_columns = int(self.mask.argmax(-1).min())
        self.mask = self.mask[:, padding_columns:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[index, :, padding_columns:]
            layer.values = layer.values[index, :, padding_columns:]

    def join(self, other: RunningRows) -> None:
        assert isinstance(other, TransformersRows)
        width = max(self.mask.shape[1], other.mask.shape[1])

        def join_tensors(tensor: torch.Tensor, other_tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat([pad(rows, (0, 0, width - rows.shape[-2], 0)) for rows in (tensor, other_tensor)])

        self.mask = join_tensors(self.mask[..., None], other.mask[..., None])[..., 0]
        for layer, other_layer in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys = join_tensors(layer.keys, other_layer.keys)
            layer.values = join_tensors(layer.values, other_layer.values)


@final
@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """Holds the keys and values of one row.

    Attributes:
        layers: the keys and the values (1, heads, t, d) of each layer.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def size_bytes(self) -> int:
        """Returns how many bytes the keys and values take."""
        return sum(tensor.numel() * tensor.element_size() for pair in self.layers for tensor in pair)


class PrefixCache:
    """Caches the keys and values of finished rows by their ids, at most `max_bytes`.

    The least recently used rows are dropped first.

    Attributes:
        size_bytes: the bytes of all rows that are cached now.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.size_bytes = max_bytes, 0
        self._rows: OrderedDict[tuple[int, ...], CachedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def fits(self, row: CachedPrefix) -> bool:
        """Returns whether a row fits into the whole cache."""
        return row.size_bytes <= self._max_bytes

    def add(self, ids: tuple[int, ...], row: CachedPrefix) -> None:
        """Adds a row, and drops rows that are prefixes of it. A row larger than the cache is not kept."""
        if not self.fits(row):
            return
        for prefix in [cached_ids for cached_ids in self._rows if cached_ids == ids[: len(cached_ids)]]:
            self._drop(prefix)
        self._rows[ids] = row
        self.size_bytes += row.size_bytes
        while self.size_bytes > self._max_bytes:
            self._drop(next(iter(self._rows)))

    def longest_match(self, prompt: Sequence[int]) -> tuple[CachedPrefix, int] | None:
        """Returns the cached row with the longest common prefix with a prompt, and the prefix's length.

        The length is at most len(prompt) - 1. Returns None if no prefix has MIN_PREFIX_IDS. The row counts as used.
        """
        best_ids, length = None, MIN_PREFIX_IDS - 1
        for ids in self._rows:
            shared_length = min(common_prefix_length(ids, prompt), len(prompt) - 1)
            if shared_length > length:
                best_ids, length = ids, shared_length
        if best_ids is None:
            return None
        self._rows.move_to_end(best_ids)
        return self._rows[best_ids], length

    def _drop(self, ids: tuple[int, ...]) -> None:
        self.size_bytes -= self._rows.pop(ids).size_bytes


class CachingRunner:
    """Runs a transformers model, and caches at most `max_bytes` of finished rows."""

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        self._model, self._runner = model, TransformersRunner(model)
        self.prefixes = PrefixCache(max_bytes)

    def prefill(self, prompts: Sequence[Prompt]) -> tuple[RunningRows, torch.Tensor]:
        """Runs prompts without a cached prefix together, and the others one by one.

        What follows a cached prefix is short, and padding between the two would shift attention windows.
        """
        cache = self.prefixes
        prefixes = [None if isinstance(prompt, torch.Tensor) else cache.longest_match(prompt) for prompt in prompts]
        uncached = [index for index, prefix in enumerate(prefixes) if prefix is None]
        groups = [self._runner.prefill([prompts[index] for index in uncached])] if uncached else []
        prompt_order = list(uncached)
        for index, prefix in enumerate(prefixes):
            if prefix is not None:
                groups.append(self._prefill_after(*prefix, prompts[index]))
                prompt_order.append(index)
        rows = groups[0][0]
        for other, _ in groups[1:]:
            rows.join(other)
        inverse_order = sorted(range(len(prompt_order)), key=prompt_order.__getitem__)
        if inverse_order != list(range(len(inverse_order))):
            rows.keep(inverse_order)
        return rows, torch.cat([logits for _, logits in groups])[inverse_order]

    def _prefill_after(
        self, prefix: CachedPrefix, length: int, prompt: Prompt
    ) -> tuple[TransformersRows, torch.Tensor]:
        """Runs what follows the first `length` ids of a prompt, whose keys and values `prefix` has."""
        from transformers import DynamicCache

        cache, device = DynamicCache(), self._model.device
        for layer_index, (keys, values) in enumerate(prefix.layers):
            cache.update(keys[:, :, :length], values[:, :, :length], layer_index)
        rows = TransformersRows(self._model, cache, torch.ones(1, len(prompt), dtype=torch.long, device=device))
        positions = torch.arange(length, len(prompt), device=device)[None]
        suffix_ids = torch.tensor([list(prompt[length:])], device=device)
        return rows, rows.forward({"input_ids": suffix_ids}, positions)

    def cache_row(self, rows: RunningRows, index: int, ids: Sequence[int]) -> None:
        """Caches a finished row.

        Args:
            rows: the rows of which it is one.
            index: its index among them.
            ids: its prompt and answer, of which the last id may not have been run.
        """
        assert isinstance(rows, TransformersRows)
        length = int(rows.mask[index].sum())
        if length < MIN_PREFIX_IDS:
            return
        row_slice = (slice(index, index + 1), slice(None), slice(-length, None))
        prefix = CachedPrefix(tuple((layer.keys[row_slice], layer.values[row_slice]) for layer in rows.cache.layers))
        if self.prefixes.fits(prefix):
            copies = tuple((keys.clone(), values.clone()) for keys, values in prefix.layers)
            self.prefixes.add(tuple(ids[:length]), CachedPrefix(copies))
