"""Deciphers a corpus: one substitution applies to all of it, so that all of its text solves it together.

A scheme that sends token ids replaces each public id by a scrambled one, always the same. However well it hides the
embedding table, the sequences keep the frequencies and neighbours of the language. An attacker with public text matches
the two. One sentence allows several readings; a corpus allows few.

**Model.** Q[a, b] is the belief that the scrambled id a stands for the public id b. Rows sum to 1. Columns sum to at
most 1 (Sinkhorn), since no token has two ids, or to r if a token has r aliases, each with 1/r of its count. Which ids
are aliases of one token is not known. The evidence for b is

    log prior(a, b)                                     candidates found by other attacks (cluster-solve, matching)
    + log frequency(a, b)                               bigrams.py: a Gaussian in the logarithms of counts
    + K / (K + count(a)) * sum over neighbours (a, a') of  w * log(rho + (1 - rho) * R(b, Q[a']))

R(b, q) is the likelihood ratio that something believed to be q stands next to b: sum_b' q[b'] P(b' | b) / P(b'), from
public bigrams smoothed by alpha pseudo-counts. Neighbours left and right have the weight w = 1, those at distance 2
`second`. If the public model is known, rare tokens borrow from their embeddings (`Profiles`).

**Convergence.** rho, the share of neighbours that are misread or unknown to the public text, bounds what one neighbour
can say against a reading. K / (K + count) damps frequent ids, whose many neighbours are not independent. Belief is soft
and moves by (1 - inertia) a sweep. rho falls while beliefs sharpen.

**Two forms.** With candidates (groups of 10 to 20 ids, cluster-solve) Q is block-diagonal. All ids are solved at once,
in seconds (mean_field.py), and end in a joint assignment in each group. Without candidates (a permutation with a
perfectly hidden table) the matrix grows from the 60 most frequent ids to 2,500 (`settle_all`). Each id is read
as its likeliest token, and rarer ids get no guess.

**Parameters** were chosen in rehearsals in which the attacker plays both sides (tests/attacks/tuning.py): public text
against public text (news, tweets, dialogues, answers, encyclopaedia; each within its kind and across). Alpha and
rho were also chosen on SST-2 and Enron, on which results are reported: on these two they are optimistic. No other
parameter was chosen on text on which results are reported. Recovery is flat around the parameters. How alike the two
texts are is not an input: `likeliest_tau` estimates it from the counts.

A language model over the remaining candidates takes the result of `learn` as its prior (language.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from milkglass import papers
from milkglass.attacks.assignment import Solver
from milkglass.attacks.token_ids.decipherment import cribs
from milkglass.attacks.token_ids.decipherment.bigrams import Floats, FrequencyFit, PairCounts, PublicPairCounts
from milkglass.attacks.token_ids.decipherment.block_assignment import BlockAssignment, Profiles, Ratios
from milkglass.attacks.token_ids.decipherment.mean_field import (
    AnnealedRange,
    GrowthSchedule,
    Schedule,
    SweepCallback,
    messages_of,
    settle,
    settle_all,
)
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Cost
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript

LOG_ZERO = -1e6  # the finite stand-in for log 0, of candidates that another attack rules out
TAUS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)  # values of tau that are tried
READINGS_KEPT = 30  # readings kept for an id that had no candidates before


@dataclass(frozen=True)
class Decipherment(Solver):
    """Solves the substitution of ids with the whole corpus.

    The letters are those of the module's formula.

    Attributes:
        tau: the standard deviation of log frequencies, in nats. None: `sharper` times the likeliest one.
        sharper: the factor of the likeliest tau. Below 1, frequencies weigh more than their likelihood alone says.
        alpha: pseudo-counts that smooth public bigrams.
        patience: K, the count at which an id's neighbours count half.
        doubt: rho, in the first sweep and in the last one.
        temperature: divides scores before the softmax, in the first sweep and in the last one.
        second: w of neighbours at distance 2.
        sweeps: how often all beliefs are updated.
        inertia: the share of a belief that stays in a sweep.
        template: public ids with which each text is known to begin.
        profiles: how embeddings are used. None: they are not.
        growth: how the matrix grows if there are no candidates.
    """

    tau: float | None = None
    sharper: float = 0.7
    alpha: float = 30.0
    patience: float = 80.0
    doubt: AnnealedRange = (0.8, 0.6)
    temperature: AnnealedRange = (1.0, 1.0)
    second: float = 0.5
    sweeps: int = 5
    inertia: float = 0.3
    template: tuple[int, ...] = ()
    profiles: Profiles | None = field(default_factory=Profiles)
    growth: GrowthSchedule = field(default_factory=GrowthSchedule)

    name = "decipherment"
    title = "Corpus decipherment"
    cost = Cost(per_1000_rows=0.11, per_million_tokens=29)
    recovers_ids = True
    paper = papers.SUBSTITUTION_CIPHERS.with_deviations(
        "The attack is ours; the idea of a jointly solved substitution is the paper's.",
        "The relaxation runs over token ids, inside candidate groups or over a growing set of frequent ids.",
        "Evidence is a robust mixture, damped for frequent ids, and the assignment is balanced by Sinkhorn.",
    )
    sees = frozenset({Tokens})
    assumes = frozenset({"corpus"})
    uses = frozenset({"candidates", "public_model", "pairs"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if knowledge.has_shared_ids:
            return "an id names a cluster, not a token: text-in-context reads each position by itself"
        return None

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        """Returns for each scrambled id its candidates, with their log posteriors given the corpus. Draws nothing."""
        texts, size = transcript.tokens, transcript.vocab_size
        known_pairs = self._known_pairs(texts, knowledge)
        public = PublicPairCounts(require_known(knowledge.corpus), knowledge.token_count(size))
        scrambled_pairs = {distance: PairCounts(texts, size, distance) for distance in public.pairs}

        def report_sweep(done_share: float, sweep_work: float) -> bool:
            budget.spend(sweep_work)
            budget.progress(done_share)
            return budget.left() > 0

        counts = texts.counts(size).astype(np.float64)
        if knowledge.candidates is None:
            return self._solve_without_candidates(
                counts, scrambled_pairs, public, known_pairs, report_sweep, knowledge.alias_count
            )
        candidates = cribs.with_known_pairs(knowledge.candidates, known_pairs, knowledge.alias_count)
        blocks = BlockAssignment(candidates, size)
        if not len(blocks.row_of_cell):
            return candidates
        budget.spend(
            self.cost.seconds(size, 0, len(texts.ids), len(texts.ids) + len(require_known(knowledge.corpus).ids))
        )
        ratios, public_model = dict[tuple[int, int], Ratios](), knowledge.public_model
        if self.profiles is not None and public_model is not None and public.counts.any():
            ratios = self.profiles.ratios(public_model.table, blocks, public)
        weights = {1: 1.0, 2: self.second}
        messages = messages_of(blocks, scrambled_pairs, public, self.alpha, weights, ratios)
        earlier_log_likelihoods = np.concatenate(
            [np.maximum(group, LOG_ZERO).ravel() for group in candidates.log_likelihoods]
        )
        prior = earlier_log_likelihoods + self._frequency_scores(counts, public, blocks, knowledge.alias_count)
        damping = self.patience / (self.patience + counts[blocks.rows])[blocks.row_of_cell]
        schedule = Schedule(self.sweeps, self.doubt, self.temperature, self.inertia)
        scores = settle(blocks, prior, messages, damping, schedule, report_sweep)
        return _with_log_likelihoods(candidates, blocks.log_softmax(scores))

    def _known_pairs(self, texts: Sequences, knowledge: Knowledge) -> Ids:
        """Returns (pairs, 2) leaked pairs, then pairs at constant positions that do not contradict them."""
        leaked_pairs, alias_count = np.empty((0, 2), np.int64), knowledge.alias_count
        if knowledge.pairs is not None:
            leaked_pairs = cribs.consistent_pairs(knowledge.pairs, alias_count=alias_count)
        constant_pairs = cribs.pairs_at_constant_positions(texts, require_known(knowledge.corpus), self.template)
        constant_pairs = cribs.consistent_pairs(constant_pairs, knowledge.candidates, alias_count)
        is_new = ~np.isin(constant_pairs[:, 0], leaked_pairs[:, 0]) & ~np.isin(constant_pairs[:, 1], leaked_pairs[:, 1])
        return np.concatenate([leaked_pairs, constant_pairs[is_new]])

    def _frequency_scores(
        self, counts: Floats, public: PublicPairCounts, blocks: BlockAssignment, alias_count: int
    ) -> Floats:
        """Returns (cells,) the log-likelihood of the count of each cell's scrambled id, given its public id."""
        has_choice = blocks.cell_count > 1
        members = np.unique(blocks.member_of_cell[has_choice[blocks.row_of_cell]])
        fit = FrequencyFit(counts, public, blocks.rows[has_choice], members, alias_count)
        tau = self.tau if self.tau is not None else self.sharper * likeliest_tau(fit, blocks)
        return fit.scores(blocks.rows[blocks.row_of_cell], blocks.member_of_cell, tau)

    def _solve_without_candidates(
        self,
        counts: Floats,
        scrambled_pairs: dict[int, PairCounts],
        public: PublicPairCounts,
        known_pairs: Ids,
        report_sweep: SweepCallback,
        alias_count: int,
    ) -> Candidates:
        """Returns a group for each frequent id, with its likeliest readings."""
        known_groups = [Group(pair[:1], pair[1:]) for pair in known_pairs]
        known_log_likelihoods = [np.zeros((1, 1)) for _ in known_groups]
        final_state = settle_all(counts, scrambled_pairs, public, known_pairs, self.growth, report_sweep, alias_count)
        if final_state is None:
            return Candidates(tuple(known_groups), tuple(known_log_likelihoods))
        order = np.argsort(-final_state.belief, axis=1, kind="stable")[:, :READINGS_KEPT]
        log_beliefs = np.log(np.maximum(np.take_along_axis(final_state.belief, order, axis=1), 1e-30)).astype(
            np.float64
        )
        groups = [Group(final_state.rows[[i]], final_state.columns[order[i]]) for i in range(len(final_state.rows))]
        return Candidates((*known_groups, *groups), (*known_log_likelihoods, *(row[None] for row in log_beliefs)))


