"""Finds the tokens of a cluster whose rows are all their mean (our own attack).

**Idea.** With shared rows, every scrambled row of a cluster of s tokens is m = (e_1 + ... + e_s) / s. So rows that are
equal to the last bit are a cluster, and their number is s. m lies in d dimensions and is made of s public rows, 10 to
20 of tens of thousands: one sparse equation, whose solution proves itself.

**Method.** Least squares with backward elimination (`sparse.eliminate`) on the public rows nearest to m. Then, as in
matching pursuit, on those nearest to the residual as well, until exactly s tokens remain and make up m. Each solved
cluster leaves fewer free tokens, so the clusters that failed are tried again.

**Limits.** The attack does not find which member an id stands for: each occurrence draws another, and nothing in the
table shows it. Unsolved clusters keep the public rows nearest to their mean, without any claim. A fine-tuned table has
no equal rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milkglass import papers
from milkglass.attacks import work
from milkglass.attacks.assignment import Solver
from milkglass.attacks.embeddings import sparse
from milkglass.sequences import Ids
from milkglass.threat.attack import Cost
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge, require_known
from milkglass.threat.observations import Transcript, Weights

ROUNDING_ERRORS = ((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12))  # relative error of a row stored in this dtype
EXACT_MISFIT = 1e-6  # relative error of a row stored in fp32
MAX_ROUNDS = 6  # rounds of matching pursuit
CANDIDATE_COUNTS = (2048, 8192, None)  # how many of the free public rows nearest to a mean each pass takes; None: all
UNSOLVED_TOKENS = 20  # candidates of a cluster that was not solved
UNSOLVED_TEMPERATURE = 0.05  # the log-likelihood of such a candidate is log softmax(cosine / temperature)


@dataclass(frozen=True)
class MeanSolve(Solver):
    """Finds the tokens of each cluster whose rows are all their mean, by sparse linear equations.

    Attributes:
        pool: how many public rows a mean is explained from at first; at most half the dimensions are used.
        more: how many public rows are added in each round.
    """

    pool: int = 64
    more: int = 24

    name = "mean-solve"
    title = "Means of clusters"
    cost = Cost(per_1000_rows=0.57)
    recovers_ids = True
    paper = papers.unpublished_method("Mixtures have one sparse solution")
    sees = frozenset({Weights})
    assumes = frozenset({"public_model"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if not knowledge.has_shared_ids:
            return "each row is a mixture of its own: cluster-solve finds its tokens"
        if knowledge.symbols is not None:
            return "the map from tokens to ids is known: nothing is left to be solved"
        return None

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        """Returns the groups. The weights of a solved cluster are all 1/s. Nothing is drawn from `rng`."""
        scrambled, public = transcript.table, require_known(knowledge.public_model).table
        tokens = sparse.unit_rows(public)
        is_unused = np.ones(len(public), np.bool_)
        groups: list[Group] = []
        tokens_by_content = sparse.equal_rows(public)
        unsolved_clusters: list[Ids] = []
        for content, equal_rows in sparse.equal_rows(scrambled).items():
            if equal_tokens := tokens_by_content.get(content):
                is_unused[equal_tokens] = False
                groups.append(Group(np.array(equal_rows, np.int64), np.array(equal_tokens, np.int64)))
            else:
                unsolved_clusters.append(np.array(equal_rows, np.int64))
        counts = transcript.id_counts
        unsolved_clusters.sort(key=lambda rows: -int(counts[rows].sum()))  # a short budget solves what crossed
        noise = _relative_error(scrambled)
        for candidate_count in CANDIDATE_COUNTS:
            still_unsolved: list[Ids] = []
            for index, rows in enumerate(unsolved_clusters):
                members = None
                if budget.left() > 0:
                    members = self._members(
                        sparse.unit_rows(scrambled[rows[0]]), tokens, is_unused, len(rows), noise, candidate_count
                    )
                    budget.spend(
                        20 * work.CALL_SECONDS + work.elements(len(tokens)) + work.products(4.0 * tokens.numel())
                    )
                    budget.progress(index / len(unsolved_clusters))
                if members is None:
                    still_unsolved.append(rows)
                    continue
                is_unused[members] = False
                groups.append(Group(rows, members, np.full((len(rows), len(members)), 1 / len(members))))
            unsolved_clusters = still_unsolved
        log_likelihoods = [np.zeros((len(group.rows), len(group.members))) for group in groups]
        for rows in unsolved_clusters:
            group, log_likelihood = _unsolved_group(sparse.unit_rows(scrambled[rows[0]]), rows, tokens, is_unused)
            groups.append(group)
            log_likelihoods.append(log_likelihood)
        return Candidates(tuple(groups), tuple(log_likelihoods))

    def _members(
        self, mean: Tensor, tokens: Tensor, is_unused: np.ndarray, size: int, noise: float, candidate_count: int | None
    ) -> Ids | None:
        """Returns the tokens that make up a cluster's mean, or None if they are not found.

        Args:
            mean: (d,) of norm 1.
            tokens: (n, d) the public rows, of norm 1.
            is_unused: (n,) whether each token is in no cluster yet.
            size: how many tokens the cluster has.
            noise: the relative error of a row.
            candidate_count: how many unused tokens, those nearest to the mean, may be members. None: all.
        """
        d, count = len(mean), int(is_unused.sum())
        if count < size:
            return None
        cosines = (tokens @ mean).masked_fill(torch.from_numpy(~is_unused), -2)
        candidates = cosines.topk(min(count, candidate_count or count)).indices
        rows = tokens[candidates]
        pool = (rows @ mean).topk(min(self.pool, d // 2, len(candidates))).indices
        for _ in range(MAX_ROUNDS):
            is_member, _ = sparse.eliminate(rows[pool][None], mean[None], noise)
            selected = pool[is_member[0]]
            if not len(selected):
                return None
            misfit = float(sparse.misfits(mean[None], rows[selected])[0])
            if misfit <= 10 * noise:
                return candidates[selected].numpy() if len(selected) == size else None
            added = sparse.best_additions(rows, rows[selected], mean, self.more)
            pool = torch.cat([selected, added]).unique()
            pool = pool if len(pool) <= d // 2 else pool[: d // 2]
        return None


def _relative_error(table: Tensor) -> float:
    """Returns the relative error of a row, by whether its numbers are those of bf16, of fp16 or of fp32."""
    sample = table[: 1 << 12]
    return next(
        (error for dtype, error in ROUNDING_ERRORS if torch.equal(sample.to(dtype).float(), sample)), EXACT_MISFIT
    )


def _unsolved_group(mean: Tensor, rows: Ids, tokens: Tensor, is_unused: np.ndarray) -> tuple[Group, np.ndarray]:
    """Returns a group of the unused tokens nearest to a mean, or the nearest of all, and its log-likelihoods."""
    candidates = np.flatnonzero(is_unused) if is_unused.any() else np.arange(len(tokens))
    scores = sparse.log_softmax((tokens[torch.from_numpy(candidates)] @ mean / UNSOLVED_TEMPERATURE)[None])[0]
    best = scores.topk(min(UNSOLVED_TOKENS, len(candidates)))
    return Group(rows, candidates[best.indices.numpy()]), np.repeat(best.values.numpy()[None], len(rows), 0)
