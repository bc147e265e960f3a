"""Reads each position from the text around it, for schemes in which an id names a cluster, not a token.

With shared rows an id of a cluster is drawn again at each occurrence. The ids of one cluster are one letter that stands
for several tokens. This is not a substitution, and what is learnt about an id at one position does not hold at another.
The server sees the sequence of clusters. A hidden Markov model reads it. Its states are the members of the cluster, and
the public text gives the transitions,

    P(b | a) = (count(a, b) + T(a) P(b)) / (count(a) + T(a)),     T(a) the number of distinct tokens after a

(Witten and Bell 1991), with P(b) the token's share of the public text. Forward and backward sums give the posterior of
every member at every position; the guess ranks the members by it. If ids are exchanged by randomised response, the
tokens of all these ids are states, each weighted by P(id | token). The attack is not from a paper.

The transitions are bigrams. language.py aggregates over ids and cannot be used here. symbol_decoder.py reads whole
texts, and can use a language model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from milkglass import papers
from milkglass.attacks import work
from milkglass.attacks.token_ids.decipherment.bigrams import Floats, PairCounts, PublicPairCounts, normalise
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript


@dataclass(frozen=True)
class TextInContext(Attack):
    """Reads sequences of clusters with a hidden Markov model.

    Attributes:
        k: guesses at each position.
    """

    k: int = 10

    name = "text-in-context"
    title = "Clusters read in context"
    paper = papers.ZERO_FREQUENCY.with_deviations(
        "Theirs is the estimate of the transitions; the hidden Markov model over clusters is ours."
    )
    sees = frozenset({Tokens})
    assumes = frozenset({"candidates", "corpus"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if not knowledge.has_shared_ids:
            return "an id is the same token wherever it occurs: decipherment uses that"
        return None

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        """Ranks each cluster's members at each position; by frequency alone once the budget is spent."""
        candidates, responses = require_known(knowledge.candidates), knowledge.responses
        model = ClusterHmm(
            candidates if responses is None else candidates.for_exchanged_ids(responses),
            require_known(knowledge.corpus),
            transcript.vocab_size,
            knowledge.token_count(transcript.vocab_size),
            has_exchanged_ids=responses is not None,
        )
        texts = transcript.tokens
        guess = np.full((len(texts.ids), self.k), NO_BELIEF, np.int64)
        text_start = 0
        for index, text in enumerate(texts):
            uses_neighbours = budget.left() > 0
            budget.spend(model.cost(text) if uses_neighbours else len(text) * work.CALL_SECONDS)
            for position, belief in enumerate(model.read(text, uses_neighbours)):
                members = model.members(int(text[position]))
                order = np.argsort(-belief, kind="stable")[: self.k]
                guess[text_start + position, : len(order)] = members[order]
            text_start += len(text)
            budget.progress((index + 1) / len(texts))
        return Guess(by_token=guess)


