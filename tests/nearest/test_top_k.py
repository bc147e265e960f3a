"""The k nearest rows against a literal search in fp64: both metrics, ties, blocks, dtypes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milkglass.nearest import products, top_k
from milkglass.nearest.products import Cosines, exact_cosines, limit_threads, product
from milkglass.nearest.select import Metric
from milkglass.nearest.top_k import ExactIndex, TopK


@pytest.fixture(autouse=True, params=[products.SMALL_BYTES, 0], ids=["small", "large"])
def as_small_or_large_table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are laid out once, and rows as they lie."""
    monkeypatch.setattr(products, "SMALL_BYTES", request.param)


@pytest.fixture(autouse=True, params=[True, False], ids=["bf16", "fp32"])
def with_and_without_a_first_look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors without instructions for bf16 have fp32 twice."""
    monkeypatch.setattr(products, "MAX_UNDECIDED_SHARE", 1.0)  # also where it does not pay
    if not request.param:
        monkeypatch.setattr(products, "has_fast_bf16", lambda: False)


def literal(queries: torch.Tensor, table: torch.Tensor, metric: Metric) -> np.ndarray:
    """(q, n) in fp64, the larger the nearer; written without products of matrices."""
    q, t = queries.double().numpy()[:, None], table.double().numpy()[None]
    if metric == "euclidean":
        return -np.sqrt(((q - t) ** 2).sum(2))
    lengths = np.sqrt((q**2).sum(2)) * np.sqrt((t**2).sum(2))
    return np.where(lengths > 0, (q * t).sum(2) / np.maximum(lengths, 1e-300), 0)


def search(queries: torch.Tensor, table: torch.Tensor, k: int, metric: Metric = "cosine") -> TopK:
    return ExactIndex.of(table, metric, k).top_k(queries, k)


def rows_of(n: int, d: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(5, d))
    return torch.from_numpy((scale * (centres[rng.integers(5, size=n)] + rng.normal(size=(n, d)))).astype(np.float32))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 300),
    q=st.integers(1, 40),
    k=st.integers(1, 320),
    metric=st.sampled_from(["cosine", "euclidean"]),
    scale=st.sampled_from([1e-4, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_nearest_are_those_of_a_literal_search(
    seed: int, n: int, q: int, k: int, metric: Metric, scale: float, dtype: torch.dtype
) -> None:
    table, queries = rows_of(n, 12, seed, scale).to(dtype), rows_of(q, 12, seed + 1, scale).to(dtype)
    table[::7] = table[0].clone()
    table[n // 2] = 0
    found = search(queries, table, k, metric).rows.numpy()
    expected = literal(queries, table, metric)
    assert found.shape == (q, min(k, n)) and all(len({*row}) == len(row) for row in found.tolist())
    best = -np.sort(-expected, axis=1)[:, : min(k, n)]
    off = 2e-5 if metric == "cosine" else 2e-5 * scale
    np.testing.assert_allclose(np.take_along_axis(expected, found, 1), best, atol=off)


def test_equal_rows_come_in_their_order() -> None:
    table = torch.eye(4)[torch.arange(400) % 4]
    found = search(table[:2], table, 130)
    assert found.rows[0].tolist() == [*range(0, 400, 4), *[i for i in range(400) if i % 4][:30]]
    assert found.values[1].tolist() == [1.0] * 100 + [0.0] * 30


@pytest.mark.parametrize(("offset", "noise"), [(5.0, 1e-3), (0.0, 1e20), (0.0, 1e-25), (1e6, 10.0)])
def test_distances_do_not_depend_on_the_origin(offset: float, noise: float) -> None:
    table = (rows_of(600, 48, 8) * noise + offset).float()
    table[300:] *= -1  # so that a mean does not help
    found = search(table, table, 3, "euclidean")
    expected = literal(table, table, "euclidean")
    assert found.rows[:, 0].tolist() == [*range(600)]
    best = -np.sort(-expected, axis=1)[:, :3]
    np.testing.assert_allclose(np.take_along_axis(expected, found.rows.numpy(), 1), best, rtol=1e-9)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_the_answer_does_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch, metric: Metric) -> None:
    table, queries = rows_of(2000, 24, 1), rows_of(90, 24, 2)
    whole = search(queries, table, 9, metric)
    monkeypatch.setattr(products, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(top_k, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(top_k, "COSINE_BYTES", 1 << 12)
    parts = search(queries, table, 9, metric)
    assert torch.equal(parts.rows, whole.rows) and torch.equal(parts.values, whole.values)


def test_no_queries_have_no_neighbours() -> None:
    assert ExactIndex.of(rows_of(20, 4, 0)).top_k(torch.empty(0, 4), 3).rows.shape == (0, 3)


@pytest.mark.parametrize("size", [1e-28, 1e-23, 1e-15, 1.0, 1e15])
def test_cosines_are_as_near_as_they_say_whatever_the_lengths(size: float) -> None:
    table = rows_of(500, 64, 3) * size
    found, slack = Cosines.of(table, k=1)(table[:20])
    expected = np.stack([exact_cosines(table, i, np.arange(500)) for i in range(20)])
    assert (np.abs(found.numpy() - expected) <= slack.fixed + slack.share * np.abs(found.numpy())).all()
    assert slack.above(1.0) < 1.02


@pytest.mark.parametrize("losing", ["table", "queries", "both"])
def test_the_worst_rows_for_bf16_are_no_further_off_than_said(losing: str) -> None:
    """Rows of length 1 whose first half is numbers just below the half way between two of bf16, all rounded to one
    side, and rows of signs, which lose nothing: near 0, where the share of the result is small, and near 1."""
    d = 4096
    signs = torch.ones(60, d) / 64
    for row, flipped in enumerate(torch.linspace(0, d, 60).long().tolist()):
        signs[row, d - flipped :] *= -1
    first = (1 + 0.98 * 2**-8) / 64
    worst = signs * torch.cat(
        [torch.full((d // 2,), 64 * first), torch.full((d // 2,), 64 * (2 / d - first**2) ** 0.5)]
    )
    table, queries = (worst if losing in (one, "both") else signs for one in ("table", "queries"))
    found, slack = Cosines.of(table, k=1)(queries)
    expected = (
        (queries.double() @ table.double().T) / queries.double().norm(dim=1)[:, None] / table.double().norm(dim=1)
    )
    off = (found - expected).abs()
    assert (off <= slack.fixed + slack.share * found.abs()).all() and slack.above(1.0) < 1.02


def test_no_first_look_where_cosines_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MAX_UNDECIDED_SHARE", 1 / 200)
    apart, crowded = rows_of(3000, 128, 10), 1 + 0.05 * rows_of(3000, 128, 11)
    assert Cosines.of(crowded, k=10).rounding_loss is None and Cosines.of(apart, k=1000).rounding_loss is None
    assert Cosines.of(apart, k=0).rounding_loss is None
    assert (Cosines.of(apart, k=3).rounding_loss is not None) == products.has_fast_bf16()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_some_cosines_are_measured_again_in_fp32(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCK_BYTES", 4 * 24 * 7)
    table, others = rows_of(60, 24, 9).to(kind), np.array([3, 59, 7, *range(20, 50)])
    table[7] = 0
    one = Cosines.of(table)
    assert np.abs(one.measure(5, others) - exact_cosines(table, 5, others)).max() <= one.slack.fixed
    assert one.measure(5, others).dtype == np.float32


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_cosines_do_not_follow_torchs_default_dtype(
    kind: torch.dtype, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that loads a model may have set another one."""
    if not small:
        monkeypatch.setattr(products, "SMALL_BYTES", 0)
        monkeypatch.setattr(products, "BLOCK_BYTES", 64 * 4 * 7)
    table = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.cosine_similarity(table[:5].double()[:, None], table.double(), dim=2)
    torch.set_default_dtype(kind)
    try:
        values, slack = Cosines.of(table)(table[:5])
    finally:
        torch.set_default_dtype(torch.float32)
    assert values.dtype == torch.float32
    assert float((values - expected).abs().max()) <= slack.fixed


