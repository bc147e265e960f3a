"""What is seen without an attack."""

from __future__ import annotations

import math

import numpy as np
import pytest

from milkglass.audit.metadata_leakage import MIN_PATTERN_TOKENS, entropy, metadata_leakage, repetition_pattern
from milkglass.sequences import Sequences


def test_a_substitution_keeps_all_of_it() -> None:
    rng = np.random.default_rng(0)
    texts = Sequences.of(rng.integers(100, 900, size=rng.integers(4, 40)) for _ in range(50))
    same = metadata_leakage(texts.map_ids(rng.permutation(900)))
    found = metadata_leakage(texts)
    assert (same.length_bits, same.repeated, same.recognised) == (found.length_bits, found.repeated, found.recognised)
    assert found.sized == 0  # all ids have three digits


def test_known_figures() -> None:
    long = np.arange(MIN_PATTERN_TOKENS)
    twice = np.where(long == 3, 0, long)
    found = metadata_leakage(Sequences.of([long, long + 50, twice, twice, [1, 2]]))
    assert found.repeated == pytest.approx(0.2)
    assert found.long == 3
    assert found.recognised == pytest.approx(1 / 3)  # twice; the other two have one pattern
    assert found.length_bits == pytest.approx(entropy(np.array([16, 16, 16, 16, 2])))
    assert (
        repetition_pattern(np.array([7, 9, 7]))
        == repetition_pattern(np.array([1, 5, 1]))
        != repetition_pattern(np.array([1, 5, 5]))
    )


def test_entropy() -> None:
    assert entropy(np.array([1, 2, 3, 4])) == 2
    assert entropy(np.array([5, 5])) == 0


def test_nothing_sent() -> None:
    found = metadata_leakage(Sequences.of([]))
    assert math.isnan(found.length_bits) and math.isnan(found.recognised) and math.isnan(found.sized)
