"""Intervals, shares and likeness of texts against closed forms."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from milkglass.metrics import interval, recovery
from milkglass.metrics.interval import proportion, ratio
from milkglass.metrics.text import MEASURES, similarity_scores
from milkglass.sequences import Sequences


def test_an_interval_of_a_share_is_the_binomial_one() -> None:
    hits = np.arange(400) < 100
    found = proportion(hits, np.random.default_rng(0))
    spread = 1.96 * math.sqrt(0.25 * 0.75 / 400)
    assert found.value == 0.25
    assert found.low == pytest.approx(0.25 - spread, abs=0.01)
    assert found.high == pytest.approx(0.25 + spread, abs=0.01)


def test_sentences_are_resampled_and_not_tokens() -> None:
    """Ten sentences of a hundred tokens each, each all right or all wrong: ten units, not a thousand."""
    hits, weights = np.repeat([100.0, 0.0], 5), np.full(10, 100.0)
    found = ratio(hits, weights, np.random.default_rng(0))
    assert (found.value, found.units) == (0.5, 10)
    assert found.high - found.low > 0.4


@pytest.mark.parametrize("order", ["drawn", "sorted"])
def test_many_units_are_dealt_out_and_the_interval_is_the_formulas(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The linearised variance of a ratio (Cochran 1977, section 2.11), where units come in any order."""
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 40, 3 * interval.MAX_UNITS).astype(np.float64)
    hits = rng.binomial(weights.astype(np.int64), rng.beta(2, 2, len(weights))).astype(np.float64)
    if order == "sorted":
        by = np.argsort(hits / weights)
        weights, hits = weights[by], hits[by]
    drawn, real = list[int](), interval._resampled_counts

    def noted(units: int, rng: np.random.Generator) -> Iterator[NDArray[np.float64]]:
        drawn.append(units)
        return real(units, rng)

    monkeypatch.setattr(interval, "_resampled_counts", noted)
    found = ratio(hits, weights, np.random.default_rng(1))
    assert (
        drawn == [interval.MAX_UNITS] and interval.MAX_UNITS >= 2000
    )  # with fewer sums the width would be left to chance
    spread = 1.96 * float(np.sqrt(((hits - found.value * weights) ** 2).sum())) / weights.sum()
    assert found.value == hits.sum() / weights.sum()
    assert found.units == len(weights)
    assert found.half_width == pytest.approx(spread, rel=0.15)


def test_nothing_to_count_is_not_a_zero() -> None:
    found = ratio(np.zeros(3), np.zeros(3), np.random.default_rng(0))
    assert math.isnan(found.value)
    assert math.isnan(proportion(np.zeros(0, np.bool_), np.random.default_rng(0)).value)


def test_likeness_of_texts() -> None:
    same = dict(zip(MEASURES, similarity_scores("the cat sat on the mat", "the cat sat on the mat"), strict=True))
    assert (same["rouge-1"], same["rouge-2"], same["rouge-l"]) == (1, 1, 1)
    assert same["meteor"] == pytest.approx(1 - 0.5 * (1 / 6) ** 3)  # one chunk of six matches
    turned = dict(zip(MEASURES, similarity_scores("the cat sat", "sat cat the"), strict=True))
    assert turned["rouge-1"] == 1
    assert turned["rouge-2"] == 0
    assert turned["rouge-l"] == pytest.approx(1 / 3)
    assert similarity_scores("cats running", "cat run")[3] > 0.9  # stems count in METEOR
    assert similarity_scores("cats running films", "cat run films")[:3] == pytest.approx(
        (1 / 3, 0, 1 / 3)
    )  # and not in ROUGE
    assert similarity_scores("A fine film.", "a fine film .") == similarity_scores("a fine film .", "a fine film ."), (
        "as it is decoded"
    )
    assert similarity_scores("A fine film.", "a fine film .")[3] > 0.98
    assert similarity_scores("big dog", "large hound") == (0, 0, 0, 0)
    assert similarity_scores("a", "") == (0, 0, 0, 0)
    assert similarity_scores("", "") == (1, 1, 1, 1)


def test_top_k_over_running_tokens_counts_what_counts() -> None:
    truth = Sequences.of([[1, 2, 9], [3, 9]])
    guess = np.array([[1, 0, 0], [0, 2, 0], [9, 9, 9], [0, 0, 0], [9, 9, 9]])
    counted = truth.ids != 9
    found = recovery.token_accuracies(guess, truth, counted, np.random.default_rng(0))
    assert found[1].value == pytest.approx(1 / 3)
    assert found[3].value == pytest.approx(2 / 3)
    assert 10 not in found


def test_floors() -> None:
    truth = Sequences.of([[1, 1, 2, 3]])
    counted = np.array([True, True, True, True])
    assert recovery.floor_accuracies(truth, counted, None, 50) == {"random guess": 0.02, "commonest token": 0.5}
    public = np.zeros(50, np.int64)
    public[3] = 7
    assert recovery.floor_accuracies(truth, counted, public, 50)["commonest token"] == 0.25


def test_the_words_that_are_named_for_every_text_are_those_that_most_texts_have() -> None:
    public = Sequences.of([[1, 2, 9], [1, 2, 3], [1, 4, 1], [1, 2]])
    is_counted = np.arange(20) != 9
    assert recovery.constant_bag(public, is_counted).tolist() == [1, 2], "F1 of 14/17; of 1 alone 8/13, with 3 16/21"
    truth = Sequences.of([[1, 5, 9], [2, 1], [6, 7]])
    found = recovery.floor_bag_scores(truth, public, is_counted)
    assert found["bag recall"].value == pytest.approx(3 / 6) and found["bag precision"].value == pytest.approx(3 / 6)
    own = recovery.floor_bag_scores(truth, None, is_counted)
    assert own["bag f1"].value >= found["bag f1"].value, "its own words decide"
    empty = recovery.floor_bag_scores(Sequences.of([[9], []]), public, is_counted)
    assert empty["bag precision"].value == 0
    assert not len(recovery.constant_bag(Sequences.of([[9]]), is_counted))


def test_an_interval_around_nothing_or_everything_has_a_width() -> None:
    nothing = proportion(np.zeros(30, np.bool_), np.random.default_rng(0))
    assert (nothing.value, nothing.low) == (0, 0)
    assert nothing.high == pytest.approx(1 - 0.025 ** (1 / 30))
    everything = ratio(np.ones(30), np.ones(30), np.random.default_rng(0))
    assert everything.low == pytest.approx(0.025 ** (1 / 30))
    assert everything.high == 1


def test_likeness_knows_other_scripts() -> None:
    assert similarity_scores("привет мир как дела", "привет мир как дела")[:3] == (1, 1, 1)
    assert similarity_scores("伤口 裂开", "伤口 愈合")[0] == 0.5


def test_texts_without_a_counted_token_are_like_nothing() -> None:
    """Empty against empty would be alike: a guess of nothing must not earn by it."""
    truth = Sequences.of([[1, 2], *([[]] * 9)])
    nothing = Sequences.of([[]] * 10)
    found = recovery.text_similarity(
        nothing, truth, lambda ids: " ".join(map(str, ids.tolist())), np.random.default_rng(0)
    )
    assert all(one.value == 0 and one.units == 1 for one in found.values())


def test_the_width_around_nothing_counts_only_texts_that_weigh() -> None:
    weights = np.zeros(1000)
    weights[:5] = 3
    found = ratio(np.zeros(1000), weights, np.random.default_rng(0))
    assert found.units == 5 and found.high == pytest.approx(1 - 0.025 ** (1 / 5))
