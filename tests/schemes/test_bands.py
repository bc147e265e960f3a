"""Frequency bands: what may share a cluster."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from milkglass.errors import UsageError
from milkglass.schemes.bands import MIN_CLUSTERS_PER_BAND, Bands
from milkglass.schemes.catalogue import scheme_named
from milkglass.schemes.obfuslm import ObfusLM

N, K = 900, 4


def counts() -> np.ndarray:
    return np.random.default_rng(0).permutation((20_000 / np.arange(1, N + 1) ** 1.1).astype(np.int64))


def test_bands_hold_every_row_once_the_commonest_first_and_none_too_small() -> None:
    known = counts()
    order = np.random.default_rng(1).permutation(N)[: N - 50]
    parts = Bands.from_counts(known, 2.0).split(order, N, K)
    assert sorted(np.concatenate(parts).tolist()) == sorted(order.tolist())
    assert min(map(len, parts)) >= MIN_CLUSTERS_PER_BAND * K
    for before, after in zip(parts, parts[1:], strict=False):
        assert known[before].min() >= known[after].max() / 2, "two bands overlap by less than a factor"
    wide = parts[1:]  # the first is joined of many classes, since few tokens are so common
    assert max(known[part].max() / max(1, known[part].min()) for part in wide) <= 4


def test_clusters_stay_within_bands_and_reach_k() -> None:
    bands = Bands.from_counts(counts(), 2.0)
    table = torch.randn(N, 16, generator=torch.Generator().manual_seed(0))
    order = np.random.default_rng(1).permutation(N)
    scheme = ObfusLM(K, 0.1, 0.99, bands=bands)
    clusters = scheme.cluster(table, order)
    assert sorted(np.concatenate(clusters).tolist()) == list(range(N))
    assert min(map(len, clusters)) >= K
    band = np.empty(N, np.int64)
    for number, part in enumerate(bands.split(order, N, K)):
        band[part] = number
    assert all(len(np.unique(band[one])) == 1 for one in clusters)
    free = ObfusLM(K, 0.1, 0.9).cluster(table, order)
    assert not all(len(np.unique(band[one])) == 1 for one in free)


def test_a_key_keeps_them() -> None:
    scheme = ObfusLM(K, 0.1, bands=Bands.from_counts(counts(), 2.0))
    described = scheme.document()
    assert scheme_named(described.pop("name"), described) == scheme
    assert "classes" not in repr(scheme), "how common tokens are in a private text is private"


def test_bands_that_cannot_be() -> None:
    for factor in (1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=rf"\b{factor}\b.*\b1\b"):
            Bands.from_counts(counts(), factor)
    with pytest.raises(UsageError, match="no tokens"):
        Bands.from_counts(np.zeros(5, np.int64), 2.0)
    with pytest.raises(UsageError, match=r"\b900 tokens\b.*\b5\b"):
        Bands.from_counts(counts(), 2.0).split(np.arange(5), 5, 1)
