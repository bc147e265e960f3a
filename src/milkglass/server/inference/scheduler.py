"""Which sequences run: requests join between two tokens and leave when they are done, whatever the others do.

The policy of continuous batching, apart from the model: it knows no runner's memory and draws no id itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

import torch

from milkglass.server.inference.engine import that_fit
from milkglass.server.inference.model_runner import RunningRows
from milkglass.server.inference.sequence import Sequence

OnLeave: TypeAlias = Callable[[Sequence, RunningRows, int], None]
PREFILL = 8192  # padded prompt tokens that are read in one pass, unless one prompt alone is longer


class Scheduler:
    """The running sequences, and for each the id that the model has not read yet.

    Attributes:
        running: the sequences, in the order of the runner's rows.
        newest: the last id of each.
        rows: the runner's side of them; None while nothing runs.
    """

    def __init__(self, max_batch: int, on_leave: OnLeave | None = None) -> None:
        """on_leave: called with each sequence that leaves and its row, before the row is gone."""
        self._max_batch, self._on_leave = max_batch, on_leave
        self.running: list[Sequence] = []
        self.newest: list[int] = []
        self.rows: RunningRows | None = None

    @property
    def free(self) -> int:
        """How many more sequences may run."""
        return self._max_batch - len(self.running)

    @staticmethod
    def fitting(waiting: Iterable[Sequence]) -> int:
        """How many of the first that wait are read together in the next pass."""
        return that_fit([len(one.prompt) for one in waiting], PREFILL)

    def drop_cancelled(self) -> None:
        self._keep([not one.cancelled for one in self.running])

    def accept(self, logits: torch.Tensor) -> None:
        """Give every running sequence its next id; those that end leave. logits: (rows, n)."""
        ids = [one.sample(row) for one, row in zip(self.running, logits, strict=True)]
        self.newest = [-1 if token is None else token for token in ids]
        self._keep([token is not None for token in ids])

    def join(self, other: Scheduler) -> None:
        """Take over what another one runs."""
        if self.rows is None:
            self.rows = other.rows
        elif other.rows is not None:
            self.rows.join(other.rows)
        self.running += other.running
        self.newest += other.newest

    def begun(self, sequences: Collection[Sequence], rows: RunningRows, logits: torch.Tensor) -> Scheduler:
        """A scheduler of newly read sequences alone, each with its first id: until they `join`, nothing that fails
        harms those that run."""
        fresh = Scheduler(self._max_batch, self._on_leave)
        fresh.running, fresh.rows = [*sequences], rows
        fresh.accept(logits)
        return fresh

    def split(self, places: list[int]) -> Scheduler:
        """Take some sequences out, with their rows, into a scheduler of their own."""
        assert self.rows is not None
        other = Scheduler(self._max_batch)
        other.running, other.newest = [self.running[i] for i in places], [self.newest[i] for i in places]
        other.rows = self.rows.take(places)
        self._keep([place not in places for place in range(len(self.running))], told=False)
        return other

    def clear(self) -> list[Sequence]:
        """Forget everything. Returns the sequences that ran."""
        running, self.running, self.newest, self.rows = self.running, [], [], None
        return running

    def _keep(self, stays: list[bool], told: bool = True) -> None:
        if all(stays):
            return
        if told and self._on_leave is not None and self.rows is not None:
            for place in [place for place, one in enumerate(stays) if not one]:
                self._on_leave(self.running[place], self.rows, place)
        places = [place for place, one in enumerate(stays) if one]
        self.running = [self.running[place] for place in places]
        self.newest = [self.newest[place] for place in places]
        if not places:
            self.rows = None
        elif self.rows is not None:
            self.rows.keep(places)
