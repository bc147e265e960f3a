"""Releases a choice, by report-noisy-max or by the exponential mechanism, over integers.

Report-noisy-max: scores in [0, 1] are cut to a grid, where two scores of a candidate still differ by at most 1, and an
exact rounded Laplacian is added to each (rounded.py). Given all other sums, a candidate wins if its own noise reaches
an integer threshold, which moves by at most two sensitivities between neighbours; so the guarantee is that of the real
mechanism. Ties go to the first candidate, by a rule that does not depend on the input.

Exponential mechanism: weights are whole numbers from ceil(2^44 exp(-epsilon / 2)) + 1 to 2^44, and a number below their
sum is drawn exactly. For two inputs the weights of a candidate differ by a factor of at most exp(epsilon / 2), so do
the sums, and no rounding is left over.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from milkglass.noise import rounded
from milkglass.noise.grid import step_size
from milkglass.noise.stream import Stream

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

BEST_WEIGHT = 1 << 44  # the weight of the best candidate; 2^18 of them can be added
NO_CANDIDATE = -(1 << 62)  # the noisy score after a list's end


def noisy_max(scores: Floats, scale: float, stream: Stream) -> Integers:
    """Returns (t,) the column of the largest noisy score of each row.

    Args:
        scores: (t, k) in [0, 1], and -inf after a list's end.
        scale: the scale of the Laplace noise.
        stream: the source of the noise.
    """
    step = min(1.0, step_size(scale))
    is_candidate = ~np.isneginf(scores)
    grid_scores = np.trunc(np.where(is_candidate, scores, 0) / step).astype(np.int64)
    noise = rounded.laplace(stream, scores.size, scale / step).reshape(scores.shape)
    return np.where(is_candidate, grid_scores + noise, NO_CANDIDATE).argmax(1)


def cumulative_weights(scores: Floats, epsilon: float) -> Integers:
    """Returns (m, k) the running sums of the integer weights of each row's candidates.

    Args:
        scores: (m, k) in [0, 1], and -inf after a list's end.
        epsilon: the privacy parameter of one choice.

    Raises:
        ValueError: a row is so long that its sum could overflow.
    """
    if scores.shape[1] > 1 << 18:
        raise ValueError(f"{scores.shape[1]} candidates, at most {1 << 18} are supported")
    min_weight = min(BEST_WEIGHT, math.ceil(BEST_WEIGHT * math.exp(-epsilon / 2)) + 1)
    weights = np.ceil(BEST_WEIGHT * np.exp(epsilon / 2 * (scores - 1))).clip(min_weight, BEST_WEIGHT).astype(np.int64)
    return np.cumsum(np.where(np.isneginf(scores), 0, weights), 1)


def choose(cumulative: Integers, stream: Stream) -> Integers:
    """Draws a column of each row in proportion to its weight.

    Args:
        cumulative: (t, k) the running sums of the weights, from `cumulative_weights`.
        stream: the source of the draws.

    Returns:
        (t,) the columns.
    """
    drawn = stream.below(cumulative[:, -1])
    return (drawn[:, None] >= cumulative).sum(1)
