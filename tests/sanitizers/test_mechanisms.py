"""What holds for every mechanism: specials, bad input, candidate lists, order, memory, determinism."""

from __future__ import annotations

import pickle  # what multiprocessing hands to workers
import tracemalloc

import numpy as np
import pytest

from milkglass.errors import BadTable, UnknownWord, UsageError
from milkglass.nearest.all_rows import group_rows
from milkglass.nearest.select import k_largest
from milkglass.noise.stream import Stream
from milkglass.sanitizers.custext import CusText
from milkglass.sanitizers.rnm import Rnm, RnmMethod
from milkglass.sanitizers.sanitizer import UNKNOWN, Sanitizer, SparingRule, sensitive_words
from milkglass.sanitizers.santext import SanText, SanTextPlus
from milkglass.sanitizers.table import WordVectors
from tests.sanitizers.kit import literal, table


def every(words: WordVectors, epsilon: float = 1.0) -> list[Sanitizer]:
    sparing = SparingRule(np.arange(len(words)) % 2 == 0, 0.5)
    return [
        SanText(words, epsilon),
        SanTextPlus(words, epsilon, sparing=sparing, occurring=np.ones(len(words), np.bool_)),
        CusText(words, epsilon, k=5),
        Rnm(words, epsilon, k=5),
        Rnm(words, epsilon, k=5, guarantee_kind="strict", sparing=sparing),
    ]


def test_special_rows_are_neither_drawn_nor_replaced() -> None:
    words = table(20, special=(0, 7, 19))
    ids = np.random.default_rng(0).integers(UNKNOWN, 20, 50_000)
    for sanitizer in every(words):
        out = sanitizer.sanitize(ids, Stream.of_seed(1))
        special = np.isin(ids, (0, 7, 19))
        assert np.array_equal(out[special], ids[special])
        assert np.array_equal(np.unique(out[~special]), np.setdiff1d(np.arange(20), (0, 7, 19)))


def test_draws_repeat_from_a_seed_and_survive_a_copy() -> None:
    ids = np.random.default_rng(0).integers(UNKNOWN, 100, 20_000)
    for sanitizer in every(table(100, 8)):
        first = sanitizer.sanitize(ids, Stream.of_seed(1))
        copy = pickle.loads(pickle.dumps(sanitizer))  # noqa: S301
        assert np.array_equal(copy.sanitize(ids, Stream.of_seed(1)), first)
        assert not np.array_equal(sanitizer.sanitize(ids, Stream.of_seed(2)), first)
        assert np.array_equal(sanitizer.sanitize(ids[:0], Stream.of_seed(2)), ids[:0])


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_an_epsilon_that_cannot_be(epsilon: float) -> None:
    for make in (SanText, CusText, Rnm):
        with pytest.raises(UsageError, match=f"epsilon is {epsilon}"):
            make(table(), epsilon)


def test_ids_that_the_table_does_not_have() -> None:
    for sanitizer in every(table()):
        for bad in (12, -2):
            with pytest.raises(UnknownWord, match=r"\b12 words"):
                sanitizer.sanitize(np.array([0, bad]), Stream.of_seed(0))
        with pytest.raises(UsageError, match="float64"):
            sanitizer.sanitize(np.array([0.0]), Stream.of_seed(0))
        with pytest.raises(UsageError, match="shape"):
            sanitizer.sanitize(np.array([[0]]), Stream.of_seed(0))


