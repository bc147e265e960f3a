"""EmbedCluster and WeightSynth against the literal transcription, and what the scheme promises."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import obfuslm as literal  # noqa: E402

from milkglass.attacks.embeddings.knn import nearest  # noqa: E402
from milkglass.errors import UsageError  # noqa: E402
from milkglass.models.checkpoint import Checkpoint  # noqa: E402
from milkglass.models.resolve import resolve_model  # noqa: E402
from milkglass.nearest.products import SMALL_BYTES
from milkglass.schemes.clustering import LARGE_TABLE_ROWS, embed_cluster, merge_small_clusters, weight_synth, zero_rows
from milkglass.schemes.mixture import Mixture  # noqa: E402
from milkglass.schemes.obfuslm import ObfusLM


def table_of(seed: int, n: int, d: int, duplicates: int = 0) -> torch.Tensor:
    """Rows in loose groups, some of them exactly equal."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(max(2, n // 20), d))
    table = centres[rng.integers(len(centres), size=n)] + 0.7 * rng.normal(size=(n, d))
    table[:duplicates] = table[0]
    return torch.from_numpy(table.astype(np.float32))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(40, 400),
    k=st.integers(1, 12),
    beta=st.sampled_from([0.0, 0.5, 0.8, 0.9, 0.95]),
    duplicates=st.sampled_from([0, 0, 30]),
)
def test_same_clusters_as_the_paper(seed: int, n: int, k: int, beta: float, duplicates: int) -> None:
    table = table_of(seed, n, 16, duplicates)
    order = np.random.default_rng(seed + 1).permutation(n)
    fast = embed_cluster(table, order, k, beta)
    slow = literal.embed_cluster(table.double().numpy()[order], k, beta)
    assert [c.tolist() for c in fast] == [order[c].tolist() for c in slow]


def test_same_clusters_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milkglass.nearest.products.BLOCK_BYTES", 1 << 15)
    monkeypatch.setattr("milkglass.schemes.mixture.BLOCK_BYTES", 1 << 15)
    table = table_of(3, 1500, 24, 200)
    order = np.random.default_rng(4).permutation(1500)
    slow = literal.embed_cluster(table.double().numpy()[order], 10, 0.98)
    assert [c.tolist() for c in embed_cluster(table, order, 10, 0.98)] == [order[c].tolist() for c in slow]


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 8.0])
def test_same_weights_for_the_same_noise(epsilon: float) -> None:
    table = table_of(5, 300, 16, 10)
    x = table.double().numpy()
    clusters = literal.embed_cluster(x, 7, 0.9)
    noise = np.random.default_rng(6).laplace(size=sum(len(c) ** 2 for c in clusters))
    scheme = ObfusLM(k=7, epsilon=epsilon, beta=0.9, leftover="paper")
    mixture = scheme.mixture(table, np.arange(300), lambda n: noise[:n])
    expected = literal.weight_synth(x, clusters, epsilon, noise) @ x
    np.testing.assert_allclose(mixture.apply(table, np.arange(300)).numpy(), expected, atol=2e-6)


def test_the_noise_scale_does_not_depend_on_epsilon() -> None:
    """Deviation 4, seen from outside: at tiny epsilon the weights are pure noise, not uniform."""
    table = table_of(7, 200, 16)
    rng = np.random.default_rng(8)
    mixture = ObfusLM(k=10, epsilon=1e-9, beta=0.9).mixture(table, np.arange(200), lambda n: rng.laplace(size=n))
    largest = [mixture.weights[mixture.indptr[i] : mixture.indptr[i + 1]].max() for i in range(200)]
    assert np.mean(largest) > 0.12  # uniform weights would be at most 0.1


def test_duplicates_and_singletons_bring_no_nan() -> None:
    table = torch.ones(50, 4)
    mixture = ObfusLM(k=5, beta=0.5).mixture(table, np.arange(50), lambda n: np.full(n, 1e300))
    assert torch.equal(mixture.apply(table, np.arange(50)), table)
    alone = Mixture.of(3, [np.array([1])], [np.ones((1, 1), np.float32)])
    assert torch.equal(alone.apply(table[:3], np.arange(3)), table[:3])


