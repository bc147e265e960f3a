"""Matches ids by frequency: TFA (Zanella-Beguelin et al. 2020; ObfusLM, section 5.2 and Table 5).

The scrambled ids in what was sent and the public ids in the attacker's public text are ranked by frequency, and the
ranks are matched. It is the classical attack on a substitution, one symbol at a time. It needs no model. It fails on
all but the few most frequent tokens, since neighbouring ranks differ less in frequency than the same token in two
texts.

Two forms, `match`:

    "nearest"   ObfusLM's paper (appendix E): for each id alone the public tokens of the nearest relative frequency,
                |count(a) / all sent - count(b) / all public|; several ids may get one token
    "rank"      not the paper's: ranks are matched one to one, so that no token is used twice

- Ties (the hundreds of ids seen once) go to the lower id on both sides, which is chance.
- Ids that were never sent get no guess, and tokens that the public text lacks are never guessed.
- With r aliases a token takes r ranks, or each of its ids stands for r times its count.
- A token that opens or closes every text, such as [CLS], is known by its place
  (attacks/token_ids/decipherment/cribs.py) and takes no rank. Otherwise its frequency, which depends on the lengths of
  texts, would shift every rank after it. `match = "nearest", places = False` is the paper's attack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from milkglass import papers
from milkglass.attacks.token_ids.decipherment import cribs
from milkglass.errors import UsageError
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript

Match = Literal["rank", "nearest"]


@dataclass(frozen=True)
class TFA(Attack):
    """Matches scrambled ids with public ids of about the same frequency.

    Attributes:
        k: the number of ranks of the guess. With `match = "rank"`: the id's own rank, then those nearest to it, of two
            equally near ones the more frequent first.
        places: whether tokens that are known by their place at a text's ends are taken out first.
        match: "rank" or "nearest", as the module says.

    Raises:
        UsageError: there is no such `match`.
    """

    k: int = 10
    places: bool = True
    match: Match = "rank"

    name = "tfa"
    title = "Token frequency attack"
    baseline = True
    paper = papers.UPDATE_LEAKAGE.at(
        "as an attack on ids: Lin et al., Findings of ACL 2025, section 5.2"
    ).with_deviations(
        'Ranks are matched, so that no token is guessed twice; match = "nearest" is the paper\'s.',
        "Tokens that open or close every text are known by their place and take no rank.",
    )
    sees = frozenset({Tokens})
    assumes = frozenset({"corpus"})

    def __post_init__(self) -> None:
        if self.match not in get_args(Match):
            raise UsageError(f"match is {self.match!r}", f"give one of {', '.join(get_args(Match))}")

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        corpus = require_known(knowledge.corpus)
        sent_counts = transcript.tokens.counts(transcript.vocab_size)
        public_counts = corpus.counts(knowledge.token_count(transcript.vocab_size))
        crib_pairs = np.empty((0, 2), np.int64)
        if self.places:
            crib_pairs = cribs.consistent_pairs(cribs.pairs_at_constant_positions(transcript.tokens, corpus))
            sent_counts[crib_pairs[:, 0]], public_counts[crib_pairs[:, 1]] = 0, 0
        table = np.full((transcript.vocab_size, self.k), NO_BELIEF, np.int64)
        # section 5.2 of Lin et al.: relative frequencies on both sides
        sent_ids = ids_by_frequency(sent_counts)
        public_ids = np.repeat(ids_by_frequency(public_counts), knowledge.alias_count)
        if len(public_ids):
            table[sent_ids] = (
                nearest_by_frequency(
                    sent_counts * knowledge.alias_count, public_counts, sent_ids, self.k, int(sent_counts.sum())
                )
                if self.match == "nearest"
                else self.guesses_around_rank(sent_ids, public_ids)
            )
        table[crib_pairs[:, 0], 0] = crib_pairs[:, 1]
        return Guess(by_id=table)

    def guesses_around_rank(self, sent_ids: Ids, public_ids: Ids) -> Ids:
        """Returns (sent ids, k) the public id of each sent id's rank, then those of the ranks beside it."""
        steps = np.arange(1, self.k // 2 + 1)
        offsets = np.concatenate([[0], np.stack([-steps, steps], axis=1).reshape(-1)])[: self.k]
        ranks = np.arange(len(sent_ids))[:, None] + offsets
        exists = (ranks >= 0) & (ranks < len(public_ids))
        guesses = np.where(exists, public_ids[np.clip(ranks, 0, len(public_ids) - 1)], NO_BELIEF)
        # ranks that do not exist come last, so that they take no place from others
        order = np.argsort(~exists[:, 1:], axis=1, kind="stable")
        guesses[:, 1:] = np.take_along_axis(guesses[:, 1:], order, axis=1)
        return guesses


def ids_by_frequency(counts: Ids) -> Ids:
    """Returns the ids that occur, most frequent first; ties by id."""
    order = np.argsort(-counts, kind="stable")
    return order[: int((counts > 0).sum())].astype(np.int64)


def nearest_by_frequency(sent_counts: Ids, public_counts: Ids, sent_ids: Ids, k: int, total: int) -> Ids:
    """Returns (sent ids, k) for each sent id the public ids of the nearest relative frequency; ties by id.

    Args:
        sent_counts: (n',) how often each scrambled id occurs, times the number of its token's ids.
        public_counts: (n,) how often each public id occurs.
        sent_ids: the scrambled ids that were sent.
        k: how many public ids are listed for each.
        total: how many ids were sent.
    """
    public_ids = np.flatnonzero(public_counts)
    counts, row_of_id = np.unique(sent_counts[sent_ids], return_inverse=True)
    nearest_ids = np.full((len(counts), k), NO_BELIEF, np.int64)
    shares = public_counts[public_ids] * total  # both sides times both totals: whole numbers, so that ties are exact
    for row, count in enumerate((counts * public_counts.sum()).tolist()):
        closest = np.argsort(np.abs(shares - count), kind="stable")[:k]
        nearest_ids[row, : len(closest)] = public_ids[closest]
    return nearest_ids[row_of_id]
