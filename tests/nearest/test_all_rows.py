"""Candidate lists against the literal program: tiles, ties, guesses that were wrong, and memory."""

from __future__ import annotations

import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.nearest import all_rows as module
from milkglass.nearest.all_rows import nearest
from milkglass.nearest.select import unit_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import sanitizers as literal  # noqa: E402


def grouped(n: int, d: int, seed: int = 0, groups: int = 12) -> NDArray[np.float32]:
    """Random vectors in groups, so that neighbourhoods overlap as they do in a real table."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(groups, d))
    return (centres[rng.integers(groups, size=n)] + 0.6 * rng.normal(size=(n, d))).astype(np.float32)


def agree(vectors: NDArray[np.float32], k: int) -> None:
    """Lists are the literal ones. Ranks are compared by their cosines: a tie is one in the same arithmetic only."""
    ids, cosines = nearest(vectors, k)
    x, unit = vectors.astype(np.float64), unit_rows(vectors.astype(np.float64))
    rows = np.arange(len(vectors))[:, None]
    assert (ids != rows).all() and all(len({*one}) == k for one in ids.tolist())
    np.testing.assert_allclose((unit[rows] * unit[ids]).sum(2), cosines, atol=1e-6)
    for i in range(len(x)):
        wanted = literal.candidate_list(x, i, k)[0]
        np.testing.assert_allclose(cosines[i], literal.cosine_row(x, i)[wanted], atol=1e-6)


@pytest.mark.parametrize(("n", "k"), [(600, 30), (600, 1), (40, 39), (257, 5), (2, 1)])
def test_lists_are_the_literal_ones(n: int, k: int) -> None:
    agree(grouped(n, 16), k)


@pytest.mark.parametrize(("tile", "sample"), [(32, 64), (50, 10_000), (1024, 2)])
def test_each_pair_once_gives_the_same_lists(monkeypatch: pytest.MonkeyPatch, tile: int, sample: int) -> None:
    monkeypatch.setattr(module, "TILE_SIZE", tile)
    monkeypatch.setattr(module, "SAMPLE_COLUMNS", sample)
    vectors = grouped(333, 8, seed=3)
    vectors[5] = vectors[200] = vectors[40]
    vectors[17] = 0  # no direction
    for k in (1, 20, 332):
        agree(vectors, k)


def test_ties_fall_to_the_smaller_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_SIZE", 16)
    for held in (1, 1000):  # with and without pairs that are cut back
        monkeypatch.setattr(module, "MAX_HELD_PAIRS", held)
        vectors = np.eye(4, dtype=np.float32)[np.arange(200) % 4]  # cosines are 0 and 1, exactly
        ids, cosines = nearest(vectors, 60)
        alike = [np.flatnonzero(np.arange(200) % 4 == i % 4) for i in range(200)]
        others = [np.flatnonzero(np.arange(200) % 4 != i % 4) for i in range(200)]
        wanted = [[*one[one != i], *rest][:60] for i, (one, rest) in enumerate(zip(alike, others, strict=True))]
        assert ids.tolist() == wanted
        assert (cosines == np.repeat([1, 0], [49, 11])).all()


def test_a_guess_that_was_too_high_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = grouped(200, 8)
    expected = nearest(vectors, 15)
    monkeypatch.setattr(
        module, "_estimate_bounds", lambda unit, k, pool: np.linspace(0, 1.5, len(unit)).astype(np.float32)
    )
    for one, other in zip(nearest(vectors, 15), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("held", [1, 20, 100])
def test_a_guess_that_was_too_low_loses_nothing(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    vectors = grouped(300, 8)
    expected = nearest(vectors, 15)
    monkeypatch.setattr(module, "TILE_SIZE", 32)
    monkeypatch.setattr(module, "MAX_HELD_PAIRS", held)
    monkeypatch.setattr(module, "_estimate_bounds", lambda unit, k, pool: np.full(len(unit), -1.5, np.float32))
    for one, other in zip(nearest(vectors, 15), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("alike", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lists_hold_no_square_matrix(monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    """Nor where all rows are equal, so that every pair reaches every bound."""
    monkeypatch.setattr(module, "core_count", lambda: 2)  # each has tiles of its own
    n = 9000
    vectors = np.ones((n, 8), np.float32) if alike else grouped(n, 8)
    nearest(vectors[:100], 3)  # what is imported and kept at the first call is not what is measured
    tracemalloc.start()
    nearest(vectors, 30)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < n * n * 10 / 4, "10 bytes a pair"


def test_few_tiles_wait_for_their_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly they are taken: each may hold as many pairs as it has cells."""
    monkeypatch.setattr(module, "core_count", lambda: 2)
    started: list[int] = []

    def work(left: int) -> Any:
        started.append(left)
        return left

    with ThreadPoolExecutor(2) as pool:
        tiles = module._run_ahead(pool, work, range(100))
        for taken in range(20):
            assert next(tiles) == taken
            time.sleep(0.01)  # the pool would do all of them, if it had them
            assert len(started) <= taken + 1 + 2 * 2
        assert list(tiles) == [*range(20, 100)]