def test_merged_clusters_keep_every_token_once_and_reach_k() -> None:
    table = table_of(9, 600, 16)
    order = np.random.default_rng(0).permutation(600)
    left = embed_cluster(table, order, 10, 0.95)
    merged = merge_small_clusters(table, left, 10)
    assert min(map(len, left)) < 10 <= min(map(len, merged))
    assert sorted(np.concatenate(merged).tolist()) == list(range(600))


def test_the_promise_counts_what_was_kept() -> None:
    clusters = [np.arange(10), np.arange(10, 13), np.array([13])]
    weights = [np.full((len(c), len(c)), 1 / len(c), np.float32) for c in clusters]
    promise = Mixture.of(16, clusters, weights).cluster_report(10)
    assert (promise.clusters, promise.sizes) == (3, {10: 1, 3: 1, 1: 1})
    assert (promise.below_k, promise.singletons, promise.verbatim) == (4, 1, 2)


def test_zero_rows_are_found() -> None:
    table = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    table[[4, 9]] = 0
    assert np.flatnonzero(zero_rows(table)).tolist() == [4, 9]


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"k": 0}, "k is 0"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
        ({"beta": 1.0}, "beta is 1.0"),
        ({"leftover": "drop"}, "leftover is 'drop'"),
    ],
)
def test_parameters_out_of_range_are_named(parameters: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ObfusLM(**parameters)  # type: ignore[arg-type]


def test_too_few_candidates_is_refused_before_any_work() -> None:
    with pytest.raises(UsageError, match=r"\b500 tokens\b.*\b0\.99\b.*\b5 candidates\b.*\b10\b") as caught:
        ObfusLM().cluster(torch.randn(500, 8), np.arange(500))
    assert "--k 5 " in caught.value.hint and "--set beta=0.981" in caught.value.hint
    ObfusLM(beta=0.981).require_candidates(500)
    with pytest.raises(UsageError) as caught:
        ObfusLM(k=501, beta=0).require_candidates(500)
    assert "--k 500 " in caught.value.hint and "beta" not in caught.value.hint, "no beta leaves more than there are"


def test_a_half_precision_table_stays_so() -> None:
    table = table_of(1, 200, 8).bfloat16()
    rng = np.random.default_rng(8)
    mixture = ObfusLM(k=5, beta=0.9).mixture(table, np.arange(200), lambda n: rng.laplace(size=n))
    mixed = mixture.apply(table, np.arange(200))
    exact = mixture.apply(table.float(), np.arange(200))
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, exact.bfloat16())


def test_nearest_neighbour_reads_a_plain_table_and_less_of_a_mixed_one() -> None:
    table = table_of(2, 500, 32)
    rng = np.random.default_rng(8)
    mixture = ObfusLM(k=10, beta=0.95).mixture(table, np.arange(500), lambda n: rng.laplace(size=n))
    truth = torch.arange(500)
    assert (nearest(table, table, 1)[:, 0] == truth).float().mean() == 1
    assert (nearest(mixture.apply(table, np.arange(500)), table, 1)[:, 0] == truth).float().mean() < 0.3


@pytest.mark.parametrize("epsilon,expected", [(0.1, 0.115), (0.3, 0.134), (1.0, 0.224)])
def test_how_often_the_own_weight_is_the_largest_on_a_real_table(
    epsilon: float, expected: float, real_clusters: tuple[torch.Tensor, list[np.ndarray]]
) -> None:
    """The paper's Table 10 (KNN+ .133, .148, .233 on another model) fits this reading of Algorithm 2, with noise drawn
    for each weight by itself; one scalar for a row, or noise that falls with epsilon, would be far from it."""
    table, clusters = real_clusters
    rng = np.random.default_rng(0)
    blocks = weight_synth(table, clusters, epsilon, lambda count: rng.laplace(size=count))
    whole = blocks[0].base  # arrays of their own would split the memory
    assert whole is not None and all(block.base is whole for block in blocks)
    own = np.concatenate([block.argmax(1) == np.arange(len(block)) for block in blocks])
    assert own.mean() == pytest.approx(expected, abs=0.02)


