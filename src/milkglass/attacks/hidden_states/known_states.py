"""Reads each hidden vector as the token whose own state, of text that the attacker knows, is nearest.

The attacker has run the client on public text (`Knowledge.observe`), or has recorded what a vendor's client sent for
text of its own. So each recorded vector has a known token:

    token(h) = token of argmin over recorded r of |(h - r) / s|      s: the spread of each dimension over the recorded

Neither the public model nor the vectors' width matters. So a secret table of vectors, one for each token, is read as
far as its tokens occur in the known text, with noise or without. A state that depends on its sentence is read as that
of a like sentence. This is the nearest-neighbour attack of Qu et al. 2021 with recorded vectors in place of public
ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import device, papers
from milkglass.attacks.embeddings.knn import nearest
from milkglass.attacks.hidden_states.own_states import observe_corpus, why_no_token_states
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Activations, Transcript

OBSERVING_SHARE = 0.5  # of the budget for the attacker's own states
MIN_SPREAD_SHARE = 1e-3  # of the largest spread: dimensions that vary less are not enlarged further


@dataclass(frozen=True)
class KnownStates(Attack):
    """Reads each hidden vector as the tokens of the attacker's nearest own vectors.

    Attributes:
        neighbours: how many of the nearest vectors are looked at; their different tokens are the ranks of the guess.
    """

    neighbours: int = 10

    name = "known-states"
    title = "Nearest known state"
    paper = papers.PRIVACY_BERT.with_deviations(
        "Vectors are compared with those that the client made of known text, in place of public embeddings.",
        "Each dimension is divided by its spread over the attacker's own vectors.",
    )
    sees = frozenset({Activations})
    assumes = frozenset({"corpus", "observe"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if not len(require_known(knowledge.corpus).ids):
            return "the public text holds no token"
        return why_no_token_states(transcript)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        own_states, texts = observe_corpus(knowledge, budget.part(OBSERVING_SHARE), rng)
        centre, spread = own_states.mean(0), own_states.std(0, correction=0)
        spread = spread.clamp_min(max(MIN_SPREAD_SHARE * float(spread.max()), 1e-12))
        known = (own_states - centre) / spread  # the centre changes no distance, and makes its rounding small
        guesses = []
        for activations in transcript.all(Activations):
            states = (device.move(activations.hidden.float()) - centre) / spread
            rows = nearest(states, known, self.neighbours, "euclidean", budget).numpy()
            guesses.append(_distinct_tokens(texts.ids[rows], len(states), self.neighbours))
        return Guess(by_token=np.concatenate(guesses))


def _distinct_tokens(tokens: Ids, count: int, width: int) -> Ids:
    """Returns (count, width) the different tokens of each row, nearest first; NO_BELIEF behind them.

    Args:
        tokens: (rows, k) the tokens of the nearest vectors. There are fewer rows than `count` where the budget ended.
        count: how many rows are needed.
        width: how many columns are needed.
    """
    distinct = np.full((count, width), NO_BELIEF, np.int64)
    for row, row_tokens in enumerate(tokens):
        found = list(dict.fromkeys(row_tokens.tolist()))
        distinct[row, : len(found)] = found
    return distinct
