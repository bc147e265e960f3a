"""Integers, orders and sub-streams of a key stream."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from milkglass.noise.stream import Stream
from tests.noise.kit import KEY, literal


def test_words_are_chacha20s() -> None:
    first, second = literal.words(KEY, 0), literal.words(KEY, 1)
    assert Stream(KEY).long_words(9).tolist() == [next(first) for _ in range(9)]
    assert Stream(KEY).reserve.long_words(9).tolist() == [next(second) for _ in range(9)]


def test_whole_numbers_below_limits_are_uniform() -> None:
    limits = np.tile([1, 2, 7, 3 << 61], 20_000)
    drawn = Stream(KEY).below(limits)
    assert (drawn >= 0).all() and (drawn < limits).all()
    assert chisquare(np.bincount(drawn[limits == 7])).pvalue > 1e-3
    high = drawn[limits == 3 << 61]
    assert chisquare(np.bincount(high >> 61)).pvalue > 1e-3, "a third each: taking the rest of a division favours one"
    assert not len(Stream(KEY).below(np.empty(0, np.int64)))
    with pytest.raises(ValueError, match="below 1"):
        Stream(KEY).below(np.array([3, 0]))


def test_an_order_is_a_permutation_and_a_child_is_another_stream() -> None:
    stream = Stream(KEY)
    assert sorted(stream.order(100).tolist()) == list(range(100))
    child = stream.child()
    assert child.bytes(32) != stream.bytes(32)
    assert Stream.of_seed(1, "a").bytes(8) != Stream.of_seed("1a").bytes(8)
    with pytest.raises(ValueError, match="31 bytes"):
        Stream(b"\0" * 31)