def test_equal_rows_are_as_near_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_COLUMNS", 500)  # guesses come from a part of the rows
    vectors = grouped(120, 384)[np.random.default_rng(4).integers(120, size=1200)]
    agree(vectors, 25)


@pytest.mark.parametrize("size", [1e-42, 1e-25, 1e4, 1e30])
def test_lists_are_those_of_directions_whatever_the_lengths(size: float) -> None:
    vectors = np.rint(grouped(90, 6) * 100).astype(np.float32)  # numbers that the smallest can hold
    expected = nearest(vectors, 7)
    for one, other in zip(nearest((vectors * np.float32(size)).astype(np.float32), 7), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_other_types_and_orders() -> None:
    vectors = grouped(90, 6).astype(np.float16)
    expected = nearest(vectors.astype(np.float32), 7)
    for other in (vectors * np.float16(3000), vectors.astype(np.float64), np.asfortranarray(vectors)):
        np.testing.assert_allclose(nearest(other, 7)[1], expected[1], atol=1e-2)


def test_rows_without_numbers_are_refused() -> None:
    vectors = grouped(40, 4)
    vectors[3, 1] = np.nan
    with pytest.raises(UsageError, match="1 of 40 rows"):
        nearest(vectors, 3)


def test_k_that_does_not_fit() -> None:
    for k in (0, 40):
        with pytest.raises(UsageError, match=rf"k is {k}\b.*\b1 to 39\b"):
            nearest(grouped(40, 4), k)


@pytest.mark.parametrize("n", [40, 1024, 2500])
def test_progress_adds_up_to_the_rows(n: int) -> None:
    reported: list[int] = []
    nearest(grouped(n, 4), 3, reported.append)
    assert sum(reported) == n and min(reported) >= 0


def test_integers_that_stand_for_pairs_are_in_their_order() -> None:
    rng = np.random.default_rng(5)
    special = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, np.inf, -np.inf, 3.4e38], np.float32)
    value = rng.permutation(np.concatenate([special, special, rng.normal(size=200).astype(np.float32)]))
    column = rng.integers(2**31 - 1, size=len(value), dtype=np.int32)
    keys = module._pack(column, value)
    order = np.lexsort((column, -value))
    assert np.array_equal(np.argsort(keys, kind="stable"), order)
    columns, values = module._unpack(keys)
    assert np.array_equal(columns, column) and np.array_equal(values, value)


def test_estimated_bounds_are_not_too_high_where_cosines_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess above the k-th cosine has its row compared with all others again. In bf16 nearly all were."""
    again = list[int]()
    original = module._compare_again
    monkeypatch.setattr(
        module, "_compare_again", lambda unit, rows, *lists: (again.extend(rows), original(unit, rows, *lists))
    )
    crowded = (1 + 0.05 * np.random.default_rng(6).normal(size=(3000, 64))).astype(np.float32)
    nearest(crowded, 30)
    assert len(again) < 30
