"""Counts of a classification: what each class and all are worth, and what a server's counts must be like."""

from __future__ import annotations

import math

import numpy as np
import pytest

from milkglass.metrics.confusion import ConfusionMatrix

NAMES = ("a", "b", "c")


def test_shares_by_hand() -> None:
    found = ConfusionMatrix(NAMES, np.array([[2, 1, 0], [1, 1, 0], [0, 0, 0]]))
    assert found.text_count == 5 and found.commonest_class == ("a", 0.6)
    assert np.allclose(found.recall[:2], [2 / 3, 1 / 2]) and math.isnan(found.recall[2])
    assert np.allclose(found.precision[:2], [2 / 3, 1 / 2]) and math.isnan(found.precision[2])
    accuracy = found.accuracy()
    assert accuracy.value == 0.6 and accuracy.low < 0.6 < accuracy.high
    assert found.accuracy() == accuracy


def test_a_servers_counts_are_read() -> None:
    found = ConfusionMatrix.from_counts([[5, 1], [0, 4]], {1: "no", 0: "yes"})
    assert found is not None and found.names == ("yes", "no") and found.counts.tolist() == [[5, 1], [0, 4]]


@pytest.mark.parametrize(
    "counts",
    [None, [], "x", [[1]], [[1, 2], [3]], [[1, 2], 3], [[1, 2], [3, -1]], [[1, 2], [3, 0.5]], [[1, True], [0, 1]],
     [[0, 0], [0, 0]], [[1, 2], [3, 1 << 60]]],
)  # fmt: skip
def test_what_is_no_table_of_counts_is_left_out(counts: object) -> None:
    assert ConfusionMatrix.from_counts(counts, {0: "yes", 1: "no"}) is None


def test_counts_of_other_classes_are_left_out() -> None:
    assert ConfusionMatrix.from_counts([[1]], {}) is None
    assert ConfusionMatrix.from_counts([[1, 0], [0, 1]], {0: "a", 2: "b"}) is None
