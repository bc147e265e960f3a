"""Adds up what a language model says about uncertain scrambled ids, over the places where each occurs.

attacks/token_ids/language.py has the formula. The table has a line for each uncertain id, with its options as columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from milkglass.attacks.token_ids.decipherment.bigrams import Floats
from milkglass.attacks.token_ids.decipherment.decipherment import LOG_ZERO, confidence
from milkglass.sequences import Ids, Sequences
from milkglass.threat.knowledge import Candidates, Group

MAX_CHOICES = 40  # members of a group that are weighed; of a larger group these are the likeliest
MAX_LOG_RATIO = 30.0  # a larger logarithm of a ratio is taken as this
START_DOUBT, MIN_DOUBT, DOUBT_STEPS = 0.5, 0.05, 50  # the search for rho: its start, the least rho, its steps


class EvidenceTable:
    """Adds up evidence for the options of each uncertain id, one line an id.

    Attributes:
        line_of_id: (n',) the line of each scrambled id, -1 for ids that are left alone.
        group, row: (lines,) the id's group among the candidates, and its row there.
        column, member, prior: (lines, w) for each option its column in the group, its public id, and the logarithm of
            its share, -inf where a line has fewer options.
        id_weight: (n',) how many running tokens one more place of an id may correct, on average.
        evidence_sums: (lines, w) the sum of the evidence so far.
        place_count: (lines,) the number of places that contributed.
        contexts: how many places of an id are looked at, at most.
    """

    def __init__(
        self,
        candidates: Candidates,
        texts: Sequences,
        certain: float,
        share: Floats,
        contexts: int,
        size: int,
    ) -> None:
        """Makes an empty table of the ids that are not certain yet.

        Args:
            candidates: the candidates of each id, from decipherment.
            texts: the texts in scrambled ids.
            certain: ids whose likeliest option has a higher probability are left alone.
            share: (n,) the logarithm of each public token's share of public text.
            contexts: how many places of an id are read at most.
            size: the number of scrambled ids.
        """
        counts, confidences = texts.counts(size), confidence(candidates, size)
        is_open = (counts > 0) & (confidences < certain)
        open_rows = [
            (index, row)
            for index, group in enumerate(candidates.groups)
            if len(group.members) > 1
            for row in np.flatnonzero(is_open[group.rows]).tolist()
        ]
        widths = [min(MAX_CHOICES, len(candidates.groups[index].members)) for index, _ in open_rows]
        shape = (len(open_rows), max(widths, default=1))
        column, member, prior = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -np.inf)
        self.line_of_id = np.full(size, -1)
        for line, ((index, row), width) in enumerate(zip(open_rows, widths, strict=True)):
            group = candidates.groups[index]
            self.line_of_id[group.rows[row]] = line
            column[line, :width] = np.argsort(-candidates.log_likelihoods[index][row], kind="stable")[:width]
            member[line] = group.members[column[line, 0]]  # also past the options, where the prior is -inf
            member[line, :width] = group.members[column[line, :width]]
            prior[line, :width] = share[member[line, :width]]
        self.column, self.member = column, member
        self.prior = prior - np.logaddexp.reduce(prior, 1, keepdims=True)
        self.id_weight = np.where(
            self.line_of_id >= 0, (1 - confidences) * counts / np.maximum(1, np.minimum(counts, contexts)), 0.0
        )
        self.group, self.row = np.array(open_rows, np.int64).reshape(-1, 2).T
        self.contexts, self.evidence_sums, self.place_count = contexts, np.zeros(shape), np.zeros(shape[0], np.int64)

    def urgent_texts(self, texts: Sequences, rng: np.random.Generator) -> Ids:
        """Returns the indices of texts with uncertain ids, those first that may correct most for their length."""
        gain = np.bincount(texts.sequence_indices, self.id_weight[texts.ids], len(texts)) / np.maximum(texts.lengths, 1)
        order = rng.permutation(len(texts))
        order = order[np.argsort(-gain[order], kind="stable")]
        return order[gain[order] > 0].astype(np.int64)

    def unfinished_texts(self, texts: Sequences, text_indices: Ids) -> Ids:
        """Returns the texts among `text_indices` that have an id not yet looked at often enough."""
        open_counts = np.bincount(texts.sequence_indices, self.open_at(texts.ids), len(texts))
        return text_indices[open_counts[text_indices] > 0]

    def open_at(self, ids: Ids) -> NDArray[np.bool_]:
        """Returns (m,) whether each of these scrambled ids was looked at in fewer places than `contexts`."""
        return np.append(self.place_count < self.contexts, False)[self.line_of_id[ids]]  # the last one: left alone

    def update(self, ids: Ids, scores: Floats, doubt: float) -> None:
        """Adds what a model says about some places.

        Args:
            ids: (m,) the scrambled id at each place.
            scores: (m, w) log (P(option | context) / P(option)) up to a constant for each place.
            doubt: the probability with which a place says nothing.
        """
        lines = self.line_of_id[ids]
        prior = self.prior[lines]
        ratio = scores - np.logaddexp.reduce(scores + prior, axis=1, keepdims=True)
        contribution = np.log(doubt + (1 - doubt) * np.exp(np.minimum(ratio, MAX_LOG_RATIO)))
        np.add.at(self.evidence_sums, lines, np.where(np.isfinite(prior), contribution, 0.0))
        np.add.at(self.place_count, lines, 1)

    def evidence(self, patience: float) -> Floats:
        """Returns (lines, w) the damped evidence, as log-ratios. `patience` is K in language.py."""
        return patience / (patience + self.place_count[:, None]) * self.evidence_sums

    def believable_evidence(self, evidence: Floats, belief: Floats) -> tuple[Floats, float]:
        """Returns the evidence as far as it can be believed, and rho, the share of ids about which it says nothing.

        An id has the likelihood rho + (1 - rho) r, with r its ratio averaged over the belief, and rho is the share that
        makes all ids likeliest. A belief that says nothing leaves rho at START_DOUBT.
        """
        ratio = evidence - np.logaddexp.reduce(evidence + self.prior, axis=1, keepdims=True)
        factor = np.exp(np.minimum(ratio, MAX_LOG_RATIO))
        mean_factor = (belief * factor).sum(1)
        rho = START_DOUBT
        for _ in range(DOUBT_STEPS):
            informative_probability = (1 - rho) * mean_factor / (rho + (1 - rho) * mean_factor)
            rho = float(np.clip(1 - informative_probability.mean(), MIN_DOUBT, 1.0))
        return np.log(rho + (1 - rho) * factor), rho

    def belief(self, log_likelihoods: Sequence[Floats]) -> Floats:
        """Returns (lines, w) the probabilities of the options by the candidates' log-likelihoods."""
        log_belief = np.full(self.prior.shape, -np.inf)
        for line, (index, row) in enumerate(zip(self.group.tolist(), self.row.tolist(), strict=True)):
            width = int(np.isfinite(self.prior[line]).sum())
            log_belief[line, :width] = np.maximum(log_likelihoods[index][row, self.column[line, :width]], LOG_ZERO)
        return np.exp(log_belief - np.logaddexp.reduce(log_belief, axis=1, keepdims=True))

    def store(self, evidence: Floats, stored: list[Floats], places_seen: Ids, groups: tuple[Group, ...]) -> None:
        """Writes the evidence over that of an earlier round if at least as many places were looked at.

        Args:
            evidence: (lines, w). Members that are not among the options get the evidence of the worst option.
            stored: for each group (r, m), changed in place.
            places_seen: (n',) the number of places of each scrambled id in earlier rounds, changed in place.
        """
        for line in np.flatnonzero(self.place_count).tolist():
            index, row = int(self.group[line]), int(self.row[line])
            scrambled = groups[index].rows[row]
            if self.place_count[line] < places_seen[scrambled]:
                continue
            width = int(np.isfinite(self.prior[line]).sum())
            stored[index][row] = evidence[line, :width].min()
            stored[index][row, self.column[line, :width]] = evidence[line, :width]
            places_seen[scrambled] = self.place_count[line]


def restrict(candidates: Candidates, groups: tuple[Group, ...], size: int) -> list[Floats]:
    """Returns the candidates' log-likelihoods for `groups`: 0 for a group that is no part of one of theirs.

    `size` is the number of scrambled ids.
    """
    group_of_id, row_of_id = np.full(size, -1), np.zeros(size, np.int64)
    for index, group in enumerate(candidates.groups):
        group_of_id[group.rows], row_of_id[group.rows] = index, np.arange(len(group.rows))
    log_likelihoods = []
    for part_group in groups:
        index = int(group_of_id[part_group.rows[0]])
        members = candidates.groups[index].members if index >= 0 else np.empty(0, np.int64)
        if not np.isin(part_group.members, members).all():
            log_likelihoods.append(np.zeros((len(part_group.rows), len(part_group.members))))
            continue
        order = np.argsort(members, kind="stable")
        columns = order[np.searchsorted(members, part_group.members, sorter=order)]
        log_likelihood = candidates.log_likelihoods[index][np.ix_(row_of_id[part_group.rows], columns)]
        log_likelihoods.append(np.maximum(log_likelihood, LOG_ZERO).astype(np.float64))
    return log_likelihoods
