"""ERA+: embedding replacement, joined over all that was generated, inside the candidates that are known.

ERA reads each generated id by itself and among all public ids. But one scrambled id is always the same token, and the
clusters say which few it can be. So add up, over all places where the scrambled id a was generated, how likely the
public head finds each candidate b there, and decide once:

    score[a, b] = prior[a, b] + damping(a) * sum over places of a:  log softmax_j(h . H[j])[b]
    damping(a)  = K / (K + count(a)),       since errors at different places are not independent

Inside a cluster the best assignment as a whole is taken. What earlier attacks found out comes in as `prior` and is
corrected where the model's own states object: the order inside clusters, and where the attacker has public text and saw
what was sent, the map that corpus decipherment arrives at.

What it does not know: ids that were never generated; they keep their prior.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from milkglass.attacks.assignment import Solver
from milkglass.attacks.embedding.decipherment import Decipherment
from milkglass.attacks.embedding.era import PAPER, mismatch, public_head, states
from milkglass.paper import Paper
from milkglass.threat import Budget, Candidates, Knowledge, Observation, Outputs, Tokens, Transcript, Weights


@dataclass(frozen=True)
class ERAPlus(Solver):
    """damping: K, from how many places on more of them count little."""

    damping: float = 20.0

    name: ClassVar[str] = "era+"
    title: ClassVar[str] = "Embedding replacement, joined over the corpus"
    paper: ClassVar[Paper] = Paper(PAPER.title, PAPER.authors, PAPER.year, PAPER.venue, ("ERA+ is ours.",))
    sees: ClassVar[frozenset[type[Observation]]] = frozenset({Weights, Outputs})
    assumes: ClassVar[frozenset[str]] = frozenset({"public_model", "candidates"})
    helped_by: ClassVar[frozenset[str]] = frozenset({"corpus", "pairs"})
    of_outputs: ClassVar[bool] = True

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return mismatch(transcript)

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        assert knowledge.public_model is not None
        found = self._prior(transcript, knowledge, budget, rng)
        head = public_head(knowledge.public_model).T.contiguous()
        made = transcript.outputs.ids
        group_of = np.full(transcript.size, -1)
        row_of = np.zeros(transcript.size, np.int64)
        for number, group in enumerate(found.groups):
            group_of[group.rows], row_of[group.rows] = number, np.arange(len(group.rows))
        scores = [np.array(one, np.float64) for one in found.likelihood]
        counts = np.bincount(made, minlength=transcript.size)
        weight = self.damping / (self.damping + counts)
        at = 0
        for block in states(transcript).split(256):
            logs = torch.log_softmax(block @ head, 1).numpy()
            for place, scrambled in enumerate(made[at : at + len(block)].tolist()):
                if group_of[scrambled] >= 0:
                    members = found.groups[group_of[scrambled]].members
                    scores[group_of[scrambled]][row_of[scrambled]] += weight[scrambled] * logs[place, members]
            at += len(block)
        return Candidates(found.groups, tuple(scores))

    def _prior(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        assert knowledge.candidates is not None
        if knowledge.corpus is None or Tokens not in transcript.kinds:
            return knowledge.candidates
        return Decipherment().learn(transcript, knowledge, budget, rng)
