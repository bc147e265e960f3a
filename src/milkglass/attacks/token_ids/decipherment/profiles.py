"""Predicts which neighbours a token has from its embedding.

The attacker's text contains a rare token a few times or never. But the public model knows it: tokens with similar
embeddings have similar neighbours. Inside a group of near neighbours, the direction in which two tokens differ still
separates a plural from a singular or a name from a noun. So all neighbours are put into classes, and for every token of
the public text it is counted how often each class comes next. The shares (their square roots, in which Hellinger's
distance is Euclid's, so that rare classes count as much as common ones) are regressed on the embeddings, by ridge
regression in closed form. The predicted shares serve as `weight` pseudo-counts.

A class is a union of groups of candidates, so the class of a scrambled neighbour is certain. The groups with most
running tokens are classes of their own; the others are merged by their mean embeddings (k-means). Only public text and
the public table are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.attacks.token_ids.decipherment.bigrams import Bigrams, Floats, PublicBigrams, summed
from milkglass.attacks.token_ids.decipherment.block_assignment import BlockAssignment
from milkglass.sequences import Ids

MAX_WEIGHT_COUNT = 50.0  # a token seen more often than this weighs no more in the regression
MIN_RELATIVE_SHARE = 0.05  # predicted shares are never below this part of a class' mean share
ROUNDS = 10  # of k-means


@dataclass(frozen=True)
class Profiles:
    """How profiles of neighbours are predicted from embeddings.

    Attributes:
        alone: the number of classes of one group.
        together: the number of classes of the other groups.
        weight: pseudo-counts of a predicted profile.
        ridge: relative to the mean variance of the embeddings.
        distances: at which neighbours are predicted.
    """

    alone: int = 200
    together: int = 50
    weight: float = 100.0
    ridge: float = 0.3
    distances: tuple[int, ...] = (1, 2)

    def ratios(
        self, table: torch.Tensor, blocks: BlockAssignment, public: PublicBigrams
    ) -> dict[tuple[int, int], Ratios]:
        """Returns the ratios by distance and side (0: what follows, 1: what precedes)."""
        unit = torch.nn.functional.normalize(table.float(), dim=1).numpy().astype(np.float64)
        classes = self._classes(unit, blocks, public)
        result = {}
        for distance in self.distances:
            for side in (0, 1):
                counts = _counted(public.bigrams[distance], side, blocks, classes, len(unit))
                result[distance, side] = Ratios(self._mixed(unit, counts), classes)
        return result

    def _classes(self, unit: Floats, blocks: BlockAssignment, public: PublicBigrams) -> Ids:
        """Returns (groups,) the class of each group."""
        groups = len(blocks.first_column)
        mass = summed(blocks.column_group, public.share[blocks.column_member], groups)
        order = np.argsort(-mass, kind="stable")
        classes = np.empty(groups, np.int64)
        alone, rest = order[: self.alone], order[self.alone :]
        classes[alone] = np.arange(len(alone))
        means = np.zeros((groups, unit.shape[1]))
        np.add.at(means, blocks.column_group, unit[blocks.column_member])
        classes[rest] = len(alone) + _k_means(means[rest], self.together)
        return classes

    def _mixed(self, unit: Floats, counts: Floats) -> NDArray[np.float32]:
        """Returns (n, classes) counted and predicted shares combined, over each class's share of all."""
        total = counts.sum(1)
        common = (counts.sum(0) + 0.5) / (counts.sum() + 0.5 * counts.shape[1])
        seen = np.flatnonzero(total)
        if not len(seen):
            return np.ones(counts.shape, np.float32)
        weight = np.minimum(total[seen], MAX_WEIGHT_COUNT)[:, None]
        roots = np.sqrt(counts[seen] / total[seen][:, None])
        x_mean, y_mean = (weight * unit[seen]).sum(0) / weight.sum(), (weight * roots).sum(0) / weight.sum()
        x = unit[seen] - x_mean
        square = x.T @ (x * weight)
        square[np.diag_indices(len(square))] += self.ridge * max(np.trace(square) / len(square), 1e-12)
        slopes = np.linalg.solve(square, x.T @ ((roots - y_mean) * weight))
        predicted = np.maximum((unit - x_mean) @ slopes + y_mean, 0) ** 2
        predicted = np.maximum(predicted, MIN_RELATIVE_SHARE * common)
        return ((counts + self.weight * predicted) / (total[:, None] + self.weight) / common).astype(np.float32)


@dataclass(frozen=True)
class Ratios:
    """The profiles of all tokens at one distance and side.

    Attributes:
        values: (n, classes) how much likelier a class is next to a token than anywhere.
        classes: (groups,) the class of each group.
    """

    values: NDArray[np.float32]
    classes: Ids

    def at(self, members: Ids, groups: Ids) -> NDArray[np.float32]:
        """Returns the ratio of each member next to its group."""
        return self.values[members, self.classes[groups]]


def _counted(bigrams: Bigrams, side: int, blocks: BlockAssignment, classes: Ids, size: int) -> Floats:
    """Returns (n, classes) how often each class is next to each token."""
    of = np.full(size, -1, np.int64)
    of[blocks.column_member] = classes[blocks.column_group]  # in several groups: the last one's
    token, neighbour = (bigrams.left, bigrams.right) if side == 0 else (bigrams.right, bigrams.left)
    known = of[neighbour] >= 0
    width = int(classes.max()) + 1
    keys = token[known] * width + of[neighbour[known]]
    return summed(keys, bigrams.count[known], size * width).reshape(size, width)


def _k_means(vectors: Floats, k: int) -> Ids:
    """Returns the classes by spherical k-means from evenly spaced seeds. It is deterministic."""
    if len(vectors) <= k:
        return np.arange(len(vectors))
    x = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    centres = x[np.linspace(0, len(x) - 1, k).astype(np.int64)]
    for _ in range(ROUNDS):
        nearest = (x @ centres.T).argmax(1)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, x)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        centres = np.where(lengths > 0, sums / np.maximum(lengths, 1e-30), centres)
    return (x @ centres.T).argmax(1).astype(np.int64)
