"""TFA: the id that is sent most often is the commonest token (Zanella-Beguelin et al. 2020; ObfusLM, 5.2 and Table 5).

Both vocabularies are ranked by how often they occur, the scrambled ids in what was sent, the public ones in a text of
the attacker's, and the ranks are matched: the classical attack on a substitution, of one symbol at a time. It needs no
model. It fails on all but the few commonest tokens, since ranks lie closer together than two texts agree.

ObfusLM's paper reads the nearest frequency, for each id alone. Ranks are used here: the same idea under the constraint
that no token is used twice, which nearest frequency breaks. What is matched by nothing is said to be so:
- Ties (the hundreds of ids seen once) are in no order. They fall to the lower id on both sides, which is chance.
- Ids that were never sent have no rank and get no guess; nor does anybody guess a token that the public text lacks.

- A token that opens or closes every text, such as [CLS], is known by its place (cribs.py) and takes no rank: in texts
  of other lengths it is commoner or rarer, and would shift every rank after it. `places = False` is the plain attack.

What it does not know: neighbours and candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from milkglass.attacks.embedding import cribs
from milkglass.paper import Paper
from milkglass.sequences import Ids
from milkglass.threat import NO_BELIEF, Attack, Budget, Guess, Knowledge, Observation, Tokens, Transcript


@dataclass(frozen=True)
class TFA(Attack):
    """k: how many ranks are guessed, the id's own first, then those nearest to it, the commoner ones first. places:
    whether tokens that are known by their place are taken out first."""

    k: int = 10
    places: bool = True

    name: ClassVar[str] = "tfa"
    title: ClassVar[str] = "Token frequency attack"
    paper: ClassVar[Paper] = Paper(
        "Analyzing Information Leakage of Updates to Natural Language Models",
        "Zanella-Béguelin, Wutschitz, Tople, Rühle, Paverd, Ohrimenko, Köpf, Brockschmidt",
        2020,
        "CCS 2020; as an attack on ids: Lin et al., Findings of ACL 2025, section 5.2",
        (
            "Ranks are matched, not nearest frequencies: no token is guessed twice.",
            "Tokens that open or close every text are known by their place and take no rank.",
        ),
    )
    sees: ClassVar[frozenset[type[Observation]]] = frozenset({Tokens})
    assumes: ClassVar[frozenset[str]] = frozenset({"corpus"})

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        assert knowledge.corpus is not None
        here, there = transcript.tokens.counts(transcript.size), knowledge.corpus.counts(transcript.size)
        known = np.empty((0, 2), np.int64)
        if self.places:
            known = cribs.consistent(cribs.placed(transcript.tokens, knowledge.corpus))
            here[known[:, 0]], there[known[:, 1]] = 0, 0
        sent, public = by_rank(here), by_rank(there)
        table = np.full((transcript.size, self.k), NO_BELIEF, np.int64)
        steps = np.arange(1, self.k // 2 + 1)
        around = np.concatenate([[0], np.stack([-steps, steps], axis=1).reshape(-1)])[: self.k]
        ranks = np.arange(len(sent))[:, None] + around
        inside = (ranks >= 0) & (ranks < len(public))
        if len(public):
            guesses = np.where(inside, public[np.clip(ranks, 0, len(public) - 1)], NO_BELIEF)
            # what falls off the table must not take a better rank from what lies on it
            order = np.argsort(~inside[:, 1:], axis=1, kind="stable")
            guesses[:, 1:] = np.take_along_axis(guesses[:, 1:], order, axis=1)
            table[sent] = guesses
        table[known[:, 0], 0] = known[:, 1]
        return Guess(table=table)


def by_rank(counts: Ids) -> Ids:
    """The ids that occur, commonest first; ties by id."""
    order = np.argsort(-counts, kind="stable")
    return order[: int((counts > 0).sum())].astype(np.int64)