def test_a_product_is_that_of_torch() -> None:
    """Whichever library makes it, and for parts of a tensor too."""
    rows, others = torch.randn(70, 96, generator=torch.Generator().manual_seed(0)), rows_of(300, 96, 4)
    torch.testing.assert_close(product(rows, others), rows @ others.T, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(product(rows[3:9], others[5:200]), rows[3:9] @ others[5:200].T, atol=1e-4, rtol=1e-5)
    rows, others = rows[:, ::2], others[:, 48:]
    torch.testing.assert_close(product(rows, others), rows @ others.T, atol=1e-4, rtol=1e-5)


def test_tiny_rows_are_found_among_others() -> None:
    table = rows_of(300, 16, 5)
    table[::9] *= 1e-23
    assert search(table, table, 1).rows[:, 0].tolist() == list(range(300))


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_rows_without_numbers_are_near_nothing(metric: Metric) -> None:
    table, queries = rows_of(200, 8, 6), rows_of(5, 8, 7)
    expected = search(queries, table, 4, metric).rows
    table = torch.cat([table, torch.full((1, 8), torch.nan)])
    queries[2] = torch.nan
    found = search(queries, table, 4, metric)
    assert torch.equal(found.rows[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    assert found.rows.shape == (5, 4) and (found.values[2] == -torch.inf).all()


def test_threads_are_as_before_when_the_last_one_leaves() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), limit_threads(1):
        raise KeyError
    assert torch.get_num_threads() == before
    one, other = limit_threads(1), limit_threads(1)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert torch.get_num_threads() == 1
    other.__exit__(None, None, None)
    assert torch.get_num_threads() == before


def test_threads_that_begin_have_as_many_as_the_first_one_wants() -> None:
    with limit_threads(1), limit_threads(3) as begin, ThreadPoolExecutor(1, initializer=begin) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
