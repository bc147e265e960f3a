"""Samples round(r Z) exactly, for a real Gaussian or Laplacian Z: noise on a grid without errors of floating point.

    Z = F^-1(U),    U = 0.b0 b1 b2 ...  an endless sequence of secret bits,    K = round(r Z)

K is an integer, and every integer can occur. Since n + round(t) = round(n + t) for an integer n, a mechanism that adds
K to an integer n releases exactly round(n + r Z): a function of the real mechanism's output n + r Z, which keeps its
(epsilon, delta). Floating-point noise sigma * z does not have this property (Mironov 2012, CCS, section 4): it misses
some numbers, different ones for each input, and so reveals the input.

A sample is computed from one sign bit and 63 bits of the tail's probability, inverted in fp64. If rounding errors or
the bits not yet drawn could change K, the tail's probability at the neighbouring boundary is computed with 60 digits,
and further bits are drawn until K is certain. `reference/noise.py` is the literal oracle, `vectors/noise.json` its
answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from milkglass.noise.stream import Stream

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

SAMPLES_AT_A_TIME = 1 << 16  # samples computed at a time: their arrays fit a CPU's cache
SMALL_TAIL = 2.0**-32  # a tail below this is worked out with 60 digits
INVERSE_ERROR = 2.0**-42  # bound on the error of the inverse in fp64, relative to 1 + z: 200 times that of SciPy's
TAIL_DIGITS = 60  # decimal digits of a tail that is computed by mpmath


def gaussian(stream: Stream, count: int, ratio: float) -> Integers:
    """Returns (count,) samples of round(ratio Z), Z standard normal. `ratio` is the deviation over the grid's step."""
    return _samples(stream, count, ratio, lambda tail: -ndtri(tail), _gaussian_tail)


def laplace(stream: Stream, count: int, ratio: float) -> Integers:
    """Returns (count,) samples of round(ratio Z), Z Laplacian with scale 1. `ratio` is scale over the grid's step."""
    return _samples(stream, count, ratio, lambda tail: -np.log(2 * tail), _laplace_tail)


def _samples(
    stream: Stream, count: int, ratio: float, inverse: Callable[[Floats], Floats], tail: Callable[[Any], Any]
) -> Integers:
    """Returns (count,) samples of round(ratio Z), by the inverse of Z's tail in fp64 and the tail with 60 digits.

    Raises ValueError for a ratio that is not above 0 and below 2^56.
    """
    if not 0 < ratio < 2.0**56:
        raise ValueError(f"the noise is {ratio} grid steps wide, more than 0 and less than 2^56 is supported")
    samples = np.empty(count, np.int64)
    for start in range(0, count, SAMPLES_AT_A_TIME):
        words = stream.long_words(min(SAMPLES_AT_A_TIME, count - start))
        bits = words >> np.uint64(1)
        magnitude, is_unsure = _round(bits, ratio, inverse)
        for index in np.flatnonzero(is_unsure).tolist():
            magnitude[index] = _magnitude_by_bits(int(bits[index]), ratio, int(magnitude[index]), tail, stream.reserve)
        samples[start : start + len(words)] = np.where(words & np.uint64(1), -magnitude, magnitude)
    return samples


def _round(bits: NDArray[np.uint64], ratio: float, inverse: Callable[[Floats], Floats]) -> tuple[Integers, Any]:
    """Returns (n,) round(ratio |Z|), computed in fp64, and (n,) whether it may be wrong.

    Args:
        bits: (n,) whole numbers of 63 bits. The tail is (bits + 1/2) / 2^64.
    """
    tail = (bits.astype(np.float64) + 0.5) * 2.0**-64
    z = inverse(tail)
    scaled = ratio * z + 0.5
    magnitude = np.floor(scaled)
    # bits that were not drawn: dz = dp / density, and the tail over the density is at most 1.26 (Gaussian), 1 (Laplace)
    slack = (ratio * INVERSE_ERROR) * (1 + z) + (ratio * 1.3 * 2.0**-64) / tail
    is_unsure = np.abs(scaled - magnitude - 0.5) >= 0.5 - slack
    return magnitude.astype(np.int64), is_unsure | (tail < SMALL_TAIL)


def _magnitude_by_bits(bits: int, ratio: float, guess: int, tail: Callable[[Any], Any], reserve: Stream) -> int:
    """Returns the magnitude K with |Z| in [(K - 1/2) / r, (K + 1/2) / r), by as many bits as that takes."""
    import mpmath

    width = 64
    with mpmath.workdps(TAIL_DIGITS):
        while True:
            mpmath.mp.dps = max(TAIL_DIGITS, width // 3 + 20)
            if bits:  # else the tail has no lower bound yet
                magnitude = _magnitude(mpmath.mpf(bits + 1) / 2**width, ratio, guess, tail)
                if magnitude == _magnitude(mpmath.mpf(bits) / 2**width, ratio, magnitude, tail):
                    return magnitude
            bits, width = (bits << 64) | int(reserve.long_words(1)[0]), width + 64


def _magnitude(probability: Any, ratio: float, guess: int, tail: Callable[[Any], Any]) -> int:
    """Returns how many of the boundaries (j + 1/2) / r, j from 0, have a tail of at least this probability."""
    import mpmath

    def is_reached(j: int) -> bool:
        return bool(tail((j + mpmath.mpf(1) / 2) / mpmath.mpf(ratio)) >= probability)

    low, high, step = guess, guess, 1  # the first boundary that is not reached lies in [low, high]
    while low > 0 and not is_reached(low - 1):
        high, low, step = low - 1, max(0, low - step), 2 * step
    while is_reached(high):
        low, high, step = high + 1, high + step, 2 * step
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_reached(middle) else (low, middle)
    return low


def _gaussian_tail(z: Any) -> Any:
    """Returns P(Z > z) for a standard normal Z."""
    import mpmath

    return mpmath.erfc(z / mpmath.sqrt(2)) / 2


def _laplace_tail(z: Any) -> Any:
    """Returns P(Z > z) for a Laplacian Z with scale 1, z from 0."""
    import mpmath

    return mpmath.exp(-z) / 2
