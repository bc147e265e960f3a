"""Beam search over one prompt: the likeliest answers are grown side by side.

    score(y) = log p(y | prompt) / |y|^alpha    alpha: `length_penalty` (Wu et al. 2016, equation 14, without constants)

Every step looks at the best continuations of all beams together. Of the best `beams`, those that end leave as
hypotheses; the best `beams` that do not end go on. The order of decisions is that of transformers'
`generate(num_beams=..., do_sample=False)`, so that answers are the same. Out of scope: `early_stopping="never"`,
groups of beams, draws. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from milkglass.server.inference.engine import not_finite


@dataclass(frozen=True)
class BeamParams:
    """What is asked of a search.

    Attributes:
        beams: sequences that grow side by side, 2 or more.
        max_tokens: of an answer.
        stop: ids that end an answer.
        length_penalty: alpha; above 0 longer answers gain.
        early_stopping: end with the first `beams` hypotheses, in place of when no beam can overtake the worst of them.
    """

    beams: int
    max_tokens: int
    stop: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool = False

    @property
    def pool(self) -> int:
        """Continuations that a step looks at: `beams` go on even where every beam ends with every stop id. A vocabulary
        must have so many."""
        return self.beams * (1 + max(1, len(self.stop)))


@dataclass(frozen=True)
class Hypothesis:
    """An answer that is whole.

    Attributes:
        score: as above.
        ids: of the answer.
        reason: "stop" or "length".
    """

    score: float
    ids: tuple[int, ...] = field(repr=False)
    reason: str


class BeamSearch:
    """The state of one search.

    Attributes:
        finished: the best hypotheses so far, `beams` at most, best first.
    """

    def __init__(self, params: BeamParams) -> None:
        self._params = params
        self._running: list[tuple[int, ...]] = [()]
        self._scores = torch.zeros(1)
        self.finished: list[Hypothesis] = []

    def step(self, logits: torch.Tensor) -> tuple[list[int], list[int]] | None:
        """The row that each beam continues, and its next id; None: the search has ended, and `finished` has the answer.

        logits: (rows, n), of one row for the prompt, then of one for each beam. Raises ModelFailed where they are not
        finite."""
        if torch.isnan(logits).any() or not torch.isfinite(logits).any(-1).all():
            raise not_finite()
        totals = logits.float().log_softmax(-1).cpu() + self._scores[:, None]
        best, places = totals.flatten().topk(self._params.pool)
        vocabulary = totals.shape[1]
        pool = [
            (score, place // vocabulary, place % vocabulary) for score, place in zip(best, places.tolist(), strict=True)
        ]
        length = len(self._running[0]) + 1
        over = length >= self._params.max_tokens
        whole = [one for one in pool[: self._params.beams] if over or one[2] in self._params.stop]
        self._finish([(float(score), (*self._running[row], token)) for score, row, token in whole], length)
        go_on = [one for one in pool if one[2] not in self._params.stop][: self._params.beams]
        if over or self._decided(float(go_on[0][0]), length):
            return None
        self._running = [(*self._running[row], token) for _, row, token in go_on]
        self._scores = torch.stack([score for score, _, _ in go_on])
        return [row for _, row, _ in go_on], [token for _, _, token in go_on]

    def _finish(self, whole: list[tuple[float, tuple[int, ...]]], length: int) -> None:
        stop, scale = self._params.stop, length**self._params.length_penalty
        fresh = [Hypothesis(total / scale, ids, "stop" if ids[-1] in stop else "length") for total, ids in whole]
        ranked = sorted([*self.finished, *fresh], key=lambda one: -one.score)
        self.finished = ranked[: self._params.beams]

    def _decided(self, best: float, length: int) -> bool:
        """best: log p of the best beam. Without early stopping its score at its present length stands for all that it
        may reach."""
        if len(self.finished) < self._params.beams:
            return False
        return self._params.early_stopping or best / length**self._params.length_penalty <= self.finished[-1].score