class ClusterHmm:
    """Reads texts by a hidden Markov model whose states are the members of groups.

    n' scrambled ids stand for n tokens; m is the number of members of one group.

    Attributes:
        group_of_id: (n',) the index of each scrambled id's group, -1 for none.
        log_emission: (m,) log P(id | member) up to a constant, for each exchanged id.
        bigram_counts: (n, n) counts of public bigrams.
        share: (n,) each token's share of the public text.
        successor_counts: (n,) how many distinct tokens follow each token.
        bigram_totals: (n,) how many bigrams begin with each token.
        block_cache: the part of `bigram_counts` for each pair of groups, cached when first used.
    """

    def __init__(
        self,
        candidates: Candidates,
        corpus: Sequences,
        id_count: int,
        token_count: int,
        has_exchanged_ids: bool = False,
    ) -> None:
        """Takes the groups from `candidates` and the transitions from `corpus`.

        Args:
            id_count, token_count: how many scrambled and how many public ids there are.
            has_exchanged_ids: whether ids are exchanged where they occur; the candidates' likelihood is then
                log P(id | member).
        """
        self.candidates, self.group_of_id = candidates, np.full(id_count, -1, np.int64)
        for index, group in enumerate(candidates.groups):
            self.group_of_id[group.rows] = index
        exchanged_groups = zip(candidates.groups, candidates.log_likelihoods, strict=True) if has_exchanged_ids else ()
        self.log_emission = {
            scrambled_id: id_likelihood
            for group, likelihood in exchanged_groups
            for scrambled_id, id_likelihood in zip(group.rows.tolist(), likelihood, strict=True)
        }
        self.share, bigrams = PublicPairCounts(corpus, token_count, ()).share, PairCounts(corpus, token_count)
        shape = (token_count, token_count)
        self.bigram_counts = sp.csr_matrix((bigrams.counts, (bigrams.left, bigrams.right)), shape=shape)
        self.successor_counts = np.bincount(bigrams.left, minlength=token_count).astype(np.float64)
        self.bigram_totals = np.bincount(bigrams.left, bigrams.counts, token_count).astype(np.float64)
        self.block_cache: dict[tuple[int, int], sp.csr_matrix] = {}

    def members(self, scrambled_id: int) -> Ids:
        """Returns (m,) the public ids that a scrambled id may stand for."""
        index = int(self.group_of_id[scrambled_id])
        return np.empty(0, np.int64) if index < 0 else self.candidates.groups[index].members

    def emission(self, scrambled_id: int) -> Floats | float:
        """Returns (m,) P(id | member) up to a factor, or 1 for an id that is not exchanged."""
        log_emission = self.log_emission.get(scrambled_id)
        return 1.0 if log_emission is None else np.exp(log_emission - log_emission.max())

    def counts(self, left_id: int, right_id: int) -> sp.csr_matrix:
        """Returns (m, m') how often the m members of one id's group precede the m' of another's, as a sparse matrix."""
        key = (int(self.group_of_id[left_id]), int(self.group_of_id[right_id]))
        if key not in self.block_cache:
            self.block_cache[key] = self.bigram_counts[self.members(left_id)][:, self.members(right_id)]
        return self.block_cache[key]

    def forward(self, left_id: int, right_id: int, belief: Floats) -> Floats:
        """Returns for each member b of the right id the sum, over members a of the left, of belief(a) P(b | a)."""
        left, right = self.members(left_id), self.members(right_id)
        successors = np.maximum(self.successor_counts[left], 1.0)
        weight = belief / (self.bigram_totals[left] + successors)
        backoff_mass = float(weight @ successors)
        sums: Floats = weight @ self.counts(left_id, right_id) + backoff_mass * self.share[right]
        return sums

    def backward(self, left_id: int, right_id: int, belief: Floats) -> Floats:
        """Returns for each member a of the left id the sum, over members b of the right, of P(b | a) belief(b)."""
        left, right = self.members(left_id), self.members(right_id)
        successors = np.maximum(self.successor_counts[left], 1.0)
        sums: Floats = self.counts(left_id, right_id) @ belief + successors * float(self.share[right] @ belief)
        return sums / (self.bigram_totals[left] + successors)

    def cost(self, text: Ids) -> float:
        """Returns the approximate work of reading a text, in seconds of attacks/work.py."""
        member_count = sum(len(self.members(scrambled_id)) for scrambled_id in text.tolist())
        return 3 * len(text) * work.CALL_SECONDS + work.elements(20.0 * member_count)

    def read(self, text: Ids, uses_neighbours: bool) -> list[NDArray[np.float64]]:
        """Returns for each position (m,) the belief in each member, from the whole text, or from frequency alone."""
        local_beliefs = [
            self.share[self.members(scrambled_id)] * self.emission(scrambled_id) for scrambled_id in text.tolist()
        ]
        if not uses_neighbours or len(text) < 2:
            return local_beliefs
        forward = self._forward_beliefs(text, local_beliefs)
        backward: list[Floats] = [np.ones(len(local_beliefs[-1]))]
        for left_id, right_id in zip(text[-2::-1].tolist(), text[:0:-1].tolist(), strict=True):
            emitted_belief = backward[-1] * self.emission(right_id)
            if self.group_of_id[left_id] >= 0 and self.group_of_id[right_id] >= 0:
                backward.append(normalise(self.backward(left_id, right_id, emitted_belief)))
            else:
                backward.append(np.ones(len(self.members(left_id))))
        return [left * right for left, right in zip(forward, backward[::-1], strict=True)]

    def _forward_beliefs(self, text: Ids, local_beliefs: list[Floats]) -> list[Floats]:
        """Returns, for each position, (m,) the belief in each member by the text up to it."""
        beliefs = [normalise(local_beliefs[0])]
        for position, (left_id, right_id) in enumerate(zip(text.tolist(), text[1:].tolist(), strict=False), 1):
            belief = local_beliefs[position]
            if self.group_of_id[left_id] >= 0 and self.group_of_id[right_id] >= 0:
                belief = self.forward(left_id, right_id, beliefs[-1]) * self.emission(right_id)
            beliefs.append(normalise(belief))
        return beliefs
