"""ERA+: adds up what ERA reads over all generated text, and chooses among each id's known candidates.

ERA reads each generated id separately and among all public ids. But one scrambled id always stands for the same token,
and the clusters limit which. So ERA+ adds up over all places where the scrambled id a was generated how much likelier
than usual the public head finds each candidate b there, and decides once:

    r(place, b)    = h . H[b] - log P(b) + constant,     sum_b P(b) exp r = 1 over the candidates of a
    evidence(a, b) = K / (K + count) * sum over places of a:  log(doubt + (1 - doubt) exp r(place, b)) + constant
    score[a, b]    = prior[a, b] + log(rho + (1 - rho) exp evidence(a, b))

`prior` is what earlier attacks found: the order inside clusters and, if the attacker has public text and saw what was
sent, the map that corpus decipherment finds. P is the public text's share of b, which decipherment has counted already;
without public text all shares are equal.

**Weight of the states.** A hardly tuned model still mixes languages. Its states then point to the same wrong members of
a cluster at every place of an id, and may spoil a good prior. So rho is the share of ids about which the states say
nothing, by maximum likelihood under the prior (attacks/token_ids/decipherment/evidence.py). If the states and the
prior agree no better than chance, rho goes to 1 and the prior stands. A prior that says nothing leaves rho at 1/2. rho
counts ids, not places: if the states are right about most ids and clearly wrong about the two most frequent, rho is
small and those two are read wrongly (docs/log.md, Alpaca).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from milkglass import device, papers
from milkglass.attacks.assignment import Solver
from milkglass.attacks.forward import public_head, why_no_head
from milkglass.attacks.hidden_states.era import generation_states, why_not_paired
from milkglass.attacks.token_ids.decipherment.bigrams import Floats, PublicPairCounts
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.decipherment.evidence import EvidenceTable
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Knowledge, require_known
from milkglass.threat.observations import Outputs, Tokens, Transcript, Weights

# The probability with which a place says nothing (`doubt` above); it limits what one place can say against a candidate
PLACE_DOUBT = 0.01
PLACES_AT_A_TIME = 256  # places whose candidates are weighed at once
NEVER_CERTAIN = 2.0  # no probability is higher: no id is certain enough to be left alone


@dataclass(frozen=True)
class ERAPlus(Solver):
    """Reads generated ids by all states from which they were generated, inside the known candidates.

    Attributes:
        damping: K, the number of places above which further ones count little.
    """

    damping: float = 20.0

    name = "era+"
    title = "Embedding replacement, joined over the corpus"
    paper = papers.OBFUSLM.with_deviations("ERA+ is ours.")
    sees = frozenset({Weights, Outputs})
    assumes = frozenset({"public_model", "candidates"})
    uses = frozenset({"corpus", "pairs"})
    of_outputs = True

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return why_not_paired(transcript) or why_no_head(require_known(knowledge.public_model))

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        prior, size = require_known(knowledge.candidates), transcript.vocab_size
        if knowledge.corpus is not None and Tokens in transcript.kinds:
            prior = Decipherment().learn(transcript, knowledge, budget, rng)
        generating_states, has_state = generation_states(transcript)
        generated = transcript.outputs.keep(has_state)  # the places of which the model says something
        token_count = knowledge.token_count(size)
        log_share = np.zeros(token_count)
        if knowledge.corpus is not None:
            log_share = np.log(PublicPairCounts(knowledge.corpus, token_count).share)
        table = EvidenceTable(prior, generated, NEVER_CERTAIN, log_share, len(generated.ids) + 1, size)
        listed_places = np.flatnonzero(table.line_of_id[generated.ids] >= 0)
        if not len(listed_places):
            return prior
        ids = generated.ids[listed_places]
        members = table.member[table.line_of_id[ids]]
        states = generating_states[torch.from_numpy(has_state)][torch.from_numpy(listed_places)]
        scores = option_logits(states, public_head(require_known(knowledge.public_model)), members)
        scores -= log_share[members]
        table.update(ids, scores, PLACE_DOUBT)
        posterior, _ = table.believable_evidence(table.evidence(self.damping), table.belief(prior.log_likelihoods))
        evidence = [np.zeros(values.shape) for values in prior.log_likelihoods]
        table.store(posterior, evidence, np.zeros(size, np.int64), prior.groups)
        return Candidates(prior.groups, tuple(a + b for a, b in zip(prior.log_likelihoods, evidence, strict=True)))


def option_logits(states: torch.Tensor, head: torch.Tensor, options: Ids) -> Floats:
    """Computes the logits of the options at each place.

    Args:
        states: (m, d) the state from which each place was generated.
        head: (n, d) the public output embeddings.
        options: (m, w) the public ids that each place may be.

    Returns:
        (m, w) the logits.
    """
    logits = [
        device.array(torch.einsum("md,mwd->mw", block, head[ids].float()))
        for block, ids in zip(
            states.split(PLACES_AT_A_TIME), torch.from_numpy(options).split(PLACES_AT_A_TIME), strict=True
        )
    ]
    return np.concatenate(logits).astype(np.float64)
