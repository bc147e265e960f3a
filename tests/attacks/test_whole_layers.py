"""Linear invariants (EDNN paper 5.1) and known weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from milkglass.attacks.embedding.invariants import find
from milkglass.attacks.embedding.known_weight import undo
from milkglass.attacks.embedding.layer_fit import estimate
from milkglass.errors import UsageError
from milkglass.schemes.sentinel import SentinelLMs


def glide(x: torch.Tensor, key: int) -> torch.Tensor:
    return SentinelLMs(reflections=9).transform(x, np.random.default_rng(key))


def test_the_glide_leaves_all_dimensions_but_one_alone() -> None:
    found = find(glide, 24, np.random.default_rng(0))
    assert found.dimension == 23
    x = torch.randn(5, 24, dtype=torch.float64)
    assert torch.allclose(found.basis @ glide(x, 77).double().T, found.basis @ x.T, atol=1e-5)


def test_a_random_matrix_leaves_nothing_and_the_identity_everything() -> None:
    def mixed(x: torch.Tensor, key: int) -> torch.Tensor:
        return x @ torch.randn(24, 24, dtype=x.dtype, generator=torch.Generator().manual_seed(key))

    assert find(mixed, 24, np.random.default_rng(0)).dimension == 0
    assert find(lambda x, key: x, 24, np.random.default_rng(0)).dimension == 24


def test_a_scheme_that_leaves_three_dimensions_alone_is_found_out() -> None:
    def partly(x: torch.Tensor, key: int) -> torch.Tensor:
        y = x.clone()
        y[:, 3:] = y[:, 3:] @ torch.randn(21, 21, dtype=x.dtype, generator=torch.Generator().manual_seed(key))
        return y

    found = find(partly, 24, np.random.default_rng(0))
    assert found.dimension == 3
    assert float(found.basis[:, 3:].abs().max()) < 1e-9


def test_too_few_points_are_refused() -> None:
    with pytest.raises(UsageError, match="span less than 24"):
        find(glide, 24, np.random.default_rng(0), points=2, keys=3)


def test_known_weights_give_the_transformation_and_the_table_back() -> None:
    make = torch.Generator().manual_seed(0)
    phi = [torch.randn(20, 16, generator=make) for _ in range(3)]
    secret = torch.randn(16, 16, generator=make)[:, torch.randperm(16, generator=make)]
    found = estimate(phi, [one @ secret for one in phi])
    assert torch.allclose(found.transformation.float(), secret, atol=1e-5)
    assert found.residual < 1e-6
    table = torch.randn(50, 16, generator=make)
    assert torch.allclose(undo(table @ secret, found.transformation), table, atol=1e-4)


def test_weights_that_drifted_still_give_it_away_and_say_so() -> None:
    make = torch.Generator().manual_seed(1)
    phi = [torch.randn(64, 16, generator=make) for _ in range(6)]
    secret = torch.randn(16, 16, generator=make)
    found = estimate(
        phi, [one @ secret + 0.05 * torch.randn(64, 16, generator=make) * secret.norm() / 4 for one in phi]
    )
    assert 0.02 < found.residual < 0.1
    assert float((found.transformation.float() - secret).norm() / secret.norm()) < 0.02


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="10 rows do not determine"):
        estimate([torch.randn(10, 16)], [torch.randn(10, 16)])
    with pytest.raises(UsageError, match="in pairs"):
        estimate([torch.randn(20, 16)], [torch.randn(21, 16)])
