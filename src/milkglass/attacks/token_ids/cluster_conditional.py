"""Reads each scrambled id as the most frequent public token of its cluster: the cluster-conditional guess.

Schemes that mix each embedding with k - 1 others promise that an attacker who finds the cluster has one chance in k.
That would hold if all members of a cluster were equally frequent. But a cluster holds neighbours in meaning, a common
word among rare ones (a plural, a misspelling, an archaic form). An attacker who always guesses the most frequent member
is right as often as common words are sent, far more often than one time in k. This guess uses no ids, bigrams or
weights. It is what the cluster alone gives away, the floor that every report prints next to 1/k.

Members are ordered by their counts in the attacker's public text; those that it lacks come last, by id. All rows of a
cluster get the same list, since this guess does not distinguish them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Knowledge, require_known
from milkglass.threat.observations import Transcript, Weights


@dataclass(frozen=True)
class ClusterConditional(Attack):
    """Reads each scrambled id as the most frequent public token of its cluster.

    Attributes:
        k: the number of ranks of the guess.
    """

    k: int = 10

    name = "cluster-conditional"
    title = "The commonest token of each cluster"
    baseline = True
    recovers_ids = True
    paper = papers.unpublished_method(
        "What the promise of one chance in k takes for granted",
        "measured against Lin et al., Findings of ACL 2025, section 4",
    )
    sees = frozenset({Weights})
    assumes = frozenset({"candidates", "corpus"})

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        counts = require_known(knowledge.corpus).counts(knowledge.token_count(transcript.vocab_size))
        table = np.full((transcript.vocab_size, self.k), NO_BELIEF, np.int64)
        for group in require_known(knowledge.candidates).groups:
            order = np.lexsort((group.members, -counts[group.members]))[: self.k]
            table[group.rows, : len(order)] = group.members[order]
        if knowledge.responses is not None:
            self._write_exchanged(
                table, counts, require_known(knowledge.candidates).for_exchanged_ids(knowledge.responses)
            )
        return Guess(by_id=table)

    def _write_exchanged(self, table: Ids, counts: Ids, candidates: Candidates) -> None:
        """Writes into `table` the guesses for ids that the defence exchanges, ordered by count times P(id | token).

        Args:
            table: (n, k) the guesses by id, which are changed.
            counts: (n,) how often each token occurs in the public text.
            candidates: for each exchanged id the tokens that it may stand for, with log P(id | token).
        """
        for group, log_likelihood in zip(candidates.groups, candidates.log_likelihoods, strict=True):
            for row, row_log_likelihood in zip(group.rows.tolist(), log_likelihood, strict=True):
                weights = counts[group.members] * np.exp(row_log_likelihood - row_log_likelihood.max())
                order = np.lexsort((group.members, -weights))[: self.k]
                table[row, : len(order)] = group.members[order]
