"""Sigma against the oracles of DP-Forward's code and the literal formula, and what is claimed of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milkglass.accounting import epsilon_of, format_epsilon, sigma_of
from milkglass.errors import UsageError
from milkglass.hidden_states.dp_forward import DPForward
from milkglass.hidden_states.mechanism import HalvesTraining
from tests.hidden_states.kit import literal


@pytest.mark.parametrize(("epsilon", "sigma"), [(8.0, 0.600), (1.0, 3.731)])
def test_the_oracles_of_the_public_code_are_sensitivity_1_and_delta_1e_5(epsilon: float, sigma: float) -> None:
    assert sigma_of(epsilon, 1e-5, 1.0) == pytest.approx(sigma, abs=5e-4)
    assert literal.sigma_of(epsilon, 1e-5, 1.0) == pytest.approx(sigma, abs=5e-4)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 20), st.sampled_from([1e-3, 1e-5, 1e-8]), st.floats(0.1, 10))
def test_sigma_is_the_least_that_the_formula_allows(epsilon: float, delta: float, sensitivity: float) -> None:
    sigma = sigma_of(epsilon, delta, sensitivity)
    assert sigma == pytest.approx(literal.sigma_of(epsilon, delta, sensitivity), rel=1e-6)
    assert (
        literal.delta_of(sigma * 1.001, epsilon, sensitivity)
        < delta
        < literal.delta_of(sigma * 0.999, epsilon, sensitivity)
    )
    assert epsilon_of(sigma, delta, sensitivity) == pytest.approx(epsilon, rel=1e-4)


def test_draws_about_one_text_compose_as_one_draw_with_less_noise() -> None:
    """delta of k Gaussian draws is the formula's at sigma / sqrt(k): Dong, Roth and Su 2022, Corollary 2."""
    assert literal.delta_of(2.0 / 3, epsilon_of(2.0, 1e-5, 1.0, draw_count=9), 1.0) == pytest.approx(1e-5, rel=1e-3)
    assert epsilon_of(2.0, 1e-5, 1.0, draw_count=9) > 3 * 0.9 * epsilon_of(2.0, 1e-5, 1.0)


def test_a_text_replaced_by_another_is_twice_the_clip_away() -> None:
    assert DPForward(clip=1.0).sigma == pytest.approx(2 * 0.6002, abs=1e-3)
    assert DPForward(clip=3.0).sigma == pytest.approx(6 * 0.6002, abs=3e-3)
    assert DPForward(clip=3.0, sensitivity="paper").sigma == pytest.approx(0.6002, abs=1e-4)


def test_the_guarantee_names_what_holds_and_not_what_was_asked_for() -> None:
    assert "(8, 1e-05)-DP for one text replaced" in str(DPForward().guarantee)
    paper = DPForward(sensitivity="paper")
    assert literal.delta_of(paper.sigma, paper.spent_epsilon(), 2.0) == pytest.approx(1e-5, rel=1e-3)
    assert paper.spent_epsilon() > 15
    assert "(8, " not in str(paper.guarantee)


def test_the_guarantee_of_training_counts_every_epoch_unless_noise_is_drawn_once() -> None:
    five = DPForward(training=HalvesTraining(epochs=5))
    assert f"({format_epsilon(five.spent_epsilon(5))}, 1e-05)-DP, " in str(five.guarantee) and "5 draws" in str(
        five.guarantee
    )
    once = DPForward(training=HalvesTraining(epochs=5), redraw=False)
    assert "(8, 1e-05)-DP, " in str(once.guarantee) and "1 draw;" in str(once.guarantee)


def test_the_central_model_claims_nothing_of_texts_that_are_sent() -> None:
    guarantee = str(DPForward(where="central").guarantee)
    assert guarantee.startswith("the server's weights are")
    assert "texts sent, are not" in guarantee


@pytest.mark.parametrize(
    ("given_", "fault"),
    [
        ({"epsilon": 0.0}, "epsilon is 0"),
        ({"epsilon": float("inf")}, "epsilon is inf"),
        ({"delta": 1.0}, "delta is 1"),
        ({"clip": 0.0}, "clip is 0"),
        ({"where": "here"}, "where .*'here'.*local, central"),
        ({"layer": -1}, "layer is -1"),
    ],
)
def test_impossible_parameters_are_refused(given_: dict[str, object], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        DPForward(**given_)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [8.0, 11.72403, 19.12118, 8.17032, 0.0123456, 123456.7, 3.0000001])
def test_a_printed_epsilon_is_never_below_what_holds(value: float) -> None:
    shown = float(format_epsilon(value))
    assert shown >= value * (1 - 1e-11)
    assert shown <= value * 1.001
