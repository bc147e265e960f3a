"""Computes the privacy budget of Gaussian noise, by dp-accounting.

The mechanism is the analytic Gaussian mechanism (Balle and Wang 2018, Theorem 8).

    delta = Phi(D / 2s - eps s / D) - exp(eps) Phi(-D / 2s - eps s / D),  D: sensitivity in L2, s: standard deviation

Any two texts are neighbours: each text is one input of the mechanism, and is replaced as a whole. DP-Forward's public
code gives s = 0.600 at eps = 8 and s = 3.731 at eps = 1, which are the values for D = 1 and delta = 1e-5.
"""

from __future__ import annotations

import math

from milkglass.errors import UsageError

MAX_MEANINGFUL_EPSILON = 10.0  # an epsilon above this promises next to nothing


def sigma_of(epsilon: float, delta: float, sensitivity: float) -> float:
    """Returns the smallest standard deviation of Gaussian noise that gives (epsilon, delta)-DP.

    Args:
        epsilon: above 0.
        delta: between 0 and 1.
        sensitivity: D, the largest L2 distance between the outputs for two neighbouring inputs, above 0.

    Raises:
        UsageError: a value is outside its range.
    """
    _require_positive(epsilon, "epsilon")
    _require_positive(sensitivity, "sensitivity")
    _require_delta(delta)
    from dp_accounting import get_sigma_gaussian

    return float(get_sigma_gaussian(epsilon, delta)) * sensitivity


def epsilon_of(sigma: float, delta: float, sensitivity: float, draw_count: int = 1) -> float:
    """Returns the epsilon that several draws of Gaussian noise about one text spend together.

    k Gaussian mechanisms with sigma are one with sigma / sqrt(k).

    Args:
        sigma: the standard deviation of the noise, above 0.
        delta: between 0 and 1.
        sensitivity: D, the largest L2 distance between the outputs for two neighbouring inputs, above 0.
        draw_count: k, at least 1.

    Raises:
        UsageError: a value is outside its range.
    """
    _require_positive(sigma, "sigma")
    _require_positive(sensitivity, "sensitivity")
    _require_delta(delta)
    if draw_count < 1:
        raise UsageError(f"{draw_count} draws, at least 1 is needed", "count from 1")
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(sigma / sensitivity / math.sqrt(draw_count), delta))


def _require_positive(value: float, name: str) -> None:
    """Raises UsageError unless the value is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{name} is {value}, a finite number above 0 is needed", "8 is DP-Forward's epsilon")


def _require_delta(delta: float) -> None:
    """Raises UsageError unless delta is between 0 and 1."""
    if not 0 < delta < 1:
        raise UsageError(f"delta is {delta}, more than 0 and less than 1 is needed", "1e-5 is common")


def epsilon_warning(epsilon: float) -> str:
    """Returns a clause to print after an epsilon above MAX_MEANINGFUL_EPSILON, and "" for a smaller one.

    With epsilon 10, an outcome may be exp(10), about 22,000, times as likely for one input as for its neighbour.
    """
    return ", which promises next to nothing" if epsilon > MAX_MEANINGFUL_EPSILON else ""


def format_epsilon(epsilon: float) -> str:
    """Returns an epsilon as text with four significant digits, rounded up, so that the printed guarantee holds."""
    if not epsilon > 0 or math.isinf(epsilon):
        return f"{epsilon:g}"
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 3)
    return f"{math.ceil(epsilon / unit * (1 - 1e-12)) * unit:.6g}"
