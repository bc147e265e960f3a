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
table itself (`_ClusterSearch.measure`: what least squares leaves over, on a sample of rows); every tolerance derives
from that one number. Under noise a cluster's first tokens are only a first guess: the mean of the rows that they
explain best has less noise, the tokens are found again from that mean, and so on.

**An untied head** is mixed by the same W and permuted alike, so table and head are simply put side by side: the same
unknowns, twice the equations, twice the noise draws of nothing new (W is drawn once). It helps where rounding or
training blurred the table. Biases are one column more, and are not used.

**What it does not know.** The order inside a cluster (`matching`); k, epsilon and the special tokens (not needed).
Public rows that are equal to the last bit cannot be distinguished: the members are right up to these. Where the table
is no mixture, or the budget ends, the rows that remain are ranked by cosine, and nothing is claimed of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from milkglass import papers
from milkglass.attacks.assignment import Solver
from milkglass.attacks.embeddings import sparse
from milkglass.models.view import Model
from milkglass.sequences import Ids
from milkglass.threat.attack import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge, required
from milkglass.threat.observations import Transcript, Weights

EXACT = 1e-6  # rows in fp32 satisfy their equations this well
HOPELESS = 0.35  # more left over than this in the median row: not a mixture
LOUD = 0.02  # above this noise, more candidates are kept and nothing is sketched
REST_CELLS = 100_000  # one group for all that remains, up to this size
REST_LIST = 20  # else so many tokens for each row
TEMPERATURE = 0.05  # of the rest: likelihood = log softmax(cosine / temperature)


