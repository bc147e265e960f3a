"""Keeps keys and values of finished conversations, whose ids the next turn begins with.

A new prompt reuses them for its longest common prefix with a cached row, and reads only the rest. Only equal ids of one
model match. When memory runs out, the longest unused row is dropped. Rows of `CachedRows` keep every position, even if
a model attends to a window, so that they can be cut anywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from milkglass.sequences import common_prefix
from milkglass.server.inference.model_runner import CachedRows, Prompt, RunningRows, TransformersRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_PREFIX_IDS = 32  # ids: shorter prefixes are read again, together with other prompts


@final
@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The keys and values of one row.

    Attributes:
        layers: keys and values (1, heads, t, d) of each layer.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def size(self) -> int:
        """Returns the bytes of the row."""
        return sum(tensor.numel() * tensor.element_size() for pair in self.layers for tensor in pair)


class PrefixCache:
    """The keys and values of finished rows by their ids, the longest unused first.

    Attributes:
        size: bytes of all rows, within the limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.size = limit, 0
        self._rows: OrderedDict[tuple[int, ...], CachedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def takes(self, row: CachedPrefix) -> bool:
        """Returns whether a row fits into the whole cache. A larger one is not copied."""
        return row.size <= self._limit

    def add(self, ids: tuple[int, ...], row: CachedPrefix) -> None:
        """Adds a row, and drops rows that are its beginnings. A row larger than the cache is not kept."""
        if not self.takes(row):
            return
        for prefix in [known for known in self._rows if known == ids[: len(known)]]:
            self._drop(prefix)
        self._rows[ids] = row
        self.size += row.size
        while self.size > self._limit:
            self._drop(next(iter(self._rows)))

    def longest(self, prompt: Sequence[int]) -> tuple[CachedPrefix, int] | None:
        """Returns the row with the longest common prefix, and the prefix's length without the prompt's last id."""
        best, length = None, MIN_PREFIX_IDS - 1
        for ids in self._rows:
            common = min(common_prefix(ids, prompt), len(prompt) - 1)
            if common > length:
                best, length = ids, common
        if best is None:
            return None
        self._rows.move_to_end(best)
        return self._rows[best], length

    def _drop(self, ids: tuple[int, ...]) -> None:
        self.size -= self._rows.pop(ids).size


class CachingRunner:
    """Runs a transformers model, and caches at most `limit` bytes of rows that end."""

    def __init__(self, model: PreTrainedModel, limit: int) -> None:
        self._model, self._runner = model, TransformersRunner(model)
        self.kept = PrefixCache(limit)

    def read(self, prompts: Sequence[Prompt]) -> tuple[RunningRows, torch.Tensor]:
        """Reads prompts without a cached prefix together, and the others one by one.

        The rests of the others are short, and padding between a prefix and its rest would shift windows.
        """
        prefixes = [None if isinstance(prompt, torch.Tensor) else self.kept.longest(prompt) for prompt in prompts]
        fresh = [place for place, prefix in enumerate(prefixes) if prefix is None]
        groups = [self._runner.read([prompts[place] for place in fresh])] if fresh else []
        order = list(fresh)
        for place, prefix in enumerate(prefixes):
            if prefix is not None:
                groups.append(self._go_on(*prefix, prompts[place]))
                order.append(place)
        rows = groups[0][0]
        for other, _ in groups[1:]:
            rows.join(other)
        back = sorted(range(len(order)), key=order.__getitem__)
        if back != list(range(len(back))):
            rows.keep(back)
        return rows, torch.cat([logits for _, logits in groups])[back]

    def _go_on(self, row: CachedPrefix, length: int, prompt: Prompt) -> tuple[CachedRows, torch.Tensor]:
        """Reads what follows the first `length` ids."""
        from transformers import DynamicCache

        cache, device = DynamicCache(), self._model.device
        for number, (keys, values) in enumerate(row.layers):
            cache.update(keys[:, :, :length], values[:, :, :length], number)
        rows = CachedRows(self._model, cache, torch.ones(1, len(prompt), dtype=torch.long, device=device))
        positions = torch.arange(length, len(prompt), device=device)[None]
        rest = torch.tensor([list(prompt[length:])], device=device)
        return rows, rows.forward({"input_ids": rest}, positions)

    def remember(self, rows: RunningRows, place: int, ids: Sequence[int]) -> None:
        """Caches a row that ends. `ids` are its prompt and answer, whose last id may not have been read."""
        assert isinstance(rows, CachedRows)
        length = int(rows.mask[place].sum())
        if length < MIN_PREFIX_IDS:
            return
        part = (slice(place, place + 1), slice(None), slice(-length, None))
        seen = CachedPrefix(tuple((layer.keys[part], layer.values[part]) for layer in rows.cache.layers))
        if self.kept.takes(seen):
            copies = tuple((keys.clone(), values.clone()) for keys, values in seen.layers)
            self.kept.add(tuple(ids[:length]), CachedPrefix(copies))
