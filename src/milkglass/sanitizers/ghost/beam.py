"""One sentence on its way through GHOST's selection: the sequences that are tried at a place, and the best so far.

No model is run here: the caller measures candidates and writes their losses into them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from milkglass.sequences import Ids


@dataclass(eq=False)
class Candidate:
    """A sequence that is tried.

    Attributes:
        ids: (t,).
        parent: the place, in the beam before, of the sequence that it was made from.
        loss: nan until it is measured, inf where it is known not to be among the best; a start has inf.
    """

    ids: Ids
    parent: int = 0
    loss: float = math.nan


class Sentence:
    """One sentence and its beam.

    Attributes:
        original: (t,) its own tokens.
        width: how many sequences the beam may have.
        beam: the best sequences, best first.
        history: the best loss at the start and after each sweep.
        settled: whether it has converged.
    """

    def __init__(self, original: Ids, start: Ids, width: int) -> None:
        self.original, self.width = original, width
        self.beam = [Candidate(start.copy(), loss=math.inf)]
        self.history: list[float] = []
        self.settled = False
        self._steps, self._changed, self._visited = 0, 0, np.full(len(original), -1)

    def candidates(self, at: int, shadows: Ids) -> list[Candidate]:
        """Each sequence of the beam with each shadow at a place, with its loss where it is known. None twice."""
        known = {one.ids.tobytes(): one.loss for one in self.beam}
        result: dict[bytes, Candidate] = {}
        for parent, one in enumerate(self.beam):
            for shadow in shadows:
                tried = one.ids.copy()
                tried[at] = shadow
                name = tried.tobytes()
                result.setdefault(name, Candidate(tried, parent, known.get(name, math.nan)))
        return [*result.values()]

    def take(self, at: int, pool: list[Candidate]) -> None:
        """The best of the pool are the beam; ties fall to the earlier one."""
        before = [one.ids.tobytes() for one in self.beam]
        best = sorted(pool, key=lambda one: one.loss)[: self.width]
        self.beam = [one for one in best if one.loss < math.inf]
        self._steps += 1
        if [one.ids.tobytes() for one in self.beam] != before:
            self._changed = self._steps
        self._visited[at] = self._steps

    def due(self, at: int) -> bool:
        """Whether something has changed since this place was visited."""
        return bool(self._visited[at] < 0 or self._changed > self._visited[at])

    @property
    def bound(self) -> float:
        """What a candidate must not exceed to be among the best. The beam's sequences are among the candidates of every
        place, since each of their tokens is one of its shadows."""
        return self.beam[-1].loss if len(self.beam) == self.width else math.inf

    def end_sweep(self, threshold: float) -> None:
        """Note the best loss, and whether it has fallen by less than the threshold."""
        self.history.append(self.beam[0].loss)
        self.settled = len(self.history) > 1 and self.history[-2] - self.history[-1] < threshold
