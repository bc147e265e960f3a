"""The thread that runs a decoder for clients that have its embedding layer.

The rows of all sessions run in one batch, as in `server/inference/generator.py`, but a row can go on only when its
client's vector has arrived. Rows whose vectors arrive in time go on together. The others are parked, each in its own
group, and join again when their vector arrives. A slow client delays others by at most `GRACE`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from milkglass.server.inference.engine import Engine
from milkglass.server.inference.generator import Scheduler, Sequence, admit
from milkglass.server.inference.model_runner import ModelRunner

GRACE = 0.005  # seconds that rows with a vector wait for the others


@dataclass(eq=False)
class SplitSequence(Sequence):
    """A sequence whose tokens arrive as vectors.

    Attributes:
        vectors: (1, d) of the newest token, if it has arrived and was not read.
    """

    vectors: torch.Tensor | None = None

    @property
    def due(self) -> bool:
        """Returns whether there is something to do for the sequence."""
        return self.vectors is not None or self.cancelled


class SplitGenerator(Engine[SplitSequence]):
    """The thread of one decoder. `submit` hands in a prompt, `deliver` each later vector."""

    def __init__(self, runner: ModelRunner, max_batch: int) -> None:
        super().__init__("split generator", max_batch)
        self._runner, self._rows = runner, Scheduler(max_batch)
        self._parked: list[Scheduler] = []
        self._reading: list[SplitSequence] = []

    def deliver(self, sequence: SplitSequence, vectors: torch.Tensor) -> None:
        """Hands in the vector (1, d) of the newest token."""
        with self._changed:
            sequence.vectors = vectors
            self._changed.notify()

    def cancel(self, sequence: SplitSequence) -> None:
        with self._changed:
            sequence.cancelled = True
            self._changed.notify()

    def active(self) -> bool:
        return any(one.due for group in self._groups() for one in running(group))

    def step(self) -> None:
        """Drops cancelled rows and reads new prompts.

        Without new prompts, it advances each row whose vector has arrived by a token.
        """
        for group in self._groups():
            group.drop_cancelled()
        self._parked = [group for group in self._parked if group.running]
        waiting = [one for one in self.take(self._rows.free) if not one.cancelled]
        count = self._rows.fitting(waiting)
        self._reading = waiting[:count]
        self.put_back(waiting[count:])
        if self._reading:
            admit(self._reading, self._runner, self._rows)
            self._reading = []
        else:
            self._gather()
            self._advance()

    def drop(self) -> list[SplitSequence]:
        sequences = [*self._reading, *(one for group in self._groups() for one in running(group))]
        self._reading, self._parked = [], []
        self._rows.clear()
        return sequences

    def _groups(self) -> list[Scheduler]:
        return [self._rows, *self._parked]

    def _gather(self) -> None:
        """Waits up to GRACE for missing vectors, then parks rows without one and takes back parked rows with one."""
        until = time.monotonic() + GRACE
        with self._changed:
            while not all(one.due for one in running(self._rows)):
                left = until - time.monotonic()
                if left <= 0 or self._closed:
                    break
                self._changed.wait(left)
        late = [place for place, one in enumerate(running(self._rows)) if not one.due]
        if late:
            self._parked += [self._rows.split([place]) for place in reversed(late)]
        back = [group for group in self._parked if running(group)[0].due]
        self._parked = [group for group in self._parked if group not in back]
        for group in back:
            self._rows.join(group)

    def _advance(self) -> None:
        self._rows.drop_cancelled()
        rows, vectors = self._rows.rows, []
        if rows is None:
            return
        for one in running(self._rows):
            vectors.append(one.vectors)
            one.vectors = None
        self._rows.accept(rows.advance([one[0] for one in vectors if one is not None]))


def running(group: Scheduler) -> list[SplitSequence]:
    return group.running  # type: ignore[return-value]  # `submit` takes no other
