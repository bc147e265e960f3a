"""Continuous batching: requests join between two tokens and leave when they are done, whatever the others do.

Rows are padded on the left, so that every row's newest token is in the last column; masks and positions are explicit,
and a row's answer is the one that it would get alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from milkglass.errors import MilkglassError
from milkglass.server.inference.engine import Engine, explain, not_finite, that_fit
from milkglass.server.inference.sampling import SamplingParams, draw, generator

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

PREFILL = 8192  # padded prompt tokens that are read in one pass, unless one prompt alone is longer


@dataclass(eq=False)
class Sequence:
    """One prompt and what came of it. `on_token(id, reason)` is called in the engine's thread; a reason ends it:
    `stop` (the id is one of the stop ids) or `length`. `on_error` ends it too. Setting `cancelled` frees its row."""

    prompt: list[int]
    sampling: SamplingParams
    on_token: Callable[[int, str | None], None]
    on_error: Callable[[MilkglassError], None]
    cancelled: bool = False
    made: int = 0
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = generator(self.sampling)

    def fail(self, error: MilkglassError) -> None:
        self.cancelled = True
        self.on_error(error)

    def choose(self, logits: torch.Tensor) -> int | None:
        """Draw the next id and tell it. None: this was the last one."""
        if not torch.isfinite(logits).any() or torch.isnan(logits).any():
            self.fail(not_finite())
            return None
        try:
            token = draw(logits, self.sampling, self.rng)
        except Exception as error:  # noqa: BLE001  (one row's draw must not end the others)
            self.fail(explain(error))
            return None
        self.made += 1
        stopped = token in self.sampling.stop
        reason = "stop" if stopped else "length" if self.made >= self.sampling.max_tokens else None
        self.on_token(token, reason)
        return None if reason else token


class KeyValues:
    """What the model remembers of the running rows: keys and values (b, heads, t, d) a layer, and mask (b, t)."""

    def __init__(self, cache: DynamicCache, mask: torch.Tensor) -> None:
        self.cache, self.mask = cache, mask

    def select(self, rows: list[int]) -> None:
        """Keep these rows, and drop the columns that are padding in all of them."""
        index = torch.tensor(rows, device=self.mask.device)
        self.mask = self.mask[index]
        left = int(self.mask.argmax(-1).min())
        self.mask = self.mask[:, left:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[index, :, left:]
            layer.values = layer.values[index, :, left:]

    def join(self, other: KeyValues) -> None:
        """Append the other's rows below ours."""
        mine, theirs = self.mask.shape[1], other.mask.shape[1]
        a, b = max(0, theirs - mine), max(0, mine - theirs)  # columns of padding that each needs on its left
        self.mask = torch.cat([pad(self.mask, (a, 0)), pad(other.mask, (b, 0))])
        for layer, new in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys = torch.cat([pad(layer.keys, (0, 0, a, 0)), pad(new.keys, (0, 0, b, 0))])
            layer.values = torch.cat([pad(layer.values, (0, 0, a, 0)), pad(new.values, (0, 0, b, 0))])


class DecodeBatch:
    """The rows that one forward pass moves on by one token. `newest` are the last ids, which the model has not read."""

    def __init__(self, rows: list[Sequence], memory: KeyValues) -> None:
        self.rows, self.memory = rows, memory
        self.newest: list[int] = []

    @classmethod
    def read(cls, model: PreTrainedModel, rows: list[Sequence]) -> DecodeBatch:
        """Read the prompts, and give each row its first token."""
        from transformers import DynamicCache  # here, so that the server answers before it has loaded a model

        width = max(len(row.prompt) for row in rows)
        ids = torch.tensor([[0] * (width - len(row.prompt)) + row.prompt for row in rows], device=model.device)
        lengths = torch.tensor([[len(row.prompt)] for row in rows], device=model.device)
        mask = (torch.arange(width, device=model.device) >= width - lengths).long()
        batch = cls(rows, KeyValues(DynamicCache(), mask))
        batch._forward(model, ids, (mask.cumsum(-1) - 1).clamp(min=0))
        return batch

    def advance(self, model: PreTrainedModel) -> None:
        self.memory.mask = pad(self.memory.mask, (0, 1), value=1)
        ids = torch.tensor(self.newest, device=model.device)[:, None]
        self._forward(model, ids, self.memory.mask.sum(-1, keepdim=True) - 1)

    def _forward(self, model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> None:
        logits = model(
            input_ids=ids,
            attention_mask=self.memory.mask,
            position_ids=positions,
            past_key_values=self.memory.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        selected = [row.choose(one) for row, one in zip(self.rows, logits, strict=True)]
        self.newest = [-1 if token is None else token for token in selected]
        self.keep([token is not None for token in selected])

    def keep(self, expected: list[bool]) -> None:
        if all(expected):
            return
        places = [place for place, stays in enumerate(expected) if stays]
        self.rows = [self.rows[place] for place in places]
        self.newest = [self.newest[place] for place in places]
        if places:
            self.memory.select(places)

    def join(self, other: DecodeBatch) -> None:
        self.rows += other.rows
        self.newest += other.newest
        self.memory.join(other.memory)


class Generator(Engine[Sequence]):
    def __init__(self, model: PreTrainedModel, max_batch: int, max_waiting: int) -> None:
        super().__init__("generator", max_waiting)
        self._model, self._max_batch = model, max_batch
        self._running: DecodeBatch | None = None
        self._reading: list[Sequence] = []

    def step(self) -> None:
        """Let the gone leave, let the waiting join, then one more token for everybody."""
        if self._running:
            self._running.keep([not row.cancelled for row in self._running.rows])
            self._running = self._running if self._running.rows else None
        self._reading = self._newcomers()
        if self._reading:
            self._read()
        elif self._running:
            self._running.advance(self._model)

    def _read(self) -> None:
        """Newcomers that the model cannot read fail alone: the running rows know nothing of them yet."""
        try:
            batch = DecodeBatch.read(self._model, self._reading)
        except Exception as error:  # noqa: BLE001  (whatever it was)
            self.fail_all(self._reading, explain(error))
            self._reading = []
            return
        self._add(batch)
        self._reading = []

    def _add(self, batch: DecodeBatch) -> None:
        if self._running is None:
            self._running = batch
        elif batch.rows:
            self._running.join(batch)

    def active(self) -> bool:
        return self._running is not None

    def drop(self) -> list[Sequence]:
        rows = [*(self._running.rows if self._running else []), *self._reading]
        self._running, self._reading = None, []
        return rows

    def _newcomers(self) -> list[Sequence]:
        """As many as there are free rows for and as fit in one pass."""
        free = self._max_batch - (len(self._running.rows) if self._running else 0)
        waiting = [one for one in self.take(free) if not one.cancelled]
        count = that_fit([len(one.prompt) for one in waiting], PREFILL)
        self.put_back(waiting[count:])
        return waiting[:count]