@pytest.fixture(scope="module")
def real_clusters() -> tuple[torch.Tensor, list[np.ndarray]]:
    table = Checkpoint.open(resolve_model("demo:minilm")).read("embeddings.word_embeddings.weight")
    order = np.random.default_rng(1).permutation(np.arange(999, len(table)))  # without special and unused tokens
    return table, embed_cluster(table, order, 10, 0.99)


@pytest.mark.parametrize(
    ("small", "many", "tiny"),
    [(SMALL_BYTES, LARGE_TABLE_ROWS, 1e-23), (0, LARGE_TABLE_ROWS, 1e-23), (SMALL_BYTES, 0, 1e-23), (0, 0, 1.0)],
)
@pytest.mark.parametrize(("k", "beta", "dtype"), [(2, 0.99, torch.float32), (3, 0.995, torch.bfloat16)])
def test_same_clusters_where_most_rows_are_never_looked_at(
    k: int, beta: float, dtype: torch.dtype, small: int, many: int, tiny: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large enough for likely values (nearest/select.py); with a first look in bf16 (many = 0) and without; part of a
    table with zeros, equal rows and tiny ones."""
    monkeypatch.setattr("milkglass.nearest.products.SMALL_BYTES", small)
    monkeypatch.setattr("milkglass.schemes.clustering.LARGE_TABLE_ROWS", many)
    monkeypatch.setattr("milkglass.nearest.products.MAX_UNDECIDED_SHARE", 1.0)
    table = table_of(11, 2100, 16, 40)
    table[5], table[50:60] = 0, table[50:60] * tiny
    table = table.to(dtype)
    order = np.random.default_rng(12).permutation(2100)[:2000]
    slow = literal.embed_cluster(table.double().numpy()[order], k, beta)
    assert [c.tolist() for c in embed_cluster(table, order, k, beta)] == [order[c].tolist() for c in slow]


@pytest.mark.parametrize("small", [SMALL_BYTES, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_same_clusters_of_rows_that_bf16_holds(
    seed: int, dtype: torch.dtype, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs, times small integers: they lose nothing in bf16, but their products do."""
    monkeypatch.setattr("milkglass.nearest.products.SMALL_BYTES", small)
    monkeypatch.setattr("milkglass.nearest.products.MAX_UNDECIDED_SHARE", 1.0)
    monkeypatch.setattr("milkglass.schemes.clustering.LARGE_TABLE_ROWS", 0)
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], size=(600, 256), p=[0.2, 0.8]) * rng.integers(1, 8, size=(600, 1))
    slow = literal.embed_cluster(signs, 5, 0.9)
    found = embed_cluster(torch.from_numpy(signs).to(dtype), np.arange(600), 5, 0.9)
    assert [one.tolist() for one in found] == [list(one) for one in slow]


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_small_clusters_are_merged_one_after_the_other(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition, a loop, whichever small clusters are looked at together."""
    table, k = table_of(13, 500, 16), 6
    clusters = embed_cluster(table, np.random.default_rng(14).permutation(500), k, 0.96)
    monkeypatch.setattr("milkglass.schemes.clustering.BLOCK_BYTES", 4 * len(clusters) * rows)
    unit = torch.nn.functional.normalize(table.double(), dim=1)
    merged, means = list(clusters), [unit[torch.from_numpy(c)].mean(0) for c in clusters]
    for i in range(len(merged)):
        others = [j for j in range(len(merged)) if j != i and len(merged[j])]
        if 0 < len(merged[i]) < k and others:
            fitting = [j for j in others if len(merged[j]) + len(merged[i]) < 2 * k] or others
            j = max(fitting, key=lambda j: float(torch.cosine_similarity(means[i], means[j], dim=0)))
            sizes = len(merged[i]), len(merged[j])
            means[j] = (sizes[0] * means[i] + sizes[1] * means[j]) / sum(sizes)
            merged[j], merged[i] = np.concatenate([merged[j], merged[i]]), merged[i][:0]
    assert sum(len(c) < k for c in clusters) > 20
    assert [c.tolist() for c in merge_small_clusters(table, clusters, k)] == [c.tolist() for c in merged if len(c)]
