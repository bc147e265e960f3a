"""Rounded noise, literally: one sample after another, with exact fractions and 60 digits. The oracle of tests/noise.

K = round(r F^-1(U)) for a standard normal, or a Laplacian of scale 1. U's bits come from a ChaCha20 key stream: of each
little-endian 64-bit word the lowest bit is the sign, and the other 63 are the first bits after the leading zero of the
tail's probability, 0.0b1b2... in binary. Where 63 bits do not decide K, further words come from a stream of the same
key whose nonce is 1 (the first one's is 0). Derived from the definition: no fp64 is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from fractions import Fraction

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from mpmath import erfc, exp, mp, mpf, sqrt

mp.dps = 80


def words(key: bytes, nonce: int) -> Iterator[int]:
    cipher = Cipher(algorithms.ChaCha20(key, nonce.to_bytes(16, "big")), None).encryptor()
    while True:
        yield struct.unpack("<Q", cipher.update(bytes(8)))[0]


def gaussian_tail(z: mpf) -> mpf:
    return erfc(z / sqrt(2)) / 2


def laplace_tail(z: mpf) -> mpf:
    return exp(-z) / 2


def exact(number: Fraction) -> mpf:
    return mpf(number.numerator) / mpf(number.denominator)


def magnitude(low: Fraction, high: Fraction, ratio: Fraction, tail: Callable[[mpf], mpf]) -> int | None:
    """The K >= 0 whose bin holds every |Z| with a tail's probability in [low, high]; None if there is no such K."""
    top = 1
    while tail(exact((top + Fraction(1, 2)) / ratio)) >= exact(low):
        top *= 2
        if top > 2**80:
            return None  # low is 0
    bottom = 0
    while bottom < top:  # the least K beyond whose upper boundary lies less than `low`
        middle = (bottom + top) // 2
        if tail(exact((middle + Fraction(1, 2)) / ratio)) < exact(low):
            top = middle
        else:
            bottom = middle + 1
    lower_boundary_holds = bottom == 0 or tail(exact((bottom - Fraction(1, 2)) / ratio)) >= exact(high)
    return bottom if lower_boundary_holds else None


def samples(key: bytes, count: int, ratio: float, tail: Callable[[mpf], mpf]) -> list[int]:
    first, second = words(key, 0), words(key, 1)
    wide = Fraction(ratio)
    result = []
    for _ in range(count):
        word = next(first)
        bits, width = word >> 1, 64
        while (k := magnitude(Fraction(bits, 2**width), Fraction(bits + 1, 2**width), wide, tail)) is None:
            bits, width = (bits << 64) | next(second), width + 64
        result.append(-k if word & 1 else k)
    return result
