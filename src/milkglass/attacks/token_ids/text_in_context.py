"""Text in context: where an id names a cluster and no token, reads each place by its neighbours (our own attack).

With shared rows an id of a cluster is drawn anew at each occurrence. The ids of one cluster are one letter that stands
for several tokens. This is no substitution, and what is learnt about an id at one place does not hold at another. What
crosses is the sequence of clusters. A hidden Markov model reads it. Its states are the members of the cluster, and the
public text gives the transitions,

    P(b | a) = (count(a, b) + T(a) P(b)) / (count(a) + T(a)),     T(a) how many different tokens follow a

(Witten and Bell), with P(b) the token's share of the public text. Forward and backward sums give the posterior of every
member at every place, text by text; the guess ranks the members by it. If ids are exchanged by randomised response, the
tokens of all these ids are states, each weighed by P(id | token).

It uses one token to each side. language.py aggregates over ids and cannot be used here. symbol_decoder.py reads whole
texts, and can use a language model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from milkglass import papers
from milkglass.attacks import work
from milkglass.attacks.token_ids.decipherment.bigrams import Bigrams, Floats, PublicBigrams, normalise
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Knowledge, required
from milkglass.threat.observations import Tokens, Transcript


@dataclass(frozen=True)
class TextInContext(Attack):
    k: int = 10

    name = "text-in-context"
    title = "Clusters read in context"
    paper = papers.ZERO_FREQUENCY.but(
        "Theirs is the estimate of the transitions; the hidden Markov model over clusters is ours."
    )
    sees = frozenset({Tokens})
    assumes = frozenset({"candidates", "corpus"})

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if not knowledge.has_shared_ids:
            return "an id is the same token wherever it occurs: decipherment uses that"
        return None

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        """Reads texts that the budget does not reach as the most frequent member of each cluster."""
        candidates, responses = required(knowledge.candidates), knowledge.responses
        chain = Chain(
            candidates if responses is None else candidates.for_exchanged_ids(responses),
            required(knowledge.corpus),
            transcript.size,
            knowledge.token_count(transcript.size),
            are_exchanged=responses is not None,
        )
        texts = transcript.tokens
        guess = np.full((len(texts.ids), self.k), NO_BELIEF, np.int64)
        text_start = 0
        for number, text in enumerate(texts):
            uses_neighbours = budget.left() > 0
            budget.spend(chain.work(text) if uses_neighbours else len(text) * work.CALL)
            for place, belief in enumerate(chain.read(text, uses_neighbours)):
                members = chain.members(int(text[place]))
                order = np.argsort(-belief, kind="stable")[: self.k]
                guess[text_start + place, : len(order)] = members[order]
            text_start += len(text)
            budget.progress((number + 1) / len(texts))
        return Guess(running=guess)


class Chain:
    """A hidden Markov chain over the members of groups.

    Attributes:
        group: (n',) the number of each scrambled id's group, -1 for none.
        emitted: (m,) log P(id | member) up to a constant, by each id that is exchanged.
        follows: (n, n) counts of public bigrams.
        share: (n,) each token's share of the public text.
        followers, total: (n,) how many different tokens follow each token, and how many in all.
        pairs: the part of `follows` for each pair of groups, once it was needed.
    """

    def __init__(
        self, candidates: Candidates, corpus: Sequences, id_count: int, token_count: int, are_exchanged: bool = False
    ) -> None:
        """Takes the groups from `candidates` and the transitions from `corpus`.

        Args:
            id_count, token_count: how many scrambled and how many public ids there are.
            are_exchanged: whether ids are exchanged where they occur; the candidates' likelihood is then
                log P(id | member).
        """
        self.candidates, self.group = candidates, np.full(id_count, -1, np.int64)
        for number, group in enumerate(candidates.groups):
            self.group[group.rows] = number
        exchanged_groups = zip(candidates.groups, candidates.log_likelihoods, strict=True) if are_exchanged else ()
        self.emitted = {
            row: row_likelihood
            for group, likelihood in exchanged_groups
            for row, row_likelihood in zip(group.rows.tolist(), likelihood, strict=True)
        }
        self.share, pairs = PublicBigrams(corpus, token_count, ()).share, Bigrams(corpus, token_count)
        self.follows = sp.csr_matrix((pairs.count, (pairs.left, pairs.right)), shape=(token_count, token_count))
        self.followers = np.bincount(pairs.left, minlength=token_count).astype(np.float64)
        self.total = np.bincount(pairs.left, pairs.count, token_count).astype(np.float64)
        self.pairs: dict[tuple[int, int], sp.csr_matrix] = {}

    def members(self, scrambled_id: int) -> Ids:
        """Returns (m,) the public ids that a scrambled id may stand for."""
        number = int(self.group[scrambled_id])
        return np.empty(0, np.int64) if number < 0 else self.candidates.groups[number].members

    def emission(self, scrambled_id: int) -> Floats | float:
        """Returns (m,) P(id | member) up to a factor, or 1 for an id that is not exchanged."""
        scores = self.emitted.get(scrambled_id)
        return 1.0 if scores is None else np.exp(scores - scores.max())

    def counts(self, before: int, after: int) -> sp.csr_matrix:
        """Returns (a, b) how often the members of one id's group precede those of another's, as a sparse matrix."""
        key = (int(self.group[before]), int(self.group[after]))
        if key not in self.pairs:
            self.pairs[key] = self.follows[self.members(before)][:, self.members(after)]
        return self.pairs[key]

    def forward(self, before: int, after: int, belief: Floats) -> Floats:
        """Returns (b,) the sum over a of belief(a) P(b | a)."""
        a, b = self.members(before), self.members(after)
        weight = belief / (self.total[a] + np.maximum(self.followers[a], 1.0))
        unseen = float(weight @ np.maximum(self.followers[a], 1.0))
        sums: Floats = weight @ self.counts(before, after) + unseen * self.share[b]
        return sums

    def backward(self, before: int, after: int, belief: Floats) -> Floats:
        """Returns (a,) the sum over b of P(b | a) belief(b)."""
        a, b = self.members(before), self.members(after)
        followers = np.maximum(self.followers[a], 1.0)
        sums: Floats = self.counts(before, after) @ belief + followers * float(self.share[b] @ belief)
        return sums / (self.total[a] + followers)

    def work(self, text: Ids) -> float:
        """Returns about the work of reading a text with its neighbours."""
        member_count = sum(len(self.members(one)) for one in text.tolist())
        return 3 * len(text) * work.CALL + work.elements(20.0 * member_count)

    def read(self, text: Ids, uses_neighbours: bool) -> list[NDArray[np.float64]]:
        """Returns for each place (m,) the belief in each member, by its neighbours too or by frequency alone."""
        own_beliefs = [self.share[self.members(one)] * self.emission(one) for one in text.tolist()]
        if not uses_neighbours or len(text) < 2:
            return own_beliefs
        forward = self._forward_beliefs(text, own_beliefs)
        backward: list[Floats] = [np.ones(len(own_beliefs[-1]))]
        for before, after in zip(text[-2::-1].tolist(), text[:0:-1].tolist(), strict=True):
            emitted_belief = backward[-1] * self.emission(after)
            if self.group[before] >= 0 and self.group[after] >= 0:
                backward.append(normalise(self.backward(before, after, emitted_belief)))
            else:
                backward.append(np.ones(len(self.members(before))))
        return [one * other for one, other in zip(forward, backward[::-1], strict=True)]

    def _forward_beliefs(self, text: Ids, own_beliefs: list[Floats]) -> list[Floats]:
        """Returns, for each place, (m,) the belief in each member by the text up to it."""
        beliefs = [normalise(own_beliefs[0])]
        for place, (before, after) in enumerate(zip(text.tolist(), text[1:].tolist(), strict=False), 1):
            belief = own_beliefs[place]
            if self.group[before] >= 0 and self.group[after] >= 0:
                belief = self.forward(before, after, beliefs[-1]) * self.emission(after)
            beliefs.append(normalise(belief))
        return beliefs
