"""What is seen without an attack."""

from __future__ import annotations

import math

import numpy as np
import pytest

from milkglass.audit.metadata_leakage import MIN_PATTERN_TOKENS, entropy_bits, metadata_leakage, repetition_pattern
from milkglass.sequences import Sequences


def test_a_substitution_keeps_all_of_it() -> None:
    rng = np.random.default_rng(0)
    texts = Sequences.of(rng.integers(100, 900, size=rng.integers(4, 40)) for _ in range(50))
    same = metadata_leakage(texts.map_ids(rng.permutation(900)))
    found = metadata_leakage(texts)
    assert (same.length_bits, same.repeated_share, same.recognised_share) == (
        found.length_bits,
        found.repeated_share,
        found.recognised_share,
    )
    assert found.length_error == 0  # all ids have three digits


def test_known_figures() -> None:
    long = np.arange(MIN_PATTERN_TOKENS)
    twice = np.where(long == 3, 0, long)
    found = metadata_leakage(Sequences.of([long, long + 50, twice, twice, [1, 2]]))
    assert found.repeated_share == pytest.approx(0.2)
    assert found.long_text_count == 3
    assert found.recognised_share == pytest.approx(1 / 3)  # twice; the other two have one pattern
    assert found.length_bits == pytest.approx(entropy_bits(np.array([16, 16, 16, 16, 2])))
    assert (
        repetition_pattern(np.array([7, 9, 7]))
        == repetition_pattern(np.array([1, 5, 1]))
        != repetition_pattern(np.array([1, 5, 5]))
    )


def test_entropy() -> None:
    assert entropy_bits(np.array([1, 2, 3, 4])) == 2
    assert entropy_bits(np.array([5, 5])) == 0


def test_nothing_sent() -> None:
    found = metadata_leakage(Sequences.of([]))
    assert math.isnan(found.length_bits) and math.isnan(found.recognised_share) and math.isnan(found.length_error)
