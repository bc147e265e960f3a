"""GLUE's measures, perplexity and ROUGE against answers worked out by hand, and against SciPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from milkglass.errors import UsageError
from milkglass.metrics import glue, text
from milkglass.metrics.interval import bootstrap

TRUTH = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
GUESS = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0])  # 3 hits, 1 missed, 1 false alarm, 5 rightly left


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy", 8 / 10),
        ("f1", 2 * 3 / (2 * 3 + 1 + 1)),
        ("matthews", (3 * 5 - 1 * 1) / math.sqrt(4 * 4 * 6 * 6)),
        ("macro recall", (3 / 4 + 5 / 6) / 2),
    ],
)
def test_known_answers(name: str, value: float) -> None:
    found = glue.MEASURES[name](GUESS, TRUTH, rng())
    assert found.value == pytest.approx(value, abs=1e-12)
    assert found.low < value < found.high
    assert found.low >= (-1 if name == "matthews" else 0)


def test_matthews_of_three_classes() -> None:
    truth, guess = np.array([0, 1, 2, 2, 0]), np.array([0, 2, 2, 1, 0])
    # 3 right of 5; 5 * 3 - (2*2 + 1*1 + 2*2) over sqrt((25 - 9) * (25 - 9))
    assert glue.matthews(guess, truth, rng()).value == pytest.approx((15 - 9) / 16)


def test_always_one_class_has_no_correlation_and_matthews_is_zero() -> None:
    assert glue.matthews(np.zeros(10, int), TRUTH, rng()).value == 0
    assert math.isnan(glue.pearson(np.full(10, 0.3), TRUTH, rng()).value)
    assert math.isnan(glue.spearman(np.full(10, 0.3), TRUTH, rng()).value)
    assert math.isnan(glue.f1(np.zeros(4, int), np.zeros(4, int), rng()).value)


def test_correlations_worked_out_by_hand() -> None:
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 4.0, 9.0, 16.0])
    assert glue.spearman(x, y, rng()).value == pytest.approx(1)
    assert glue.pearson(x, y, rng()).value == pytest.approx(25 / math.sqrt(5 * 129))
    assert glue.pearson(-x, x, rng()).value == pytest.approx(-1)
    # ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4
    ties = glue.spearman(np.array([1, 2, 2, 3]), np.array([0.1, 0.7, 0.5, 0.9]), rng())
    assert ties.value == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@pytest.mark.parametrize(
    ("guess", "truth", "value"),
    [([1, 1, 0, 0], [1, 0, 1, 0], 0.5), ([0, 0], [1, 0], 1 / 3), ([0, 1, 2, 2], [0, 1, 1, 2], (1 + 2 / 3 + 2 / 3) / 3)],
)
def test_macro_f1_by_hand(guess: list[int], truth: list[int], value: float) -> None:
    found = glue.macro_f1(np.array(guess), np.array(truth), rng())
    assert found.value == pytest.approx(value) and found.low < value < found.high


def test_macro_f1_of_a_draw_that_lost_a_class_is_of_the_others() -> None:
    truth = np.array([0] * 10 + [1] * 10 + [2])
    found = glue.macro_f1(np.where(np.arange(21) == 0, 2, truth), truth, rng())
    assert 0.7 < found.low < found.value, "0 for the lost class would put it at 0.62"


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_correlations_and_their_intervals_are_scipys(shift: float) -> None:
    draw = np.random.default_rng(1)
    truth = np.round(draw.uniform(0, 5, 300), 1)
    guess = truth + draw.normal(0, 1, 300) + shift
    for ours, theirs in ((glue.pearson, stats.pearsonr), (glue.spearman, stats.spearmanr)):
        found = ours(guess, truth, rng())
        assert found.value == pytest.approx(theirs(guess, truth).statistic, abs=1e-9)
        wide = 1.96 * (1 - found.value**2) / math.sqrt(300)  # of a normal pair
        assert found.high - found.low == pytest.approx(2 * wide, rel=0.3)


def test_ranks_of_repeated_examples_are_those_of_the_longer_list() -> None:
    draw = np.random.default_rng(2)
    x, y = draw.integers(0, 6, 40), draw.integers(0, 6, 40)
    weights = draw.integers(0, 4, 40)
    wanted = stats.spearmanr(np.repeat(x, weights), np.repeat(y, weights)).statistic
    places = [np.unique(one, return_inverse=True)[1] for one in (x, y)]
    w = weights.astype(float)
    found = glue._correlation(glue._ranks(places[0], w), glue._ranks(places[1], w), w)
    assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("name", sorted(glue.MEASURES))
def test_the_order_of_examples_is_nothing_and_lengths_must_agree(name: str) -> None:
    order = np.random.default_rng(3).permutation(10)
    one = glue.MEASURES[name](GUESS, TRUTH, rng())
    assert glue.MEASURES[name](GUESS[order], TRUTH[order], rng()).value == pytest.approx(one.value)
    with pytest.raises(UsageError, match=r"\(9,\).*\(10,\)"):
        glue.MEASURES[name](GUESS[1:], TRUTH, rng())
    nothing: Any = np.zeros(0)
    assert math.isnan(glue.MEASURES[name](nothing, nothing, rng()).value)


def test_a_mean_has_the_normal_interval() -> None:
    values = np.random.default_rng(4).normal(3, 2, 500)
    found = bootstrap(lambda counts: counts @ values / counts.sum(1), 500, rng())
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(500), rel=0.1)


def test_perplexity_counts_tokens_and_not_texts() -> None:
    """A text of 9 tokens at ln 2 and one of 1 token at ln 1024: 2^(19/10)."""
    losses, tokens = np.array([9 * math.log(2), math.log(1024)]), np.array([9.0, 1.0])
    found = text.perplexity(losses, tokens, rng())
    assert found.value == pytest.approx(2 ** (19 / 10))
    assert found.low == pytest.approx(2)
    assert found.high == pytest.approx(1024)
    assert math.isnan(text.perplexity(np.zeros(2), np.zeros(2), rng()).value)
    with pytest.raises(UsageError, match=rf"\({len(losses)},\).*\(1,\)"):
        text.perplexity(losses, tokens[:1], rng())


def test_rouge_is_the_mean_over_texts() -> None:
    found = text.mean_similarity(["the cat sat", "a dog"], ["sat cat the", "big bird"], rng())
    assert found["rouge-1"].value == pytest.approx(0.5)
    assert found["rouge-l"].value == pytest.approx(1 / 6)
    assert found["rouge-1"].units == 2
    with pytest.raises(UsageError, match=r"\b1 texts\b.*\b2 references"):
        text.mean_similarity(["a"], ["a", "b"], rng())


def test_precision_and_recall_of_class_1() -> None:
    guess, truth = np.array([1, 1, 1, 0, 0]), np.array([1, 0, 1, 1, 0])
    assert glue.precision(guess, truth, rng()).value == pytest.approx(2 / 3)
    assert glue.recall(guess, truth, rng()).value == pytest.approx(2 / 3)
    assert glue.precision(np.array([1, 0]), np.array([0, 1]), rng()).value == 0
    assert math.isnan(glue.precision(np.zeros(3, int), np.ones(3, int), rng()).value)
    assert math.isnan(glue.recall(np.ones(3, int), np.zeros(3, int), rng()).value)