def likeliest_tau(fit: FrequencyFit, blocks: BlockAssignment) -> float:
    """Returns the tau of TAUS under which the counts are likeliest, if each id may be any of its candidates."""
    is_informative = (blocks.cell_count > 1) & (fit.scrambled_counts[blocks.rows] > 0)
    if not is_informative.any():
        return TAUS[-1]

    def mean_log_likelihood(tau: float) -> float:
        scores = fit.scores(blocks.rows[blocks.row_of_cell], blocks.member_of_cell, tau)
        top = np.maximum.reduceat(scores, blocks.first_cell)
        mean = blocks.row_sums(np.exp(scores - top[blocks.row_of_cell])) / blocks.cell_count
        return float((top + np.log(mean))[is_informative].mean())

    return max(TAUS, key=mean_log_likelihood)


def _with_log_likelihoods(candidates: Candidates, cells: Floats) -> Candidates:
    """Returns the candidates with other log-likelihoods.

    Args:
        candidates: the candidates.
        cells: (cells,) the log-likelihoods, one row after the other, over all groups.
    """
    group_ends = np.cumsum([values.size for values in candidates.log_likelihoods])
    cells_of_groups = np.split(cells, group_ends[:-1])
    shapes = [values.shape for values in candidates.log_likelihoods]
    return replace(
        candidates,
        log_likelihoods=tuple(values.reshape(shape) for values, shape in zip(cells_of_groups, shapes, strict=True)),
    )


def confidence(candidates: Candidates, size: int) -> Floats:
    """Returns (n',) the probability of each scrambled id's likeliest reading; 0 for an id without candidates.

    Args:
        candidates: what `Decipherment.learn` returned.
        size: n', the number of scrambled ids.
    """
    probabilities = np.zeros(size)
    for group, log_likelihood in zip(candidates.groups, candidates.log_likelihoods, strict=True):
        shifted = np.exp(log_likelihood - log_likelihood.max(1, keepdims=True))
        probabilities[group.rows] = 1 / shifted.sum(1)
    return probabilities
