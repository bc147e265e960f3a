"""Reads the originals of a whole text, taking each shadow for the output of a noisy channel (shadow decoding).

The paper's first four rules look at one token at a time. Its fifth trains a language model that does not know what each
shadow can stand for. This attack combines both by Bayes' rule:

    p(t_1 ... t_n | s_1 ... s_n)  ~  prod_i p(s_i | t_i) p(t_i | t_(i-1)),    t_i in T_ori(s_i) only

T_ori(s) is the set of tokens that have the shadow s, and S_t the set of t's shadows. GHOST's search is public, so that
the attacker knows both. p(t | t') comes from pairs of neighbours in a public text, mixed with frequency, as in
`channel.py`. p(s | t) is how often t became s when the attacker ran the defence on its own text (a rehearsal), plus
`prior` choices spread evenly over S_t; without a rehearsal only these count. Each place takes the likeliest original,
summed over all readings of the rest of the text (forward-backward).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.attacks.token_ids.channel import BigramModel, Channel, rehearse_corpus, replacement_counts, write_guesses
from milkglass.sequences import Ids, Sequences, look_up
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript


@dataclass(frozen=True)
class ShadowDecoding(Attack):
    """Reads the originals of shadows by Bayes' rule over all readings of a text.

    Attributes:
        prior: the weight of the even choice, in tokens.
        candidates: how many originals are weighed at each place, the likeliest by frequency.
        mix: the weight of neighbours beside frequency.
        rehearsals: how often the defence is run on the public text.
        k: how many guesses a token has.
    """

    prior: float = 5.0
    candidates: int = 200
    mix: float = 0.8
    rehearsals: int = 1
    k: int = 10

    name = "shadow-decoding"
    title = "Shadow decoding (a channel and a language model)"
    paper = papers.unpublished_method(
        "Bayes' rule over the inverse of GHOST's search, with the forward-backward algorithm"
    )
    sees = frozenset({Tokens})
    assumes = frozenset({"candidates", "corpus"})
    uses = frozenset({"rehearse"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return None if len(require_known(knowledge.corpus).ids) else "the public text holds no token"

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        corpus = require_known(knowledge.corpus)
        rehearsed_texts = rehearse_corpus(knowledge, self.rehearsals, rng)
        channel = self.channel(require_known(knowledge.candidates), corpus, rehearsed_texts, transcript.vocab_size)
        neighbours = BigramModel(corpus, transcript.vocab_size, channel.shares, self.mix)
        guess = np.full((len(transcript.tokens.ids), self.k), NO_BELIEF, np.int64)
        return Guess(by_token=write_guesses(transcript.tokens, channel, neighbours, guess, budget))

    def channel(
        self, originals_of_shadows: Candidates, corpus: Sequences, rehearsed_texts: list[tuple[Sequences, Ids]],
        size: int,
    ) -> Channel:  # fmt: skip
        """Returns p(s | t) for every shadow, and the share of each t in the corpus.

        An id that is not a shadow stands for itself.

        Args:
            originals_of_shadows: T_ori of the module.
            corpus: the public text.
            rehearsed_texts: what the defence made of the corpus, see `channel.replacement_counts`.
            size: the number of ids.
        """
        shares = corpus.counts(size) / len(corpus.ids)
        keys, counts = replacement_counts(corpus, rehearsed_texts, size)
        token_counts = np.bincount(keys % size, counts, size)
        originals = np.arange(size, dtype=np.int64)[:, None].repeat(self.candidates, 1)
        originals[:, 1:] = NO_BELIEF
        likelihood = np.zeros(originals.shape)
        likelihood[:, 0] = 1.0
        for group, log_likelihood in zip(
            originals_of_shadows.groups, originals_of_shadows.log_likelihoods, strict=True
        ):
            for row, row_log_likelihood in zip(group.rows.tolist(), log_likelihood, strict=True):
                hits = look_up(keys, counts, row * size + group.members)
                weighted_counts = hits + self.prior * np.exp(row_log_likelihood)
                member_likelihood = weighted_counts / (token_counts[group.members] + self.prior)
                best = np.argsort(-member_likelihood * (shares[group.members] + 1e-9), kind="stable")[: self.candidates]
                originals[row], likelihood[row] = NO_BELIEF, 0.0
                originals[row, : len(best)] = group.members[best]
                likelihood[row, : len(best)] = member_likelihood[best]
        return Channel(originals, likelihood, shares)
