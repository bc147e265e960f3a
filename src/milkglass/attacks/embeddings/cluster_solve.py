"""Cluster solve: find from the scrambled table alone which tokens were mixed with which, and how (our own attack).

**What it exploits.** Row sigma(i) of the scrambled table is sum_j W[i, j] E[j], where W has a block for each cluster of
10 to 20 tokens and is zero outside. E is public. Mixing hides a token among its cluster, but a cluster's rows span
exactly what its members span, a space of 10 to 20 of several hundred dimensions, and no other public row lies in it. So
a linear system with one sparse answer has to be solved, and that the answer is sparse is what proves it right.

**How.** 1. Rows that equal a public row are read off (special tokens, clusters of one).
2. The weights inside a cluster are near 1/s with noise around that, so its scrambled rows all lie near their common
mean: the `width` nearest scrambled neighbours of a scrambled row hold its whole cluster. *All public rows are projected
on the span of these neighbours: members have no residual*, whatever their own cosine is to anything. (To look for the
members among the public neighbours instead, as one would first, fails for tokens that joined a distant cluster.) For
speed this is done after one random projection to `sketch` dimensions, which keeps every linear relation.
3. On the tokens with the least residual, the row's weights are found by least squares with backward elimination
(`sparse.eliminate`), in all dimensions. 4. The rows that lie in the span of the tokens found are the cluster's rows.
It is accepted when there are as many rows as tokens (r times as many where each token has r aliases, which are mixed
of the same tokens) and the next row fits clearly worse.

**Noise.** Tables in bf16 or fp16, and fine-tuned ones, satisfy the equations only nearly. How nearly is measured on the
table itself (`ClusterSearch.measure`: what least squares leaves over, on a sample of rows); every tolerance derives
from that one number. Under noise a cluster's first tokens are only a first guess: the mean of the rows that they
explain best has less noise, the tokens are found again from that mean, and so on.

**An untied head** is mixed by the same W and permuted alike, so table and head are simply put side by side: the same
unknowns, twice the equations, twice the noise draws of nothing new (W is drawn once). It helps where rounding or
training blurred the table. Biases are one column more, and are not used.

**What it does not know.** The order inside a cluster (`matching`); k, epsilon and the special tokens (not needed).
Public rows that are equal to the last bit cannot be distinguished: the members are right up to these. Where the table
is not a mixture, or the budget ends, the rows that remain are ranked by cosine, and nothing is claimed of them.
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
    """Cluster solve: find from the scrambled table alone which tokens were mixed with which, and how (our own attack).

    Attributes:
        widths: how many neighbours span a cluster, tried in this order.
        batch: rows at a time.
        sketch: dimensions of the random projection.
        margins: how much worse the next row must fit, from strict to lenient; the latter only where there is noise.
        head: use an untied head as well.
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
        """Groups with weights for every cluster found (noise may make a weight negative); any order equally likely."""
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
    """(n, d) of both; with a head of their own beside the table, both at the same scale."""
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
    """All that was not solved as one group, by cosine; where that is too large, each row with its nearest tokens."""
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
