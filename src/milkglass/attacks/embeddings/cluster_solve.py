"""Finds which tokens were mixed with which weights, from the scrambled table alone (our own attack).

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

**Noise.** Tables in bf16 or fp16, and fine-tuned tables, satisfy the equations approximately. The error is measured on
a sample of rows (`measure_error`), and every tolerance derives from it. Under noise the first tokens of a cluster
are a first guess. The mean of the rows that they explain best has less noise, so the tokens are found again from it,
repeatedly.

**An untied head** is mixed by the same W and permuted alike, so table and head are put side by side. The unknowns stay
the same, and the equations double. W is drawn once, so the head shows no second draw of its noise. It helps if rounding
or training blurred the table. Biases could be one more column and are not used.

**Order.** Rows whose ids crossed are tried first, the most frequent first. So a short budget is spent on the rows that
the texts use.

**Limits.** The attack does not find the order inside a cluster (`matching` does). It does not need k, epsilon or the
special tokens. Public rows that are equal to the last bit cannot be distinguished, so members are right up to these. If
the table is not a mixture or the budget ends, the remaining rows are ranked by cosine, without any claim: those whose
ids crossed in any case, the others while the budget lasts. If nothing crossed, all are ranked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from milkglass import papers
from milkglass.attacks import work
from milkglass.attacks.assignment import Solver
from milkglass.attacks.embeddings import sparse
from milkglass.models.view import Model
from milkglass.sequences import Ids
from milkglass.threat.attack import Cost
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge, require_known
from milkglass.threat.observations import Transcript, Weights

NOISE_SAMPLE_ROWS = 64  # rows on which the noise is measured
EXACT_MISFIT = 1e-6  # relative error with which rows in fp32 satisfy their equations
MAX_MEDIAN_MISFIT = 0.35  # with a larger misfit of the median row the table is not a mixture
MAX_SKETCH_NOISE = 0.02  # above this noise, more candidates are kept and nothing is projected
MAX_UNSOLVED_CELLS = 100_000  # the most rows times tokens of one group of all rows that were not solved
UNSOLVED_BLOCK_ROWS = 512  # about so many rows that were not solved are ranked at a time
UNSOLVED_TOKENS = 20  # candidates of each row that was not solved, if that group would be larger
UNSOLVED_TEMPERATURE = 0.05  # the log-likelihood of a candidate is log softmax(cosine / temperature)


@dataclass(frozen=True)
class _FreePool:
    """Holds the rows, or the tokens, that were free at the last `_refresh_pools`.

    Attributes:
        ids: (f,) their scrambled ids, or their public ids.
        projected: (f, s) their projections.
    """

    ids: Ids
    projected: Tensor


class ClusterSearch:
    """Searches for all clusters of a table. Rows are indexed by scrambled ids, tokens by public ids.

    Attributes:
        scrambled, public: (n', d) and (n, d) the rows of both tables.
        counts: (n',) how often each scrambled id crossed; 1 for each if none did.
        unit_rows, unit_tokens: (n', d) and (n, d) the rows of `scrambled` and of `public`, scaled to length 1.
        is_free: (n',) whether each row belongs to no cluster yet.
        free_equals: a list for each token. The first of several tokens with equal rows lists those that are free; the
            lists of the others are empty.
        relative_error: the median residual of least squares, relative to a row's norm (`measure_error`).
        projected_rows, projected_tokens: (n', s) and (n, s) `unit_rows` and `unit_tokens`, projected to s = `sketch`
            dimensions; under much noise they are not projected.
        pool_rows, pool_tokens: the rows and tokens that were free at the last `_refresh_pools`.
        clusters: for each cluster its rows, its tokens, and the weights (rows, tokens), or None for rows that equal a
            token's.
    """

    projected_rows: Tensor
    projected_tokens: Tensor
    pool_rows: _FreePool
    pool_tokens: _FreePool

    def __init__(
        self, scrambled: Tensor, public: Tensor, counts: Ids, settings: ClusterSolve, alias_count: int,
        rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self.scrambled, self.public, self.counts, self.settings = scrambled, public, counts, settings
        self.alias_count, self.rng = alias_count, rng
        self.unit_rows, self.unit_tokens = sparse.unit_rows(scrambled), sparse.unit_rows(public)
        self.is_free, self.free_equals = np.ones(len(scrambled), np.bool_), [np.empty(0, np.int64)] * len(public)
        self.relative_error, self.clusters = EXACT_MISFIT, list[tuple[Ids, Ids, NDArray[np.float64] | None]]()

    def take_out_equal_rows(self) -> None:
        """Records a cluster of each row that equals a public row, and fills `free_equals`."""
        rows_by_content = sparse.equal_rows(self.scrambled)
        for content, tokens in sparse.equal_rows(self.public).items():
            rows = rows_by_content.get(content, [])
            if rows:
                self.is_free[rows] = False
                self.clusters.append((np.array(rows), np.array(tokens), None))
            taken_count = -(-len(rows) // self.alias_count)
            # Which of the equal tokens are free cannot be known
            self.free_equals[tokens[0]] = np.array(tokens[taken_count:], np.int64)

    @property
    def is_exact(self) -> bool:
        """Returns whether the equations hold up to the rounding of fp32."""
        return self.relative_error <= 10 * EXACT_MISFIT

    @property
    def free_tokens(self) -> Ids:
        """Returns (f,) the tokens that are in no cluster yet; of equal tokens the first, if one of them is free."""
        return np.flatnonzero(np.array([len(equals) > 0 for equals in self.free_equals]))

    # --- how good the equations are
    def measure_error(self) -> None:
        """Sets `relative_error`, and projects the rows to `sketch` dimensions if it is below MAX_SKETCH_NOISE."""
        self._project(self.unit_rows.shape[1])
        self._refresh_pools()
        if not self.is_free.any():
            return
        seeds = self.rng.permutation(np.flatnonzero(self.is_free))[:NOISE_SAMPLE_ROWS]
        misfits = []
        for seed_batch in np.array_split(seeds, max(1, len(seeds) // 16)):
            _, candidates = self._shortlist(seed_batch, self._possible_width(max(self.settings.widths)))
            for seed, tokens in zip(seed_batch, candidates, strict=True):
                share = len(tokens) / self.unit_rows.shape[1]
                residual = float(
                    sparse.misfits(self.unit_rows[seed][None], self.unit_tokens[torch.from_numpy(tokens)])[0]
                )
                misfits.append(residual / max(1e-3, 1 - share) ** 0.5)
        self.relative_error = max(EXACT_MISFIT, float(np.median(misfits)))
        if self.relative_error < MAX_SKETCH_NOISE:
            self._project(self.settings.sketch)

    def _project(self, size: int) -> None:
        """Projects rows and tokens to `size` random dimensions, if they have more."""
        self.projected_rows, self.projected_tokens = self.unit_rows, self.unit_tokens
        width = self.unit_rows.shape[1]
        if size < width:
            columns = torch.linalg.qr(torch.from_numpy(self.rng.normal(size=(width, size))).float())[0]
            self.projected_rows = sparse.unit_rows(self.unit_rows @ columns)
            self.projected_tokens = sparse.unit_rows(self.unit_tokens @ columns)

    def _possible_width(self, width: int) -> int:
        """Returns the width, or the largest one for which a span excludes other tokens."""
        return min(width, self.projected_rows.shape[1] // 3)

    # --- the search
    def stages(self) -> Iterator[tuple[int, float]]:
        """Yields the arguments of each `sweep`, its width and its margin; nothing if the table is not a mixture."""
        if self.relative_error > MAX_MEDIAN_MISFIT:
            return
        margins = self.settings.margins[:1] if self.is_exact else self.settings.margins
        widths = list(dict.fromkeys(self._possible_width(width) for width in self.settings.widths))
        yield from ((width, margins[0]) for width in widths)
        yield from ((widths[-1], margin) for margin in margins[1:])

    def sweep(self, width: int, margin: float, budget: Budget) -> None:
        """Tries every free row once as the seed of a cluster.

        It stops early if few are solved and larger widths are left: the clusters are then larger than `width`.

        Args:
            width: how many neighbours of a seed are taken to span its cluster.
            margin: how many times worse the next row must fit.
            budget: ends the sweep.
        """
        order = most_frequent_first(self.rng.permutation(np.flatnonzero(self.is_free)), self.counts)
        self._refresh_pools()
        seeds_tried = solved_count = next_seed = 0
        while next_seed < len(order) and budget.left() > 0 and len(self.pool_tokens.ids):
            seeds = order[next_seed:][self.is_free[order[next_seed:]]][: self.settings.batch]
            if not len(seeds):
                break
            next_seed = 1 + int(np.flatnonzero(order == seeds[-1])[0])
            if self.is_free.sum() < 0.9 * len(self.pool_rows.ids):
                self._refresh_pools()
            solved_count += self._solve_seeds(seeds, width, margin)
            seeds_tried += len(seeds)
            budget.spend(self._work(len(seeds), width))
            budget.progress(1 - float(self.is_free.mean()))
            is_widest = width >= self._possible_width(max(self.settings.widths))
            if seeds_tried >= 96 and solved_count < 0.2 * seeds_tried and not is_widest:
                return

    def _work(self, seed_count: int, width: int) -> float:
        """Returns the work of a batch: rows compared, tokens projected on each span, and a cluster settled."""
        rows, tokens = self.pool_rows.projected, self.pool_tokens.projected
        return seed_count * (30 * work.CALL_SECONDS + work.products(float(rows.numel()) + tokens.numel() * width))

    def _refresh_pools(self) -> None:
        """Takes the rows and tokens that are free now into the pools."""
        rows, tokens = np.flatnonzero(self.is_free), self.free_tokens
        self.pool_rows = _FreePool(rows, self.projected_rows[torch.from_numpy(rows)])
        self.pool_tokens = _FreePool(tokens, self.projected_tokens[torch.from_numpy(tokens)])

    def _shortlist(self, seeds: Ids, width: int) -> tuple[Ids, Ids]:
        """Returns candidates for the cluster of each seed.

        Only the first `width` rows span the tokens: aliases add rows to a cluster, but no dimensions to its span.

        Returns:
            (seeds, m) the nearest scrambled rows, and (seeds, z) the tokens that the first `width` of them explain
                best.
        """
        rows, tokens = self.pool_rows, self.pool_tokens
        row_count, width = min(self.alias_count * width, len(rows.ids)), min(width, len(rows.ids))
        extra_count = 16 if self.relative_error < MAX_SKETCH_NOISE else 96
        cosines = self.projected_rows[torch.from_numpy(seeds)] @ rows.projected.T
        nearest_rows = cosines.topk(row_count, dim=1).indices
        shares = sparse.explained_shares(tokens.projected, rows.projected[nearest_rows[:, :width]])
        count = min(width + extra_count, self.unit_rows.shape[1] // 2, len(tokens.ids))
        return rows.ids[nearest_rows.numpy()], tokens.ids[shares.topk(count, dim=1).indices.numpy()]

    def _solve_seeds(self, seeds: Ids, width: int, margin: float) -> int:
        """Solves the clusters of these seeds. Returns how many were solved."""
        nearest_rows, candidates = self._shortlist(seeds, width)
        is_member, _ = sparse.eliminate(
            self.unit_tokens[torch.from_numpy(candidates)], self.unit_rows[torch.from_numpy(seeds)], self.relative_error
        )
        solved_count = 0
        for index, seed in enumerate(seeds):
            if self.is_free[seed]:
                solved_count += self._refine_cluster(
                    candidates[index][is_member[index].numpy()], nearest_rows[index], candidates[index], margin
                )
        return solved_count

    def _refine_cluster(self, tokens: Ids, nearest_rows: Ids, candidates: Ids, margin: float) -> bool:
        """Refines a first guess at the tokens of a cluster. Returns whether a cluster was proved and recorded."""
        nearest_rows = nearest_rows[self.is_free[nearest_rows]]
        for attempt in range(1 if self.is_exact else 3):
            tokens = self._free_among(tokens)
            if not 0 < len(tokens) <= self.unit_rows.shape[1] // 3:
                return False
            rows, ratio = self._rows_of(tokens, nearest_rows)
            better_half = rows[: 1 + self.alias_count * len(tokens) // 2]
            if ratio < margin and attempt == 0 and self._are_explained(better_half, tokens):
                rows, ratio = self._rows_of(tokens, self._explained_rows(tokens))  # perhaps a row is not a neighbour
            if ratio >= margin:
                return self._record_cluster(rows, tokens)
            refitted = self._tokens_of(rows, tokens, candidates, searches_all=attempt == 0)
            if set(refitted.tolist()) == set(tokens.tolist()):
                return False
            tokens = refitted
        return False

    def _free_among(self, tokens: Ids) -> Ids:
        """Returns the tokens of which at least one equal token is free."""
        return np.array([token for token in tokens if len(self.free_equals[token])], np.int64)

    def _are_explained(self, rows: Ids, tokens: Ids) -> bool:
        """Returns whether all of these rows lie in the span of the tokens, up to noise."""
        misfits = sparse.misfits(self.unit_rows[torch.from_numpy(rows)], self.unit_tokens[torch.from_numpy(tokens)])
        return bool((misfits <= (10 if self.is_exact else 2) * self.relative_error).all())

    def _explained_rows(self, tokens: Ids) -> Ids:
        """Returns the free rows that these tokens explain best, a few more than needed."""
        misfits = sparse.misfits(self.pool_rows.projected, self.projected_tokens[torch.from_numpy(tokens)])
        count = min(2 * self.alias_count * len(tokens) + 8, len(misfits))
        rows = self.pool_rows.ids[misfits.topk(count, largest=False).indices.numpy()]
        return rows[self.is_free[rows]]

    def _rows_of(self, tokens: Ids, candidates: Ids) -> tuple[Ids, float]:
        """Returns the candidate rows that these tokens explain best, and how many times worse the next row fits.

        There are `alias_count` rows for each token. Equal tokens may add rows, up to the number of them that are free.
        The ratio is 0 if even the best rows do not fit; with more noise than MAX_SKETCH_NOISE that is not tested.
        """
        misfits = sparse.misfits(
            self.unit_rows[torch.from_numpy(candidates)], self.unit_tokens[torch.from_numpy(tokens)]
        ).numpy()
        order = np.argsort(misfits, kind="stable")
        misfits = np.append(np.maximum(misfits[order], self.relative_error), 1.0)
        best_count, best_ratio = self.alias_count * len(tokens), 0.0
        max_count = min(self.alias_count * sum(len(self.free_equals[token]) for token in tokens), len(order))
        for count in range(self.alias_count * len(tokens), max_count + 1, self.alias_count):
            ratio = float(misfits[count] / misfits[count - 1])
            if ratio > best_ratio and (
                misfits[count - 1] <= 10 * self.relative_error or self.relative_error > MAX_SKETCH_NOISE
            ):
                best_count, best_ratio = count, ratio
        return candidates[order[:best_count]], best_ratio

    def _tokens_of(self, rows: Ids, tokens: Ids, candidates: Ids, searches_all: bool) -> Ids:
        """Returns the tokens that explain the rows' mean, which has less noise than a row.

        They are chosen from `tokens` and `candidates`, with `searches_all` from all free tokens.
        """
        pool = np.concatenate([candidates, tokens])
        if searches_all:
            mean = sparse.unit_rows(self.projected_rows[torch.from_numpy(rows)].mean(0))
            present = self.projected_tokens[torch.from_numpy(tokens)]
            added = sparse.best_additions(self.pool_tokens.projected, present, mean, 16)
            pool = np.concatenate([pool, self.pool_tokens.ids[added.numpy()]])
        pool = self._free_among(np.unique(pool))
        mean = sparse.unit_rows(self.unit_rows[torch.from_numpy(rows)].mean(0))
        noise_of_mean = self.relative_error / len(rows) ** 0.5
        is_member, _ = sparse.eliminate(self.unit_tokens[torch.from_numpy(pool)][None], mean[None], noise_of_mean)
        return pool[is_member[0].numpy()]

    def _record_cluster(self, rows: Ids, tokens: Ids) -> bool:
        """Records the cluster with its weights, split if it falls into several, and takes its rows and tokens out.

        Returns False, and records nothing, if the table is exact and a weight would be negative.
        """
        basis = self.public[torch.from_numpy(tokens)].double()
        solved = torch.linalg.lstsq(basis.T, self.scrambled[torch.from_numpy(rows)].double().T).solution.T.numpy()
        if self.is_exact and solved.min() < -1e-3:
            return False
        errors = sparse.weight_thresholds(basis, self.scrambled[torch.from_numpy(rows)], self.relative_error)
        for row_indices, token_indices in sparse.connected_parts(solved > errors):
            self.is_free[rows[row_indices]] = False
            block = solved[np.ix_(row_indices, token_indices)]
            members, weights = self._expand(len(row_indices), tokens[token_indices], block)
            self.clusters.append((rows[row_indices], members, weights))
        return True

    def _expand(self, row_count: int, tokens: Ids, weights: NDArray[np.float64]) -> tuple[Ids, NDArray[np.float64]]:
        """Returns the members of a cluster of `row_count` rows, and their weights (rows, members).

        If there are more rows than `tokens` need, tokens that equal them are members too, and share the weight of the
        first of them.
        """
        extra_count = row_count // self.alias_count - len(tokens)
        members, columns = [], []
        for column, token in enumerate(tokens):
            equals = self.free_equals[token][: 1 + max(0, extra_count)]
            self.free_equals[token] = self.free_equals[token][len(equals) :]
            extra_count -= len(equals) - 1
            members.append(equals)
            columns.append(np.repeat(weights[:, column : column + 1] / len(equals), len(equals), axis=1))
        return np.concatenate(members), np.concatenate(columns, axis=1)


@dataclass(frozen=True)
class ClusterSolve(Solver):
    """Finds the tokens of each cluster, and the weights that mixed them, by sparse linear equations.

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
    cost = Cost(per_1000_rows=0.57)
    recovers_ids = True
    paper = papers.unpublished_method("Mixtures have one sparse solution")
    sees = frozenset({Weights})
    assumes = frozenset({"public_model"})

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        """Returns a group for each solved cluster, all orders equally likely, and groups of the other rows by cosine.

        A group has weights unless its rows equal public ones or were not solved. Noise may make a weight negative.
        """
        features = _features(transcript.model, require_known(knowledge.public_model), self.head)
        counts = transcript.id_counts
        counts = counts if counts.any() else np.ones_like(counts)  # if nothing crossed, all rows count alike
        search = ClusterSearch(*features, counts, self, knowledge.alias_count, rng)
        search.take_out_equal_rows()
        search.measure_error()
        budget.spend(work.elements(5.0 * (search.scrambled.numel() + search.public.numel())))
        for width, margin in search.stages():
            search.sweep(width, margin, budget)
        return _candidates(search, budget)

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        scrambled, public = transcript.model, require_known(knowledge.public_model)
        if knowledge.has_shared_ids:
            return "all rows of a cluster are one, its mean: mean-solve finds its tokens"
        public_shape, scrambled_shape = (public.vocab_size, public.width), (scrambled.vocab_size, scrambled.width)
        max_size = knowledge.alias_count * public.vocab_size
        is_compatible = scrambled.width == public.width and public.vocab_size <= scrambled.vocab_size <= max_size
        return None if is_compatible else f"the public table is {public_shape}, the one seen {scrambled_shape}"


def _features(scrambled: Model, public: Model, uses_head: bool) -> tuple[Tensor, Tensor]:
    """Returns (n, d) of both models, or (n, 2 d) with an untied head beside the table, at the table's scale."""
    table, original = scrambled.table, public.table
    if (
        uses_head
        and scrambled.head is not None
        and public.head is not None
        and scrambled.head.shape[1] == public.head.shape[1]
    ):
        scale = original.norm() / public.head.norm().clamp_min(1e-30)
        return torch.cat([table, scrambled.head * scale], 1), torch.cat([original, public.head * scale], 1)
    return table, original


def most_frequent_first(rows: Ids, counts: Ids) -> Ids:
    """Returns the rows by how often their ids crossed, which `counts` (n',) says. Equal ones keep their order."""
    return rows[np.argsort(-counts[rows], kind="stable")]


def _candidates(search: ClusterSearch, budget: Budget) -> Candidates:
    """Returns the clusters that were solved, and groups of the other rows."""
    groups = [Group(rows, members, weights) for rows, members, weights in search.clusters]
    pairs = [(group, np.zeros((len(group.rows), len(group.members)))) for group in groups]
    pairs += _unsolved_groups(search, np.flatnonzero(search.is_free), budget) if search.is_free.any() else []
    return Candidates(tuple(group for group, _ in pairs), tuple(log_likelihood for _, log_likelihood in pairs))


def _unsolved_groups(search: ClusterSearch, rows: Ids, budget: Budget) -> Iterator[tuple[Group, NDArray[np.float64]]]:
    """Yields groups of the rows that were not solved, with log-likelihoods by cosine.

    It is one group, or if that would be too large, a group for each row with its nearest tokens. In a table of tens of
    thousands of rows this takes as long as the search. So once the budget is spent, only rows whose ids crossed have a
    group.
    """
    assigned_tokens = [
        members
        for cluster_rows, members, weights in search.clusters
        if weights is not None or len(cluster_rows) >= len(members)
    ]
    unassigned = np.setdiff1d(
        np.arange(len(search.unit_tokens)), np.concatenate([*assigned_tokens, np.empty(0, np.int64)])
    )
    if not len(unassigned):
        unassigned = np.arange(len(search.unit_tokens))
    tokens = search.unit_tokens[torch.from_numpy(unassigned)]
    if len(rows) * len(unassigned) <= MAX_UNSOLVED_CELLS:
        yield (
            Group(rows, unassigned),
            sparse.log_softmax(search.unit_rows[torch.from_numpy(rows)] @ tokens.T / UNSOLVED_TEMPERATURE).numpy(),
        )
        return
    rows = most_frequent_first(rows, search.counts)
    for block in np.array_split(rows, 1 + len(rows) // UNSOLVED_BLOCK_ROWS):
        if budget.left() <= 0 and not search.counts[block[0]]:
            return
        scores = search.unit_rows[torch.from_numpy(block)] @ tokens.T / UNSOLVED_TEMPERATURE
        best = scores.topk(min(UNSOLVED_TOKENS, len(unassigned)), dim=1)
        log_likelihoods = (best.values - scores.logsumexp(1, keepdim=True)).double()
        budget.spend(work.comparisons(search.unit_rows[: len(block)], tokens))
        for row, nearest, log_likelihood in zip(block, best.indices.numpy(), log_likelihoods.numpy(), strict=True):
            yield Group(np.array([row]), unassigned[nearest]), log_likelihood[None]
