"""How good a way's answers to the held-out rows are, and whether they are better than those of another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.compare.answers import split_losses
from milkglass.compare.chat_rows import CHAT_TASK
from milkglass.compare.result import Difference
from milkglass.compare.rows import ComparisonRows
from milkglass.metrics.glue import pearson
from milkglass.metrics.interval import BOOTSTRAP_DRAWS, CONFIDENCE_LEVEL, UNDEFINED, Interval
from milkglass.metrics.text import mean_loss

SWAPS = 1999  # random draws of a randomization test
MAX_NUMBERS = 4_000_000  # of the draws that are held at a time

Measure = Callable[[NDArray[np.int64]], NDArray[np.float64]]  # takes (b, n) indices of rows, returns (b,) qualities


def quality_of(rows: ComparisonRows, answers: NDArray[Any]) -> Interval:
    """Returns the accuracy, Pearson's correlation or the loss of a token, with a 95 % interval over the rows."""
    rng = np.random.default_rng(0)
    if rows.task == CHAT_TASK:
        return mean_loss(*split_losses(answers), rng)
    truth = np.asarray(rows.held_out.labels)
    return pearson(answers, truth, rng) if rows.task == "regression" else _accuracy(answers == truth)


def _accuracy(is_right: NDArray[np.bool_]) -> Interval:
    """Returns the share of right answers with Wilson's interval (1927), which holds for few rows and near 0 and 1."""
    from scipy.stats import binomtest

    if not (count := len(is_right)):
        return UNDEFINED
    right_count = int(is_right.sum())
    ends = binomtest(right_count, count).proportion_ci(CONFIDENCE_LEVEL, method="wilson")
    return Interval(right_count / count, float(ends.low), float(ends.high), count)


def difference_of(rows: ComparisonRows, answers: NDArray[Any], other_answers: NDArray[Any]) -> Difference:
    """Returns the quality of answers minus that of other answers to the same rows; of losses, below 0 is better.

    The interval resamples rows. If every row has the same difference of right answers, it is widened by the exact
    binomial bound over rows. The p-value is that of the exact sign test of the rows that only one of both has right
    (McNemar 1947), or of a randomization test that swaps both ways' answers to random rows (Fisher 1935).
    """
    if rows.task == CHAT_TASK:
        return _difference(_mean_loss_of(answers, other_answers), len(split_losses(answers)[0]))
    truth = np.asarray(rows.held_out.labels)
    if rows.task == "regression":
        return _difference(_correlation_of(answers, other_answers, truth), len(truth))
    is_right, is_other_right = answers == truth, other_answers == truth
    both = np.concatenate([is_right, is_other_right]).astype(np.float64)
    p_value = sign_test(int((is_right & ~is_other_right).sum()), int((~is_right & is_other_right).sum()))
    found = _difference(lambda indices: both[indices].mean(-1), len(truth), p_value)
    if found.low < found.high or not len(truth):
        return found
    width = 1 - ((1 - CONFIDENCE_LEVEL) / 2) ** (1 / len(truth))  # equal rows promise no certainty
    return replace(found, low=max(-1.0, found.value - width), high=min(1.0, found.value + width))


def sign_test(wins: int, losses: int) -> float:
    """Returns the two-sided p-value of so many wins and losses, each as likely as the other."""
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def _mean_loss_of(answers: NDArray[Any], other_answers: NDArray[Any]) -> Measure:
    pairs = zip(split_losses(answers), split_losses(other_answers), strict=True)
    losses, tokens = (np.concatenate(pair) for pair in pairs)
    return lambda indices: losses[indices].sum(-1) / tokens[indices].sum(-1)


def _correlation_of(answers: NDArray[Any], other_answers: NDArray[Any], truth: NDArray[Any]) -> Measure:
    """Measures Pearson's correlation. Answers that are all the same have 0, as those of chance do.

    Both ways' answers are standardised, which changes no correlation: ways answer in units of their own, and a swap of
    rows between two units would be no swap of equals.
    """
    both = np.concatenate([_standardised(answers), _standardised(other_answers)])
    truth_twice = np.concatenate([truth, truth])

    def correlation(indices: NDArray[np.int64]) -> NDArray[np.float64]:
        x, y = (values[indices] - values[indices].mean(-1, keepdims=True) for values in (both, truth_twice))
        norms = np.sqrt(np.maximum((x * x).sum(-1) * (y * y).sum(-1), 1e-24))
        return np.asarray((x * y).sum(-1) / norms)

    return correlation


def _standardised(answers: NDArray[Any]) -> NDArray[np.float64]:
    """Returns answers with mean 0 and variance 1; zeros for answers that are all the same."""
    centred = np.asarray(answers, np.float64) - np.mean(answers)
    scale = float(np.std(centred))
    return np.asarray(centred / scale if scale > 1e-12 * float(np.abs(answers).max(initial=1.0)) else 0 * centred)


def _difference(measure: Measure, row_count: int, p_value: float | None = None) -> Difference:
    """Returns the difference of two ways.

    Args:
        measure: takes indices of rows: 0 to row_count - 1 for the first way; those of the other one follow.
        p_value: the p-value. None: that of a randomization test.
    """
    from scipy.stats import bootstrap, permutation_test

    if not row_count:
        return Difference(UNDEFINED.value, UNDEFINED.low, UNDEFINED.high, 0, 1.0)
    first, batch = np.arange(row_count), max(1, MAX_NUMBERS // row_count)

    def gap(indices: NDArray[np.int64], axis: int = -1) -> NDArray[np.float64]:
        return measure(indices) - measure(indices + row_count)

    value = float(gap(first[None])[0])
    if not math.isfinite(value):
        return Difference(value, math.nan, math.nan, row_count, 1.0)
    drawn = bootstrap(
        (first,), gap, n_resamples=BOOTSTRAP_DRAWS, confidence_level=CONFIDENCE_LEVEL, method="percentile",
        vectorized=True, batch=batch, rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    if p_value is None:
        p_value = permutation_test(
            (first, first + row_count), lambda one, other, axis: measure(one) - measure(other),
            permutation_type="samples", vectorized=True, n_resamples=SWAPS, batch=batch, axis=-1,
            rng=np.random.default_rng(0),
        ).pvalue  # fmt: skip
    return Difference(value, float(drawn.low), float(drawn.high), row_count, float(p_value))
