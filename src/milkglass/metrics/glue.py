"""Computes the measures of GLUE's tasks (Wang et al. 2019), TweetEval's macro recall, and macro F1.

All take guesses and truth (u,), one label or score for each of u examples, and return a value between -1 and 1 with its
bootstrap interval. All raise UsageError for guesses and truth of different shapes. A measure that does not exist (a
correlation with a constant) is nan, except Matthews', which is then 0 as in GLUE's own program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.metrics.interval import Interval, bootstrap, proportion, quotients, ratio

Values = NDArray[Any]  # (u,) a label or a score of each example


def accuracy(guess: Values, truth: Values, rng: np.random.Generator) -> Interval:
    """Returns the share of examples that are guessed right."""
    _require_same_shape(guess, truth)
    return proportion(guess == truth, rng)


def f1(guess: Values, truth: Values, rng: np.random.Generator) -> Interval:
    """Returns F1 of class 1; nan if neither guesses nor truth contain this class."""
    hits, is_guessed, is_true = _class_1_masks(guess, truth)
    return ratio(2 * hits, is_guessed + is_true, rng)


def precision(guess: Values, truth: Values, rng: np.random.Generator) -> Interval:
    """Returns the share of the examples guessed as class 1 that are of it; nan if there are none."""
    hits, is_guessed, _ = _class_1_masks(guess, truth)
    return ratio(hits, is_guessed, rng)


def recall(guess: Values, truth: Values, rng: np.random.Generator) -> Interval:
    """Returns the share of class 1's examples that are guessed as it; nan if there are none."""
    hits, _, is_true = _class_1_masks(guess, truth)
    return ratio(hits, is_true, rng)


def _class_1_masks(guess: Values, truth: Values) -> NDArray[np.float64]:
    """Returns (3, u) 0 or 1: which examples are hits of class 1, are guessed as it, and are of it."""
    _require_same_shape(guess, truth)
    return np.stack([(guess == 1) & (truth == 1), guess == 1, truth == 1]).astype(np.float64)


def macro_f1(guess: Values, truth: Values, rng: np.random.Generator) -> Interval:
    """Returns the mean of F1 over the classes that occur in the truth. A class that no guess names counts as 0."""
    return _mean_over_classes(guess, truth, rng, lambda hits, is_guessed, is_true: (2 * hits, is_guessed + is_true))


def macro_recall(guess: Values, truth: Values, rng: np.random.Generator) -> Interval:
    """Returns the mean of recall over the classes that occur in the truth."""
    return _mean_over_classes(guess, truth, rng, lambda hits, is_guessed, is_true: (hits, is_true))


def _mean_over_classes(
    guess: Values, truth: Values, rng: np.random.Generator,
    summands: Callable[[Values, Values, Values], tuple[Values, Values]],
) -> Interval:  # fmt: skip
    """Returns the mean of a ratio of sums over the classes that occur in the truth.

    Args:
        summands: returns the numerators and denominators (u, c) that are summed over the examples, from three masks
            (u, c): which examples are hits of each class, are guessed as it, and are of it.
    """
    _require_same_shape(guess, truth)
    classes = np.unique(truth)
    is_true, is_guessed = ((labels[:, None] == classes).astype(np.float64) for labels in (truth, guess))
    numerators, denominators = summands(is_true * is_guessed, is_guessed, is_true)

    def statistic(counts: NDArray[np.float64]) -> NDArray[np.float64]:
        by_class = np.where(counts @ is_true > 0, quotients(counts @ numerators, counts @ denominators), np.nan)
        return np.asarray(np.nanmean(by_class, axis=1))  # if a draw lacks a rare class, it is the mean of the others

    return bootstrap(statistic, len(truth), rng)


def matthews(guess: Values, truth: Values, rng: np.random.Generator) -> Interval:
    """Returns Matthews' correlation, for any number of classes (Gorodkin 2004)."""
    _require_same_shape(guess, truth)
    classes = np.unique(np.concatenate([guess, truth]))
    is_guessed = (guess[:, None] == classes).astype(np.float64)  # (u, c)
    is_true = (truth[:, None] == classes).astype(np.float64)
    is_right = (guess == truth).astype(np.float64)

    def statistic(counts: NDArray[np.float64]) -> NDArray[np.float64]:
        total = counts.sum(1)
        guess_counts, true_counts = counts @ is_guessed, counts @ is_true
        numerator = counts @ is_right * total - (guess_counts * true_counts).sum(1)
        guess_spread, true_spread = (
            total**2 - (class_counts**2).sum(1) for class_counts in (guess_counts, true_counts)
        )
        denominator = np.sqrt(guess_spread * true_spread)
        return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)

    return bootstrap(statistic, len(truth), rng)


def pearson(guess: Values, truth: Values, rng: np.random.Generator) -> Interval:
    """Returns Pearson's correlation; nan if either side is constant."""
    _require_same_shape(guess, truth)
    x, y = (np.asarray(values, np.float64) for values in (guess, truth))
    if not len(x):
        return bootstrap(lambda counts: counts[:, 0], 0, rng)
    x, y = x - x.mean(), y - y.mean()  # moments about the mean: raw ones cancel
    moments = np.stack([x, y, x * x, y * y, x * y], 1)

    def statistic(counts: NDArray[np.float64]) -> NDArray[np.float64]:
        mean_x, mean_y, mean_xx, mean_yy, mean_xy = (counts @ moments / counts.sum(1, keepdims=True)).T
        denominator = np.sqrt(np.maximum(mean_xx - mean_x**2, 0) * np.maximum(mean_yy - mean_y**2, 0))
        # A smaller one is the rounding error of a constant
        exists = denominator > 1e-12 * np.sqrt(mean_xx.max() * mean_yy.max() + 1e-300)
        return np.divide(mean_xy - mean_x * mean_y, denominator, out=np.full(len(denominator), np.nan), where=exists)

    return bootstrap(statistic, len(x), rng)


def spearman(guess: Values, truth: Values, rng: np.random.Generator) -> Interval:
    """Returns Pearson's correlation of the ranks. Ties get their mean rank, and each draw is ranked again."""
    _require_same_shape(guess, truth)
    x, y = (np.unique(values, return_inverse=True)[1] for values in (guess, truth))  # (u,) which distinct value

    def statistic(counts: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([_correlation(_ranks(x, weights), _ranks(y, weights), weights) for weights in counts])

    return bootstrap(statistic, len(truth), rng)


def _ranks(value_indices: NDArray[np.intp], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns (u,) mean ranks, if example i occurs weights[i] times and has the distinct value value_indices[i]."""
    weight_of_value = np.bincount(value_indices, weights)
    return (np.cumsum(weight_of_value) - (weight_of_value - 1) / 2)[value_indices]


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Returns Pearson's correlation if example i occurs weights[i] times; nan if a side is constant."""
    total = weights.sum()
    x, y = x - weights @ x / total, y - weights @ y / total
    denominator = float((weights @ x**2) * (weights @ y**2)) ** 0.5
    return float(weights @ (x * y)) / denominator if denominator > 1e-9 else float("nan")


def _require_same_shape(guess: Values, truth: Values) -> None:
    """Raises UsageError unless both are (u,)."""
    if guess.shape != truth.shape or guess.ndim != 1:
        raise UsageError(f"guesses of shape {guess.shape} for truth of shape {truth.shape}", "give one an example")


Measure = Callable[[Values, Values, np.random.Generator], Interval]
MEASURES: Mapping[str, Measure] = {
    "accuracy": accuracy,
    "f1": f1,
    "precision": precision,
    "recall": recall,
    "macro recall": macro_recall,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
