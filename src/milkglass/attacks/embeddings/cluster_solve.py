"""Cluster solve: finds which tokens were mixed with which weights, from the scrambled table alone (our own attack).

**Idea.** Row sigma(i) of the scrambled table is sum_j W[i, j] E[j]. E is public. W has a block for each cluster of 10
to 20 tokens and is zero elsewhere. The rows of a cluster span exactly the space that its members span: 10 to 20 of
several hundred dimensions. No other public row lies in it. So the attack solves a linear system with one sparse
solution, and sparsity proves the solution right.

**Method.** 1. Rows that equal a public row are read off (special tokens, clusters of one).

2. The weights inside a cluster are near 1/s plus noise, so its rows lie near their common mean. The `width` nearest
   scrambled neighbours of a row therefore contain its whole cluster. *All public rows are projected on the span of
   these neighbours: members have no residual*, whatever their cosines are. (Searching among public neighbours instead
   fails for tokens that joined a distant cluster.) One random projection to `sketch` dimensions keeps every linear
   relation and makes this fast.

3. Least squares with backward elimination (`sparse.eliminate`) finds the row's weights on the tokens with the least
   residual, in all dimensions. 4. The rows in the span of these tokens are the cluster's rows. The cluster is accepted
   if it has as many rows as tokens and the next row fits clearly worse. With r aliases a token, which mix the same
   tokens, it must have r times as many rows.

**Noise.** Tables in bf16 or fp16, and fine-tuned tables, satisfy the equations approximately. `ClusterSearch.measure`
measures the error on a sample of rows, and every tolerance derives from it. Under noise the first tokens of a cluster
are a first guess. The mean of the rows that they explain best has less noise, so the tokens are found again from it,
repeatedly.

**An untied head** is mixed by the same W and permuted alike, so table and head are put side by side. The unknowns stay
the same and the equations double. W is drawn once, so this adds no draws of its noise. It helps if rounding or
training blurred the table. Biases could be one more column and are not used.

**Limits.** The attack does not find the order inside a cluster (`matching` does). It does not need k, epsilon or the
special tokens. Public rows that are equal to the last bit cannot be distinguished, so members are right up to these. If
the table is not a mixture or the budget ends, the remaining rows are ranked by cosine, without any claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from milkglass import papers
from milkglass.attacks.assignment import Solver
from milkglass.attacks.embeddings import sparse
from milkglass.attacks.embeddings.cluster_search import ClusterSearch
from milkglass.models.view import Model
from milkglass.sequences import Ids
from milkglass.threat.attack import Cost
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge, required
from milkglass.threat.observations import Transcript, Weights

REST_CELLS = 100_000  # one group for all that remains, up to this size
REST_LIST = 20  # else so many tokens for each row
TEMPERATURE = 0.05  # of the rest: likelihood = log softmax(cosine / temperature)


@dataclass(frozen=True)
class ClusterSolve(Solver):
    """The cluster solve attack.

    Attributes:
        widths: how many neighbours are taken to span a cluster, tried in this order.
        batch: rows that are solved at a time.
        sketch: dimensions of the random projection.
        margins: how many times worse the next row must fit, from strict to lenient. All but the first apply under
            noise.
        head: whether an untied head is used as well.
    """

    widths: tuple[int, ...] = (24, 48, 96)
    batch: int = 32
    sketch: int = 192
    margins: tuple[float, ...] = (2.0, 1.4, 1.15)
    head: bool = True

    name = "cluster-solve"
    title = "Cluster solve"
    cost = Cost(rows=0.57)
    paper = papers.ours("Mixtures have one sparse solution")
    sees = frozenset({Weights})
    assumes = frozenset({"public_model"})

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        """Returns a group with weights for each cluster, its order equally likely. Noise may make a weight negative."""
        features = _features(transcript.model, required(knowledge.public_model), self.head)
        search = ClusterSearch(*features, self.widths, self.batch, self.sketch, self.margins, rng, knowledge.aliases)
        search.verbatim()
        search.measure()
        for width, margin in search.stages():
            search.sweep(width, margin, budget)
        return _candidates(search)

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        seen, public = transcript.model, required(knowledge.public_model)
        if knowledge.shared:
            return "all rows of a cluster are one, its mean: mean-solve finds its tokens"
        ours, theirs = (public.size, public.width), (seen.size, seen.width)
        fits = seen.width == public.width and public.size <= seen.size <= knowledge.aliases * public.size
        return None if fits else f"the public table is {ours}, the one seen {theirs}"


def _features(seen: Model, public: Model, head: bool) -> tuple[Tensor, Tensor]:
    """Returns (n, d) of both models, or (n, 2 d) with an untied head beside the table, at the table's scale."""
    table, original = seen.table, public.table
    if head and seen.head is not None and public.head is not None and seen.head.shape[1] == public.head.shape[1]:
        scale = original.norm() / public.head.norm().clamp_min(1e-30)
        return torch.cat([table, seen.head * scale], 1), torch.cat([original, public.head * scale], 1)
    return table, original


def _candidates(search: ClusterSearch) -> Candidates:
    groups = [Group(rows, members, weights) for rows, members, weights in search.clusters]
    pairs = [(one, np.zeros((len(one.rows), len(one.members)))) for one in groups]
    pairs += _rest(search, np.flatnonzero(search.free_rows)) if search.free_rows.any() else []
    return Candidates(tuple(group for group, _ in pairs), tuple(values for _, values in pairs))


def _rest(search: ClusterSearch, rows: Ids) -> Iterator[tuple[Group, NDArray[np.float64]]]:
    """Yields what was not solved, by cosine: one group, or if that is too large, each row with its nearest tokens."""
    taken = [
        members for where, members, weights in search.clusters if weights is not None or len(where) >= len(members)
    ]
    free = np.setdiff1d(np.arange(len(search.tokens)), np.concatenate([*taken, np.empty(0, np.int64)]))
    if not len(free):
        free = np.arange(len(search.tokens))
    tokens = search.tokens[torch.from_numpy(free)]
    if len(rows) * len(free) <= REST_CELLS:
        yield Group(rows, free), sparse.likelihood(search.rows[torch.from_numpy(rows)] @ tokens.T / TEMPERATURE).numpy()
        return
    for block in np.array_split(rows, 1 + len(rows) // 512):
        likelihood = sparse.likelihood(search.rows[torch.from_numpy(block)] @ tokens.T / TEMPERATURE)
        best = likelihood.topk(min(REST_LIST, len(free)), dim=1)
        for row, places, values in zip(block, best.indices.numpy(), best.values.numpy(), strict=True):
            yield Group(np.array([row]), free[places]), values[None]
