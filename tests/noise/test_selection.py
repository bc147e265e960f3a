"""Report-noisy-max and the exponential mechanism: their laws, and that their guarantees are not exceeded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from milkglass.noise import selection
from milkglass.noise.stream import Stream
from tests.noise.kit import KEY


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=30),
    st.lists(st.floats(0, 1), min_size=30, max_size=30),
    st.floats(1e-3, 200),
)
def test_no_ratio_exceeds_the_exponential_mechanisms_epsilon(
    one: list[float], two: list[float], epsilon: float
) -> None:
    """Any two score rows, in whole numbers: (w / W) / (w' / W') <= exp(epsilon), without a slack."""
    sums = selection.cumulative_weights(np.array([one, two[: len(one)]]), epsilon)
    weights = np.diff(sums, axis=1, prepend=0)
    first, second = ([int(w) for w in row] for row in weights)
    limit = math.exp(epsilon) if epsilon < 700 else math.inf
    for a, b in zip(first, second, strict=True):
        assert a * sum(second) <= limit * (1 + 1e-12) * b * sum(first)
        assert b * sum(first) <= limit * (1 + 1e-12) * a * sum(second)
    assert min(first) > 0


def test_the_exponential_mechanism_has_its_law() -> None:
    scores = np.array([[0.0, 0.5, 1.0, -np.inf]])
    sums = selection.cumulative_weights(scores, 3.0)
    drawn = selection.choose(np.repeat(sums, 60_000, 0), Stream(KEY))
    expected = np.exp(1.5 * scores[0, :3])
    assert set(drawn.tolist()) == {0, 1, 2}
    assert chisquare(np.bincount(drawn), 60_000 * expected / expected.sum()).pvalue > 1e-3


def test_report_noisy_max_has_its_law() -> None:
    """Against fp64 draws of NumPy's, which is no part of the mechanism."""
    scores, scale, times = np.array([0.1, 0.7, 1.0, 0.0]), 0.6, 60_000
    drawn = selection.noisy_max(np.repeat(scores[None], times, 0), scale, Stream(KEY))
    noise = np.random.default_rng(0).laplace(0, scale, (20 * times, 4))
    expected = np.bincount((scores + noise).argmax(1)) / 20
    assert chisquare(np.bincount(drawn), expected * times / expected.sum()).pvalue > 1e-3


def test_the_end_of_a_list_is_never_drawn_and_tiny_scales_take_the_best() -> None:
    scores = np.array([[0.2, -np.inf, 1.0], [1.0, 0.3, -np.inf]])
    for seed in range(50):
        assert not (selection.noisy_max(scores, 1e9, Stream.of_seed(seed)) == [1, 2]).any()
    assert selection.noisy_max(scores, 1e-6, Stream(KEY)).tolist() == [2, 0]


def test_too_long_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match="candidates"):
        selection.cumulative_weights(np.zeros((1, (1 << 18) + 1)), 1.0)
