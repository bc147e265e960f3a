"""Randomised response: chances by hand, what is drawn, and the bound on a reader's odds."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from math import exp, log, log2
from pathlib import Path

import numpy as np
import pytest
from mpmath import exp as exact_exp
from mpmath import mpf
from scipy.stats import chi2

from milkglass.noise.responses import TRUE_VALUE_WEIGHT, RandomisedResponse
from milkglass.noise.stream import Stream
from tests.noise.kit import KEY

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import responses as literal  # noqa: E402
from noise import exact  # noqa: E402

VECTORS = Path(__file__).parents[2] / "vectors" / "responses.json"
VALUES = np.array([2, 5, 7, 11])
DRAWS = 40_000


def stream() -> Stream:
    return Stream(b"responses".ljust(32, b"."))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_the_chance_of_the_value_itself_is_kairouzs(epsilon: float) -> None:
    """e^epsilon / (e^epsilon + m - 1), with m = 4."""
    assert RandomisedResponse(VALUES, epsilon).keep_probability == pytest.approx(
        exp(epsilon) / (exp(epsilon) + 3), rel=1e-11
    )


@pytest.mark.parametrize("epsilon", [1e-9, 0.1, 1.0, 3.0, 12.0, 30.0])
def test_no_two_values_are_told_apart_by_more_than_epsilon(epsilon: float) -> None:
    """The weights of a value and of another one differ by a factor of e^epsilon at most, worked out with 80 digits; and
    by no less than two parts of w fewer, so that the bound is used."""
    found = RandomisedResponse(VALUES, epsilon)
    bound = exact_exp(exact(Fraction(epsilon)))
    assert mpf(TRUE_VALUE_WEIGHT) / found.other_weight <= bound
    assert found.other_weight == TRUE_VALUE_WEIGHT or mpf(TRUE_VALUE_WEIGHT) / (found.other_weight - 2) > bound
    assert log(TRUE_VALUE_WEIGHT) - log(found.other_weight) == pytest.approx(found.log_likelihood_ratio, abs=1e-12)
    assert found.log_likelihood_ratio <= epsilon


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 4.0])
def test_what_is_sent_is_the_literal_one(epsilon: float) -> None:
    ids = np.random.default_rng(2).integers(0, 13, 300)
    found = RandomisedResponse(VALUES, epsilon)
    assert found.respond(ids, Stream(KEY)).tolist() == literal.sent(KEY, epsilon, VALUES.tolist(), ids.tolist())
    assert found.other_weight == literal.weight(epsilon)


def test_what_is_sent_is_the_known_answer() -> None:
    known = json.loads(VECTORS.read_text("utf-8"))
    for case in known["cases"]:
        found = RandomisedResponse(np.array(known["values"]), case["epsilon"])
        assert found.other_weight == case["weight"]
        assert found.respond(np.array(known["ids"]), Stream(bytes.fromhex(known["key"]))).tolist() == case["sent"]


def test_what_is_sent_has_these_chances() -> None:
    """Chi-squared over all four values, for one of them; a false alarm once in ten thousand seeds, and the seed is
    fixed."""
    found = RandomisedResponse(VALUES, 1.0)
    sent = found.respond(np.full(DRAWS, 7), stream())
    counts = np.array([(sent == one).sum() for one in VALUES])
    other = 1 / (exp(1.0) + 3)
    expected = DRAWS * np.array([other, other, exp(1.0) * other, other])
    assert counts.sum() == DRAWS
    assert float(((counts - expected) ** 2 / expected).sum()) < chi2.ppf(1 - 1e-4, 3)


def test_every_place_is_drawn_for_itself_and_others_cross_as_they_are() -> None:
    found = RandomisedResponse(VALUES, 0.5)
    ids = np.tile([3, 5, 12, 2], 500)
    sent = found.respond(ids, stream())
    assert (sent[::4] == 3).all() and (sent[2::4] == 12).all()
    assert set(sent[1::4]) == set(sent[3::4]) == {2, 5, 7, 11}
    assert np.array_equal(sent, found.respond(ids, stream()))
    assert np.array_equal(ids, np.tile([3, 5, 12, 2], 500)), "what was given is not changed"


def test_one_value_or_none_is_sent_as_it_is() -> None:
    ids = np.array([4, 9, 4])
    for values in (np.array([4]), np.empty(0, np.int64)):
        found = RandomisedResponse(values, 1.0)
        assert np.array_equal(found.respond(ids, stream()), ids)
        assert found.noise_bits == 0


def test_bits_of_chance_by_hand() -> None:
    """With a chance of 1/2 for itself and 1/6 for each of three others: 1/2 log2 2 + 3/6 log2 6."""
    found = RandomisedResponse(VALUES, log(3))
    assert found.keep_probability == pytest.approx(0.5, rel=1e-11)
    assert found.noise_bits == pytest.approx(0.5 + 0.5 * log2(6), rel=1e-9)


def test_how_often_each_is_sent_by_hand() -> None:
    found = RandomisedResponse(np.array([0, 1]), log(3))  # 3/4 and 1/4
    assert found.expected_counts(np.array([8, 4, 5])) == pytest.approx([7, 5, 5])
