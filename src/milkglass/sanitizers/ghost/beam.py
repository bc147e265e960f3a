"""One sentence in GHOST's selection: the sequences that are tried at a place, and the best so far.

No model runs here. The caller measures candidates and writes their losses into them.
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
        parent: the place, in the beam before, of the sequence from which it was made.
        loss: nan until it is measured, inf if it is known not to be among the best; a start has inf.
    """

    ids: Ids
    parent: int = 0
    loss: float = math.nan


class Sentence:
    """One sentence and its beam.

    Attributes:
        original: (t,) its own tokens.
        width: the most sequences of the beam.
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
        """Returns each sequence of the beam with each shadow at a place, without repetitions, with known losses."""
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
        """Makes the best of the pool the beam. Ties go to the earlier one."""
        before = [one.ids.tobytes() for one in self.beam]
        best = sorted(pool, key=lambda one: one.loss)[: self.width]
        self.beam = [one for one in best if one.loss < math.inf]
        self._steps += 1
        if [one.ids.tobytes() for one in self.beam] != before:
            self._changed = self._steps
        self._visited[at] = self._steps

    def due(self, at: int) -> bool:
        """Returns whether something has changed since this place was visited."""
        return bool(self._visited[at] < 0 or self._changed > self._visited[at])

    @property
    def bound(self) -> float:
        """Returns the loss that a candidate must not exceed to be among the best.

        The beam's sequences are among the candidates of every place, since each of their tokens is one of its shadows.
        """
        return self.beam[-1].loss if len(self.beam) == self.width else math.inf

    def end_sweep(self, threshold: float) -> None:
        """Notes the best loss, and whether it fell by less than the threshold."""
        self.history.append(self.beam[0].loss)
        self.settled = len(self.history) > 1 and self.history[-2] - self.history[-1] < threshold