@dataclass(frozen=True)
class ClusterSolve(Solver):
    """The attack that this module describes.

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
    paper = papers.ours("Mixtures have one sparse solution")
    sees = frozenset({Weights})
    assumes = frozenset({"public_model"})

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        """Groups with weights for every cluster found (noise may make a weight negative); any order equally likely."""
        features = _features(transcript.model, required(knowledge.public_model), self.head)
        search = _ClusterSearch.of(*features, self, rng, knowledge.aliases)
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


@dataclass(frozen=True)
class _Pool:
    """What was free when it was last looked at, together in memory: ids (f,), small (f, sketch)."""

    ids: Ids
    small: Tensor


@dataclass
class _ClusterSearch:
    """What is still free, and what was found. Indices are scrambled ids (rows) and public ids (tokens)."""

    mixed: Tensor  # (n', d) scrambled rows as they are
    public: Tensor
    rows: Tensor  # (n', d) the same, of length 1
    tokens: Tensor
    attack: ClusterSolve
    rng: np.random.Generator
    free_rows: NDArray[np.bool_]
    copies: int  # rows of each token, but for special ones
    twins: list[Ids]  # of each token that is the first of its kind: the tokens equal to it that are free, else none
    noise: float = EXACT
    found: list[tuple[Ids, Ids, NDArray[np.float64] | None]] = field(default_factory=list)
    small_rows: Tensor = field(default_factory=lambda: torch.empty(0))  # (n, sketch)
    small_tokens: Tensor = field(default_factory=lambda: torch.empty(0))
    pool_rows: _Pool = field(init=False)
    pool_tokens: _Pool = field(init=False)

    @classmethod
    def of(
        cls, mixed: Tensor, public: Tensor, attack: ClusterSolve, rng: np.random.Generator, copies: int
    ) -> _ClusterSearch:
        unit, none, free = sparse.unit, np.empty(0, np.int64), np.ones(len(mixed), np.bool_)
        return cls(mixed, public, unit(mixed), unit(public), attack, rng, free, copies, [none] * len(public))

    def verbatim(self) -> None:
        """Rows equal to a public row; and which public rows equal each other."""
        alike = sparse.equal_rows(self.mixed)
        for key, tokens in sparse.equal_rows(self.public).items():
            rows = alike.get(key, [])
            if rows:
                self.free_rows[rows] = False
                self.found.append((np.array(rows), np.array(tokens), None))
            taken = -(-len(rows) // self.copies)
            self.twins[tokens[0]] = np.array(tokens[taken:], np.int64)  # some of them; which ones cannot be known

    @property
    def exact(self) -> bool:
        return self.noise <= 10 * EXACT

    @property
    def free_tokens(self) -> Ids:
        return np.flatnonzero(np.array([len(one) > 0 for one in self.twins]))

    # --- how good the equations are
    def measure(self, sample: int = 64) -> None:
        """The median of what least squares leaves over, relative to a row's length. Sets the sketch up as well."""
        self._project(self.rows.shape[1])
        self._refresh()
        if not self.free_rows.any():
            return
        seeds = self.rng.permutation(np.flatnonzero(self.free_rows))[:sample]
        left = []
        for part in np.array_split(seeds, max(1, len(seeds) // 16)):
            _, candidates = self._shortlist(part, self._width(max(self.attack.widths)))
            for seed, tokens in zip(part, candidates, strict=True):
                share = len(tokens) / self.rows.shape[1]
                rest = float(sparse.misfit(self.rows[seed][None], self.tokens[torch.from_numpy(tokens)])[0])
                left.append(rest / max(1e-3, 1 - share) ** 0.5)
        self.noise = max(EXACT, float(np.median(left)))
        if self.noise < LOUD:
            self._project(self.attack.sketch)

    def _project(self, size: int) -> None:
        self.small_rows, self.small_tokens = self.rows, self.tokens
        if size < self.rows.shape[1]:
            onto = sparse.directions(self.rows.shape[1], size, self.rng)
            self.small_rows, self.small_tokens = sparse.unit(self.rows @ onto), sparse.unit(self.tokens @ onto)

    def _width(self, width: int) -> int:
        return min(width, self.small_rows.shape[1] // 3)

    # --- the search
    def stages(self) -> Iterator[tuple[int, float]]:
        if self.noise > HOPELESS:
            return
        margins = self.attack.margins[:1] if self.exact else self.attack.margins
        widths = list(dict.fromkeys(self._width(width) for width in self.attack.widths))
        yield from ((width, margins[0]) for width in widths)
        yield from ((widths[-1], margin) for margin in margins[1:])

    def sweep(self, width: int, margin: float, budget: Budget) -> None:
        """Every free row once, or until it is clear that clusters are wider than this."""
        order = self.rng.permutation(np.flatnonzero(self.free_rows))
        self._refresh()
        tried = solved = at = 0
        while at < len(order) and budget.left() > 0 and len(self.pool_tokens.ids):
            seeds = order[at:][self.free_rows[order[at:]]][: self.attack.batch]
            if not len(seeds):
                break
            at = 1 + int(np.flatnonzero(order == seeds[-1])[0])
            if self.free_rows.sum() < 0.9 * len(self.pool_rows.ids):
                self._refresh()
            solved += self._batch(seeds, width, margin)
            tried += len(seeds)
            budget.progress(1 - float(self.free_rows.mean()))
            if tried >= 96 and solved < 0.2 * tried and width < self._width(max(self.attack.widths)):
                return

    def _refresh(self) -> None:
        rows, tokens = np.flatnonzero(self.free_rows), self.free_tokens
        self.pool_rows = _Pool(rows, self.small_rows[torch.from_numpy(rows)])
        self.pool_tokens = _Pool(tokens, self.small_tokens[torch.from_numpy(tokens)])

    def _shortlist(self, seeds: Ids, width: int) -> tuple[Ids, Ids]:
        """(b, m) the nearest scrambled rows and (b, z) the tokens best explained by the first `width` of them: aliases
        make a cluster's rows more, and its span no larger."""
        rows, tokens = self.pool_rows, self.pool_tokens
        wide, width = min(self.copies * width, len(rows.ids)), min(width, len(rows.ids))
        extra = 16 if self.noise < LOUD else 96
        near = (self.small_rows[torch.from_numpy(seeds)] @ rows.small.T).topk(wide, dim=1).indices
        shares = sparse.explained(tokens.small, rows.small[near[:, :width]])
        count = min(width + extra, self.rows.shape[1] // 2, len(tokens.ids))
        return rows.ids[near.numpy()], tokens.ids[shares.topk(count, dim=1).indices.numpy()]

    def _batch(self, seeds: Ids, width: int, margin: float) -> int:
        near, candidates = self._shortlist(seeds, width)
        on, _ = sparse.eliminate(
            self.tokens[torch.from_numpy(candidates)], self.rows[torch.from_numpy(seeds)], self.noise
        )
        solved = 0
        for number, seed in enumerate(seeds):
            if self.free_rows[seed]:
                solved += self._settle(candidates[number][on[number].numpy()], near[number], candidates[number], margin)
        return solved

    def _settle(self, chosen: Ids, near: Ids, candidates: Ids, margin: float) -> bool:
        """From a first guess at the tokens to a cluster, if it can be proved."""
        near = near[self.free_rows[near]]
        for attempt in range(1 if self.exact else 3):
            chosen = self._free(chosen)
            if not 0 < len(chosen) <= self.rows.shape[1] // 3:
                return False
            rows, worse = self._rows_of(chosen, near)
            if worse < margin and attempt == 0 and self._fits(rows[: 1 + self.copies * len(chosen) // 2], chosen):
                rows, worse = self._rows_of(chosen, self._similar(chosen))  # perhaps a row is no neighbour
            if worse >= margin:
                return self._claim(rows, chosen)
            again = self._tokens_of(rows, chosen, candidates, wide=attempt == 0)
            if set(again.tolist()) == set(chosen.tolist()):
                return False
            chosen = again
        return False

    def _free(self, tokens: Ids) -> Ids:
        return np.array([token for token in tokens if len(self.twins[token])], np.int64)

    def _fits(self, rows: Ids, chosen: Ids) -> bool:
        left = sparse.misfit(self.rows[torch.from_numpy(rows)], self.tokens[torch.from_numpy(chosen)])
        return bool((left <= (10 if self.exact else 2) * self.noise).all())

    def _similar(self, chosen: Ids) -> Ids:
        """The free rows that these tokens explain best, some more than needed."""
        left = sparse.misfit(self.pool_rows.small, self.small_tokens[torch.from_numpy(chosen)])
        count = min(2 * self.copies * len(chosen) + 8, len(left))
        rows = self.pool_rows.ids[left.topk(count, largest=False).indices.numpy()]
        return rows[self.free_rows[rows]]

    def _rows_of(self, chosen: Ids, among: Ids) -> tuple[Ids, float]:
        """The rows best explained by these tokens, as many as they must have, and how much worse the next one fits.

        0 where even those do not fit. Equal tokens count as often as they are free; then any number up to that will do.
        """
        left = sparse.misfit(self.rows[torch.from_numpy(among)], self.tokens[torch.from_numpy(chosen)]).numpy()
        order = np.argsort(left, kind="stable")
        left = np.append(np.maximum(left[order], self.noise), 1.0)
        best, worse = self.copies * len(chosen), 0.0
        most = min(self.copies * sum(len(self.twins[token]) for token in chosen), len(order))
        for count in range(self.copies * len(chosen), most + 1, self.copies):
            ratio = float(left[count] / left[count - 1])
            if ratio > worse and (left[count - 1] <= 10 * self.noise or self.noise > LOUD):
                best, worse = count, ratio
        return among[order[:best]], worse

    def _tokens_of(self, rows: Ids, chosen: Ids, candidates: Ids, wide: bool) -> Ids:
        """The tokens found again from the rows' mean, which has less noise than one row.

        Args:
            wide: among all tokens.
        """
        pool = np.concatenate([candidates, chosen])
        if wide:
            mean = sparse.unit(self.small_rows[torch.from_numpy(rows)].mean(0))
            more = sparse.best_added(self.pool_tokens.small, self.small_tokens[torch.from_numpy(chosen)], mean, 16)
            pool = np.concatenate([pool, self.pool_tokens.ids[more.numpy()]])
        pool = self._free(np.unique(pool))
        mean = sparse.unit(self.rows[torch.from_numpy(rows)].mean(0))
        on, _ = sparse.eliminate(self.tokens[torch.from_numpy(pool)][None], mean[None], self.noise / len(rows) ** 0.5)
        return pool[on[0].numpy()]

    def _claim(self, rows: Ids, chosen: Ids) -> bool:
        """Take rows and tokens out, with their weights; what falls apart into several clusters is several."""
        basis = self.public[torch.from_numpy(chosen)].double()
        solved = torch.linalg.lstsq(basis.T, self.mixed[torch.from_numpy(rows)].double().T).solution.T.numpy()
        if self.exact and solved.min() < -1e-3:
            return False
        parts = sparse.parts(solved > sparse.weight_errors(basis, self.mixed[torch.from_numpy(rows)], self.noise))
        for part, those in parts:
            self.free_rows[rows[part]] = False
            members, weights = self._expanded(len(part), chosen[those], solved[np.ix_(part, those)])
            self.found.append((rows[part], members, weights))
        return True

    def _expanded(self, count: int, chosen: Ids, weights: NDArray[np.float64]) -> tuple[Ids, NDArray[np.float64]]:
        """A member for each row or its aliases: equal tokens, of which only the first was chosen, share a weight."""
        extra = count // self.copies - len(chosen)
        members, columns = [], []
        for column, token in enumerate(chosen):
            taken = self.twins[token][: 1 + max(0, extra)]
            self.twins[token] = self.twins[token][len(taken) :]
            extra -= len(taken) - 1
            members.append(taken)
            columns.append(np.repeat(weights[:, column : column + 1] / len(taken), len(taken), axis=1))
        return np.concatenate(members), np.concatenate(columns, axis=1)


def _candidates(search: _ClusterSearch) -> Candidates:
    groups = [Group(rows, members, weights) for rows, members, weights in search.found]
    pairs = [(one, np.zeros((len(one.rows), len(one.members)))) for one in groups]
    pairs += _rest(search, np.flatnonzero(search.free_rows)) if search.free_rows.any() else []
    return Candidates(tuple(group for group, _ in pairs), tuple(values for _, values in pairs))


def _rest(search: _ClusterSearch, rows: Ids) -> Iterator[tuple[Group, NDArray[np.float64]]]:
    """All that was not solved as one group, by cosine; where that is too large, each row with its nearest tokens."""
    taken = [members for where, members, weights in search.found if weights is not None or len(where) >= len(members)]
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
