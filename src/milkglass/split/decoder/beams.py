"""A beam search whose tokens come as vectors: one session with as many rows as it has beams.

The search itself is `server/inference/beam_search.py`. Its rows are a group of their own: they go on together, when the
client's frame with a vector for each has come, and beside the rows of other sessions, not in one pass with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from milkglass.errors import MilkglassError
from milkglass.server.inference.beam_search import BeamParams, BeamSearch
from milkglass.server.inference.engine import explain
from milkglass.server.inference.model_runner import ModelRunner, RunningRows


@dataclass(eq=False)
class BeamSequence:
    """One prompt on its way. Callbacks are called in the engine's thread.

    Attributes:
        prompt: vectors (t, d).
        params: of the search.
        on_ids: receives the next id of each beam and None; at the end the answer's ids and "stop" or "length".
        on_error: ends the sequence, too.
        vectors: (beams, d) of the newest tokens, where they have come and were not read.
        cancelled: frees the rows before the next token.
        ended: whether there is nothing more to do.
    """

    prompt: torch.Tensor
    params: BeamParams
    on_ids: Callable[[tuple[int, ...], str | None], None]
    on_error: Callable[[MilkglassError], None]
    vectors: torch.Tensor | None = None
    cancelled: bool = False
    ended: bool = False
    _rows: RunningRows | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._search = BeamSearch(self.params)

    @property
    def due(self) -> bool:
        """Whether there is something to do for it."""
        return self.vectors is not None or self.cancelled

    def fail(self, error: MilkglassError) -> None:
        self._leave()
        self.on_error(error)

    def go_on(self, runner: ModelRunner) -> None:
        """Read the prompt or the newest vectors, and choose the next ids. What fails here fails this sequence alone."""
        if self.cancelled:
            self._leave()
            return
        try:
            if self._rows is None:
                self._rows, logits = runner.read([self.prompt])
            else:
                assert self.vectors is not None
                vectors, self.vectors = self.vectors, None
                logits = self._rows.advance(list(vectors))
            self._choose(self._rows, logits)
        except Exception as error:  # noqa: BLE001  (whatever it was)
            self.fail(explain(error))

    def _choose(self, rows: RunningRows, logits: torch.Tensor) -> None:
        step = self._search.step(logits)
        if step is None:
            answer = self._search.finished[0]
            self._leave()
            self.on_ids(answer.ids, answer.reason)
        else:
            parents, ids = step
            rows.keep(parents)  # each beam goes on from the cache of the row that it continues
            self.on_ids(tuple(ids), None)

    def _leave(self) -> None:
        self.ended, self._rows, self.vectors = True, None, None
