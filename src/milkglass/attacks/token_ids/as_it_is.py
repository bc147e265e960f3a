"""Reads what was sent as the public model's own ids: nothing is undone.

Whatever a defence leaves unchanged is read so. Under a scheme that permutes ids it reads what chance gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.threat.attack import Attack, Cost
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript


@dataclass(frozen=True)
class AsItIs(Attack):
    """Reads each id as the public model's own."""

    name = "as-it-is"
    title = "What was sent, read as it is"
    cost = Cost(0.1, per_million_tokens=1)
    runs_first = True
    paper = papers.unpublished_method("Each id is read as the public model's own")
    sees = frozenset({Tokens})
    assumes = frozenset({"public_model"})

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        ids = np.arange(transcript.vocab_size, dtype=np.int64)
        return Guess(by_id=np.where(ids < knowledge.token_count(transcript.vocab_size), ids, NO_BELIEF)[:, None])
