"""What is released lies on one grid, whatever the input is, and inputs never grow past their bounds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from milkglass.errors import UsageError
from milkglass.noise import clipping, grid
from milkglass.noise.stream import Stream
from tests.noise.kit import KEY

WIDTHS = st.floats(1e-6, 1e6)


def numbers(seed: int = 0, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(scale * np.random.default_rng(seed).normal(size=shape or (50,)))


@pytest.mark.parametrize("mechanism", [grid.add_gaussian, grid.add_laplace])
@pytest.mark.parametrize("width", [1e-4, 1.2005, 7.4613, 300.0])
def test_all_inputs_reach_the_same_numbers(mechanism: Any, width: float) -> None:
    """Every released number is a multiple of the grid's step, for every input: no input is ruled out by any output."""
    step = grid.step_size(width, 1.0)
    assert math.log2(step) == int(math.log2(step)) and width / 2**25 < step <= width / 2**24
    for seed in range(5):
        x = clipping.matrix_l2(numbers(seed, 30, 16), 1.0)
        released = mechanism(x, width, Stream.of_seed(seed), 1.0)
        assert torch.equal(released, (released / step).round() * step)
        last = ((released / step).long() & 255).flatten().numpy()
        assert len(np.unique(last)) > 200, "all low bits occur"


def test_the_same_stream_moves_two_inputs_alike() -> None:
    """released - cut(x) does not depend on x: the noise is added to a whole number of steps, and nothing is rounded."""
    one, two = numbers(1), numbers(2)
    step = grid.step_size(0.7, 8.0)
    noise = [grid.add_gaussian(x, 0.7, Stream(KEY), 8.0) - step * grid.whole_steps(x, 0.7, 8.0) for x in (one, two)]
    assert torch.equal(*noise)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), WIDTHS)
def test_cutting_never_lengthens(values: list[float], width: float) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    before, cut = x.clone(), grid.whole_steps(x, width, 1e3) * grid.step_size(width, 1e3)
    assert torch.equal(x, before), "x is not changed"
    assert (cut.abs() <= x.abs()).all() and (cut * x >= 0).all()
    assert ((x - cut).abs() < grid.step_size(width, 1e3)).all()


def exact_square(x: torch.Tensor) -> Fraction:
    return sum((Fraction(value) ** 2 for value in x.flatten().tolist()), Fraction(0))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_bounds_hold_exactly(seed: int, scale: float, most: float) -> None:
    """Not up to rounding: by fractions."""
    x = numbers(seed, 5, 7, scale=scale)
    assert exact_square(clipping.matrix_l2(x, most)) <= Fraction(most) ** 2
    step = grid.step_size(most, most)
    assert exact_square(step * grid.whole_steps(clipping.matrix_l2(x, most), most, most)) <= Fraction(most) ** 2
    factor = clipping.l2_factor([x.float()], most)
    assert exact_square(step * grid.whole_steps(x.float(), most, most, factor)) <= Fraction(most) ** 2
    pair = clipping.l2({"a": x[:2], "b": x[2:].float()}, most)
    assert exact_square(pair["a"]) + exact_square(pair["b"]) <= Fraction(most) ** 2
    for row in clipping.rows_l1(x, most):
        assert sum(abs(Fraction(value)) for value in row.tolist()) <= Fraction(most)


def test_nothing_to_clip_is_left_alone() -> None:
    x = numbers(0, 4, 3)
    assert torch.equal(clipping.matrix_l2(x, 100.0), x) and torch.equal(clipping.rows_l1(x, 100.0), x)
    assert torch.equal(clipping.matrix_l2(torch.zeros(2, 2), 1.0), torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize(("mechanism", "law"), [(grid.add_gaussian, "norm"), (grid.add_laplace, "laplace")])
@pytest.mark.parametrize(("width", "bound"), [(0.3, 1.0), (1e-9, 1.0), (40.0, None)])
def test_the_noise_has_its_law(mechanism: Any, law: str, width: float, bound: float | None) -> None:
    x = 0.5 * torch.ones(40_000, dtype=torch.float64)
    noise = (mechanism(x, width, Stream(KEY), bound) - x).numpy() / width
    assert kstest(noise, law).pvalue > 1e-3


def test_data_far_beyond_its_noise_is_refused_and_never_cut_off() -> None:
    with pytest.raises(UsageError, match="noise"):
        grid.add_gaussian(torch.tensor([0.5]), 1e-10, Stream(KEY))


def test_a_gradient_passes_and_the_numbers_are_exact() -> None:
    x = numbers().float().requires_grad_()
    released = grid.add_gaussian(x, 0.5, Stream(KEY), 8.0)
    sent = grid.straight_through(x, released)
    assert torch.equal(sent, released.float())
    sent.square().sum().backward()
    assert torch.equal(x.grad, 2 * released.float())


def test_sigma_suffices_for_an_output_that_is_rounded_to_a_coarse_grid() -> None:
    """Two neighbours at distance 1, a coarse law: no set of outputs has a probability above e^eps the other's plus
    delta, by the bins themselves."""
    from milkglass.accounting import sigma_of

    epsilon, delta = 1.0, 1e-2
    sigma, step = sigma_of(epsilon, delta, 1.0), 0.25
    edges = (np.arange(-400, 401) - 0.5) * step
    from scipy.stats import norm

    one, two = (np.diff(norm.cdf((edges - shift) / sigma)) for shift in (0.0, 1.0))
    worst = float(np.maximum(one - math.exp(epsilon) * two, 0).sum())
    assert worst <= delta and worst > 0.5 * delta


@pytest.mark.parametrize("mechanism", [grid.add_gaussian, grid.add_laplace])
def test_a_number_that_is_not_finite_is_refused_and_not_released_without_noise(mechanism: Any) -> None:
    for broken in (math.nan, math.inf, -math.inf):
        with pytest.raises(UsageError):
            mechanism(torch.tensor([broken, 1.0]), 1.0, Stream.of_seed(0), 1.0)
