"""Secret matrices over rows: bounded condition, exact inverses, shields of a stated energy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from milkglass.noise.root import MixingMatrix, NoiseStream


def rows(t: int = 12, d: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(t, d))).float()


def draws(key: int = 1) -> NoiseStream:
    return NoiseStream(bytes([key]) * 32)


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e4])
def test_the_condition_number_is_bounded(condition: float) -> None:
    for key in range(5):
        found = np.linalg.cond(MixingMatrix(draws(key), rows(), condition).matrix.numpy())
        assert condition**0.5 * (1 - 1e-9) < found <= condition * (1 + 1e-9)


@pytest.mark.parametrize(("condition", "shields"), [(1.0, 0), (10.0, 0), (1e4, 0), (1.0, 3), (10.0, 3)])
def test_products_come_back_exactly(condition: float, shields: int) -> None:
    """To fp32 rounding times the condition number."""
    own, weight = rows(), rows(40, 7, seed=1)
    matrix = MixingMatrix(draws(), own, condition, shields, shield_energy=100.0)
    assert np.allclose(matrix.matrix @ matrix.inverse, np.eye(12 + shields), atol=1e-9)
    seen = matrix.mix(own)
    assert seen.shape == (12 + shields, 40)
    assert seen.dtype == torch.float32
    expected = own.double().numpy() @ weight.double().numpy()
    tolerance = 1e-6 * condition * (100.0 if shields else 1.0) ** 0.5
    assert np.abs(matrix.unmix(seen @ weight).numpy() - expected).max() < tolerance * np.abs(expected).max()


def test_an_orthogonal_matrix_keeps_products_of_rows_and_another_does_not() -> None:
    """U U^T is similar to H H^T where A is orthogonal: its eigenvalues are those of the text."""
    own = rows().double()
    expected = np.linalg.eigvalsh((own @ own.T).numpy())

    def seen(condition: float, shields: int = 0) -> np.ndarray:
        u = MixingMatrix(draws(), own, condition, shields).mix(own)
        return np.linalg.eigvalsh((u @ u.T).numpy())

    assert np.allclose(seen(1.0), expected, rtol=1e-9)
    assert not np.allclose(seen(10.0), expected, rtol=0.1)
    assert not np.allclose(seen(1.0, shields=2)[2:], expected, rtol=1e-3)


def test_a_shield_has_the_energy_that_is_stated() -> None:
    own = rows()
    shields = MixingMatrix(draws(), own, 1.0, 4, shield_energy=50.0).shields
    mean = (own.numpy().astype(np.float64) ** 2).sum(1).mean()
    assert np.allclose((shields.numpy() ** 2).sum(1), 50.0 * mean, rtol=1e-6)
    assert np.linalg.matrix_rank(shields.numpy()) == 4


def test_other_draws_are_another_matrix_and_the_same_are_the_same() -> None:
    one, same, other = (MixingMatrix(draws(key), rows(), 10.0, 1).matrix for key in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other, atol=0.1)


def test_rotations_are_uniform_in_sign() -> None:
    """By Mezzadri's correction the first entry is symmetric about 0; without it, it never changes its sign."""
    first = [float(draws(key).orthogonal(4)[0, 0]) for key in range(60)]
    assert 15 < sum(one > 0 for one in first) < 45
