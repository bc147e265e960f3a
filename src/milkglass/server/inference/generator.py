"""Continuous batching: a scheduler that decides which sequences run, a model runner that moves each on by one token."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch

from milkglass.server.inference.engine import Engine, explain, log
from milkglass.server.inference.model_runner import ModelRunner, RunningRows
from milkglass.server.inference.prefixes import PrefixRunner
from milkglass.server.inference.scheduler import Scheduler
from milkglass.server.inference.sequence import Sequence


def admit(newcomers: Collection[Sequence], runner: ModelRunner, scheduler: Scheduler) -> None:
    """Read their prompts, and let them join. Those that the model cannot read fail alone: the running rows know nothing
    of them yet."""
    try:
        fresh = scheduler.begun(newcomers, *runner.read([one.prompt for one in newcomers]))
    except Exception as error:  # noqa: BLE001  (whatever it was)
        Engine.fail_all([*newcomers], explain(error))
    else:
        scheduler.join(fresh)


class Generator(Engine[Sequence]):
    """The thread of one model that generates."""

    def __init__(self, runner: ModelRunner, max_batch: int, max_waiting: int) -> None:
        super().__init__("generator", max_waiting)
        self._runner = runner
        # Not a method: a circle of references would keep the weights when the model is put out
        on_leave = partial(_remember, runner) if isinstance(runner, PrefixRunner) else None
        self._scheduler = Scheduler(max_batch, on_leave)
        self._reading: list[Sequence] = []

    def step(self) -> None:
        """Cancelled sequences leave, waiting ones join, else one more token for every row."""
        scheduler = self._scheduler
        scheduler.drop_cancelled()
        self._reading = self._newcomers()
        if self._reading:
            admit(self._reading, self._runner, scheduler)
            self._reading = []
        elif scheduler.rows is not None:
            scheduler.accept(scheduler.rows.advance(scheduler.newest))

    def active(self) -> bool:
        return self._scheduler.rows is not None

    def drop(self) -> list[Sequence]:
        sequences = [*self._scheduler.clear(), *self._reading]
        self._reading = []
        return sequences

    def _newcomers(self) -> list[Sequence]:
        """As many as there are free rows for and as fit in one pass."""
        waiting = [one for one in self.take(self._scheduler.free) if not one.cancelled]
        count = self._scheduler.fitting(waiting)
        self.put_back(waiting[count:])
        return waiting[:count]


def _remember(runner: PrefixRunner, one: Sequence, rows: RunningRows, place: int) -> None:
    """A sequence ends, with this row of `rows`."""
    if isinstance(one.prompt, torch.Tensor):
        return
    try:
        runner.remember(rows, place, [*one.prompt, *one.answer])
    except (torch.OutOfMemoryError, MemoryError):  # the others that run must not end for it
        log.warning("no memory for a finished answer's keys and values: they are not kept")
