"""Weighs the candidates of ids by a language model, which can settle what decipherment leaves open.

Decipherment uses two neighbours and the attacker's public text. A causal language model uses everything before a place,
and language in general, so it helps most if the public text is short or of another kind. It cannot read scrambled ids,
but it can read what decipherment made of them, errors included:

    1  decipherment: a posterior over the candidates of each id, and from it a reading of all texts
    2  the model reads that; at each place of an id a that is not yet certain it weighs the members b of a's group,
           r(place, b) = log P(b | what precedes) - log P(b)        (attacks/token_ids/decipherment/reader.py), scaled
           so that sum_b P(b) exp r = 1
    3  all places of one id are one token's (attacks/token_ids/decipherment/evidence.py),
           evidence(a, b) = K / (K + count) * sum over places of  log(rho + (1 - rho) exp r(place, b))
    4  the evidence joins the prior, decipherment settles again with it, and the better reading can be read again

rho bounds what one place can say against a reading, since much of what precedes is misread. K is small, since the
errors at different places of a frequent id come from one model and one reading. Only some places of a frequent id are
read, beginning with the texts that may correct most for their length. When the time is over, what was read counts.

**Which model.** The public model itself if it is causal. For an encoder, another public model reads the text that the
public ids spell. That is no stronger assumption: anyone can download `reader`. Training the public encoder to fill gaps
instead was tried and hardly distinguished the members of a group better than their frequencies do (docs/log.md).

**Parameters** were chosen on one rehearsal, 250 pieces of news read with WikiText-2, among twelve settings of rho and K
that differed little. The default K of 5 was not among them; it lies between two that were. `rounds`, `contexts` and
`certain` were not tuned. A second round costs as much again, and its gain on real text is not measured.

A reader may have seen the private text in its own training if that text is public. Results on well-known data sets can
be too high for that reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from milkglass import papers
from milkglass.attacks.assignment import Solver, guess_by_rank
from milkglass.attacks.token_ids.decipherment.bigrams import Floats, PublicPairCounts
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.decipherment.evidence import EvidenceTable, restrict
from milkglass.attacks.token_ids.decipherment.reader import PLACES_AVERAGED, CausalReader, ReadBatch, why_no_reader
from milkglass.threat.attack import Cost
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript

TEXTS_AT_A_TIME = 128  # texts that are read before the ids that need more places are chosen again


@dataclass(frozen=True)
class LanguageModel(Solver):
    """Settles what decipherment leaves open, by what a causal model says about the candidates.

    Attributes:
        reader: a causal model, embedded or in a folder.
        rounds: how often the reading is read again.
        contexts: how many places of an id are read in a round, at most.
        patience: K of the module.
        doubt: rho of the module.
        certain: ids whose likeliest candidate has a higher probability are left alone.
        first: the decipherment that comes first.
    """

    reader: str = "demo:smollm2"
    rounds: int = 1
    contexts: int = 32
    patience: float = 5.0
    doubt: float = 0.1
    certain: float = 0.99
    first: Decipherment = field(default_factory=Decipherment)

    name = "language-model"
    title = "Language model over the candidates"
    cost = Cost(12, per_million_sent=2700, per_million_tokens=29)
    recovers_ids = True
    paper = papers.NEURAL_DECIPHERMENT.with_deviations(
        "The attack is ours; decipherment by a neural language model is the paper's.",
        "They score partial keys in a beam search; here evidence for single ids joins a mean field.",
    )
    sees = frozenset({Tokens})
    assumes = frozenset({"public_model", "corpus", "candidates"})
    min_seconds = 150.0
    uses = frozenset({"pairs"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        reason = self.first.refusal(transcript, knowledge)
        return reason or why_no_reader(require_known(knowledge.public_model), self.reader)

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        """Returns decipherment's candidates, settled again with what the model says about them."""
        started = budget.clock()
        first_candidates = settled = self.first.learn(transcript, knowledge, budget.part(1), rng)
        settling_seconds = budget.clock() - started
        if budget.left() <= settling_seconds or not len(transcript.tokens.ids):
            return settled
        reader = CausalReader.of(
            require_known(knowledge.public_model), self.reader, require_known(knowledge.corpus), budget
        )
        log_share = np.log(
            PublicPairCounts(require_known(knowledge.corpus), knowledge.token_count(transcript.vocab_size)).share
        )
        prior = restrict(require_known(knowledge.candidates), first_candidates.groups, transcript.vocab_size)
        stored = [np.zeros_like(array) for array in prior]
        places_seen = np.zeros(transcript.vocab_size, np.int64)
        for index in range(self.rounds):
            seconds = (budget.left() - settling_seconds) / (self.rounds - index)
            round_budget = Budget(seconds, stopped=budget.stopped, clock=budget.clock)
            table = EvidenceTable(
                settled, transcript.tokens, self.certain, log_share, self.contexts, transcript.vocab_size
            )
            self._update(table, reader, transcript, settled, round_budget, rng)
            table.store(table.evidence(self.patience), stored, places_seen, first_candidates.groups)
            budget.progress((index + 1) / self.rounds)
            if budget.left() <= settling_seconds:  # no time to settle again
                return _with_evidence(first_candidates.groups, first_candidates.log_likelihoods, stored)
            updated_knowledge = replace(knowledge, candidates=_with_evidence(first_candidates.groups, prior, stored))
            settled = self.first.learn(transcript, updated_knowledge, budget.part(1), rng)
        return settled

    def _update(
        self,
        table: EvidenceTable,
        reader: CausalReader,
        transcript: Transcript,
        candidates: Candidates,
        budget: Budget,
        rng: np.random.Generator,
    ) -> None:
        """Adds what the model says until the time is over, beginning with the texts that may correct most."""
        texts = transcript.tokens
        reading = texts.map_ids(require_known(guess_by_rank(candidates, transcript.vocab_size, 1).by_id)[:, 0])
        queue, log_mean = table.urgent_texts(texts, rng), None
        while len(queue) and budget.left() > 0:
            text_indices, queue = table.unfinished_texts(texts, queue[:TEXTS_AT_A_TIME]), queue[TEXTS_AT_A_TIME:]
            batches_read: list[ReadBatch] = []
            for batch in reader.read_texts(reading, text_indices):
                batches_read.append(batch)
                if budget.left() <= 0:
                    break
            if log_mean is None and batches_read:
                states = torch.cat([batch.states for batch in batches_read])
                log_mean = reader.log_mean_probability(
                    states[torch.from_numpy(rng.permutation(len(states))[:PLACES_AVERAGED])]
                )
            for batch in batches_read:
                is_open = table.open_at(texts.ids[batch.places])
                ids = texts.ids[batch.places[is_open]]
                if len(ids):
                    options = table.member[table.line_of_id[ids]]
                    table.update(
                        ids,
                        reader.log_likelihood_ratio(batch.select(is_open), options, require_known(log_mean)),
                        self.doubt,
                    )


def _with_evidence(
    groups: tuple[Group, ...], log_likelihoods: Sequence[Floats], evidence: Sequence[Floats]
) -> Candidates:
    """Returns candidates whose log-likelihoods are `log_likelihoods` plus the evidence."""
    return Candidates(groups, tuple(a + b for a, b in zip(log_likelihoods, evidence, strict=True)))
