"""EmbedCluster, Algorithm 1 of ObfusLM (appendix B): clusters of similar rows, and how small ones are merged.

Out of scope: noise, keys, schemes. Deviations 1 to 3 of obfuslm.py are made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.progress import Progress
from milkglass.schemes.mixture import Ids

Leftover = Literal["merge", "paper"]  # what becomes of clusters smaller than k

BLOCK_BYTES = 64 << 20  # similarities held at a time
DECIMALS = 10  # cosines are compared to ten decimals, so that ties fall to the lower index on every machine


def unit_rows(table: torch.Tensor, rows: Ids, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows scaled to length 1, a zero row to zero; arithmetic in `dtype`, not in the checkpoint's."""
    return torch.nn.functional.normalize(table[torch.from_numpy(rows)].to(dtype), dim=1, eps=1e-30)


def reach(n: int, beta: float) -> int:
    """How many of n similarities reach their beta-quantile (NumPy's, linear), ties aside. The product is rounded, so
    that 0.9 * 10 is 9."""
    return n - int(np.ceil(round(beta * (n - 1), 9)))


def zero_rows(table: torch.Tensor) -> NDArray[np.bool_]:
    """Rows with no direction, hence no cosine (padding rows, in most models)."""
    step = max(1, BLOCK_BYTES // (4 * table.shape[1]))
    parts = [(table[at : at + step] != 0).any(dim=1).logical_not() for at in range(0, len(table), step)]
    return torch.cat(parts).numpy()


def embed_cluster(table: torch.Tensor, order: Ids, k: int, beta: float, progress: Progress | None = None) -> list[Ids]:
    """Algorithm 1 on the rows `order` of `table` (n, d), visited in that order; ties fall to the one visited first.

    Only rows of unassigned seeds are needed, and of those only the best 1 - beta of the similarities, so blocks of
    seeds meet the table in blocks of columns and the n x n matrix never exists.
    """
    n = len(order)
    above = reach(n, beta)
    keep = min(n, above + 1 + max(32, k))  # one more for the quantile's interpolation, and a margin for fp32
    free = np.ones(n, dtype=bool)  # by position in order, as all indices below
    clusters: list[Ids] = []
    at = 0
    width = max(8, min(192, BLOCK_BYTES // (8 * n)))
    similarities = _Similarities.of(table, order)
    while at < n:
        seeds = at + np.flatnonzero(free[at : at + 16 * width])[:width]
        if not len(seeds):
            at = min(n, at + 16 * width)
            continue
        values, places = similarities.nearest(seeds, keep)
        for row, seed in enumerate(seeds):
            if free[seed]:
                near = _Row(table, order, int(seed), places[row], values[row], above, beta)
                free[seed] = False
                members = near.first_free(free, k - 1)
                free[members] = False
                clusters.append(order[np.concatenate([[seed], members]).astype(np.int64)])
                if progress:
                    progress(1 + len(members))
        at = int(seeds[-1]) + 1
    return clusters


@dataclass(frozen=True)
class _Similarities:
    """Rows of D for blocks of seeds, against the table as it lies: nothing of its size is copied or kept."""

    table: torch.Tensor
    order: Ids
    scale: torch.Tensor  # (n,) one over each row's length
    place: Ids  # (n,) where a row comes in the order, -1 outside

    @classmethod
    def of(cls, table: torch.Tensor, order: Ids) -> _Similarities:
        step = max(1, BLOCK_BYTES // (4 * table.shape[1]))
        lengths = torch.cat([table[at : at + step].float().norm(dim=1) for at in range(0, len(table), step)])
        place = np.full(len(table), -1, np.int64)
        place[order] = np.arange(len(order))
        return cls(table, order, lengths.clamp_min(1e-30).reciprocal(), place)

    def nearest(self, seeds: Ids, keep: int) -> tuple[NDArray[np.float32], Ids]:
        """fp32 cosines of each seed with its `keep` nearest rows, descending, and their places in the order."""
        queries = unit_rows(self.table, self.order[seeds])
        step = max(1, BLOCK_BYTES // (4 * self.table.shape[1]))
        similar = torch.empty(len(seeds), len(self.table))
        for start in range(0, len(self.table), step):
            torch.mm(queries, self.table[start : start + step].float().T, out=similar[:, start : start + step])
        similar *= self.scale
        similar[:, torch.from_numpy(self.place < 0)] = -2
        values, rows = similar.topk(keep, dim=1)
        return values.numpy(), self.place[rows.numpy()]


@dataclass
class _Row:
    """One seed's row of D: exact cosines of its candidates, and the threshold gamma, computed when they are needed."""

    table: torch.Tensor
    order: Ids
    seed: int
    places: NDArray[np.int64]
    rough: NDArray[np.float32]
    above: int
    beta: float

    SLACK: ClassVar[float] = 1e-5  # fp32 cosines of up to 8192 dimensions are off by less

    def first_free(self, free: NDArray[np.bool_], count: int) -> Ids:
        """The `count` most similar unassigned candidates that reach gamma, most similar first.

        Decided from the fp32 cosines wherever these cannot mislead; exact ones are computed for what is chosen.
        """
        if count == 0:
            return np.empty(0, np.int64)
        low, high = self.rough[min(self.above, len(self.rough) - 1)], self.rough[self.above - 1]  # gamma lies between
        candidates = np.flatnonzero(free[self.places])
        rough = self.rough[candidates]
        sure = int((rough > high + 2 * self.SLACK).sum())
        if sure >= count:
            gaps = np.flatnonzero(rough[count - 1 : sure - 1] - rough[count:sure] > self.SLACK)
            if len(gaps):  # a place to cut where fp32 tells the two sides apart
                return self._exact_order(self.places[candidates[: count + int(gaps[0])]])[0][:count]
        doubtful = int((rough >= low - 2 * self.SLACK).sum()) - sure
        if not doubtful and self.rough[-1] < low - 2 * self.SLACK:
            return self._exact_order(self.places[candidates[:sure]])[0][:count]
        return self._carefully(free, count)

    def _carefully(self, free: NDArray[np.bool_], count: int) -> Ids:
        """The same from exact cosines: of the nearest ones, or of the whole row where duplicates crowd the margin."""
        crowded = self.rough[min(self.above, len(self.rough) - 1)] - self.rough[-1] <= self.SLACK
        everything = crowded and len(self.places) < len(self.order)
        places, cosines = self._exact_order(np.arange(len(self.order)) if everything else self.places)
        n = len(self.order)
        at = n - 1 - self.beta * (n - 1)  # the quantile's place, counted from the largest
        low = int(np.floor(at))
        high = min(low + 1, len(cosines) - 1)
        gamma = round(float(cosines[low] + (at - low) * (cosines[high] - cosines[low])), DECIMALS)
        selected = places[free[places] & (np.round(cosines, DECIMALS) >= gamma)]
        return selected[:count]

    def _exact_order(self, places: Ids) -> tuple[Ids, NDArray[np.float64]]:
        """Places and fp64 cosines, most similar first; ties by place."""
        rows = self.table[torch.from_numpy(self.order[np.append(places, self.seed)])].double().numpy()
        lengths = np.maximum(np.sqrt(np.einsum("ij,ij->i", rows, rows)), 1e-30)
        cosines = np.round(rows[:-1] @ (rows[-1] / lengths[-1]) / lengths[:-1], DECIMALS)
        by = np.lexsort((places, -cosines))
        return places[by], cosines[by]


def merge_small(table: torch.Tensor, clusters: list[Ids], k: int) -> list[Ids]:
    """Join each cluster smaller than k, in order, to the one whose mean direction is nearest, below 2k tokens in all.

    The bound matters: without it the mean of a grown cluster draws every outlier (SmolLM2 had one of 3,077 tokens,
    which all become similar to their common mean). Only where nothing fits below 2k does the nearest one grow further.
    """
    merged = list(clusters)
    means = torch.stack([unit_rows(table, c).mean(0) for c in merged])
    lengths = means.norm(dim=1).clamp_min(1e-30)
    sizes = torch.tensor([len(cluster) for cluster in merged])  # 0 once it has joined another
    for i in range(len(merged)):
        size = int(sizes[i])
        others = sizes > 0
        others[i] = False
        if size >= k or not others.any():
            continue
        fits = others & (sizes + size < 2 * k)
        cosines = (means @ (means[i] / lengths[i])) / lengths
        j = int(cosines.masked_fill_(~(fits if fits.any() else others), -2).argmax())
        means[j] = means[i].lerp(means[j], float(sizes[j] / (sizes[j] + size)))
        lengths[j] = means[j].norm().clamp_min(1e-30)
        merged[j] = np.concatenate([merged[j], merged[i]])
        sizes[j], sizes[i] = len(merged[j]), 0
    return [cluster for cluster, size in zip(merged, sizes.tolist(), strict=True) if size]