def test_parameters_that_cannot_be() -> None:
    words = table()
    with pytest.raises(UsageError, match=r"k is 13\b.*\b2 to 12\b"):
        CusText(words, 1.0, k=13)
    with pytest.raises(UsageError, match=r"k is 12\b.*\b2 to 11\b"):
        Rnm(words, 1.0, k=12)
    Rnm(words, 1.0, k=12, guarantee_kind="strict")
    with pytest.raises(UsageError, match=r"p is 1\.5"):
        SanTextPlus(words, 1.0, sparing=SparingRule(np.ones(12, np.bool_), 1.5), occurring=np.ones(12, np.bool_))
    with pytest.raises(UsageError, match="mask of 12"):
        Rnm(words, 1.0, 5, sparing=SparingRule(np.ones(11, np.bool_), 0.5))
    with pytest.raises(UsageError, match="metric is 'dot'"):
        CusText(words, 1.0, 5, "dot")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="guarantee is 'none'"):
        Rnm(words, 1.0, 5, "none")  # type: ignore[arg-type]


def test_tables_that_cannot_be() -> None:
    good = np.ones((2, 3), np.float32)
    with pytest.raises(BadTable, match=r"\b1 words .*\(2, 3\)"):
        WordVectors(("a",), good)
    with pytest.raises(BadTable, match="not finite"):
        WordVectors(("a", "b"), good * np.nan)
    with pytest.raises(BadTable, match="too large"):
        WordVectors(("a", "b"), good * 1e30)
    with pytest.raises(BadTable, match=r"\b1 words\b.*\b2\b"):
        WordVectors(("a", "b"), good, np.array([True, False]))
    with pytest.raises(BadTable, match=r"\b0 words\b.*\b2\b"):
        WordVectors((), np.zeros((0, 3), np.float32))


def test_settings_of_the_papers_are_the_defaults() -> None:
    """CMIF, 4.1: lists of k = 30, p = 0.3, the rarest 20 % of the words are sensitive."""
    method = RnmMethod()
    assert (method.k, method.p, method.sensitive) == (30, 0.3, 0.2)


# --- candidate lists --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_greedy_groups_are_the_literal_ones(metric: str) -> None:
    words = table(500, 16)
    order = np.random.default_rng(3).permutation(500)
    found = group_rows(words.vectors, order, 20, metric)
    expected = literal.custext_groups(words.vectors.astype(np.float64), order.tolist(), 20, metric)
    assert [set(one.tolist()) for one in found] == [set(one) for one in expected]
    assert np.array_equal(np.sort(np.concatenate(found)), np.arange(500))


def test_the_best_of_rows_with_ties_and_taken_columns() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 4, (50, 333)).astype(np.float32)
    rows[:, 10:300:3] = -np.inf
    found, values = k_largest(rows, 40)
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :40]
    assert np.array_equal(found, expected)
    assert np.array_equal(values, np.take_along_axis(rows, expected, 1))


def test_groups_hold_no_square_matrix() -> None:
    vectors = np.random.default_rng(0).normal(size=(6000, 8)).astype(np.float32)
    tracemalloc.start()
    group_rows(vectors, np.arange(6000), 20, "cosine")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 6000 * 6000 * 4 / 4


def test_draws_need_memory_by_the_block() -> None:
    ids = np.random.default_rng(0).integers(0, 300, 300_000)
    for sanitizer in every(table(300, 64)):
        sanitizer.sanitize(np.arange(300), Stream.of_seed(0))
        tracemalloc.start()
        sanitizer.sanitize(ids, Stream.of_seed(0))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 25e6  # ids in and out are 7 MB; a row of vectors for each word would be 77 MB


# --- what is sensitive ------------------------------------------------------------------------------------------------
def test_sensitive_are_the_rarest_and_what_never_occurs() -> None:
    counts = np.array([0, 9, 1, 5, 2, 2, 7, 0, 8, 6, 4, 3])
    assert np.flatnonzero(sensitive_words(counts, 0.2)).tolist() == [0, 2, 4, 5, 7]  # 2 of 10, and the third like them
    assert np.flatnonzero(sensitive_words(counts, 0)).tolist() == [0, 7]
    assert sensitive_words(counts, 1).all()
    assert sensitive_words(np.zeros(3, np.int64), 0.2).all()
    with pytest.raises(UsageError, match=r"sensitive words is 2\b"):
        sensitive_words(counts, 2)
