"""Randomised response over m values, literally: one value after another, with 80 digits. The oracle of tests/noise.

Each value that takes part draws R, uniform over 0 to 2^44 + (m - 1) w - 1, w = ceil(2^44 exp(-epsilon)) + 1. Below 2^44
it is sent as it is; else (R - 2^44) // w = 0, 1, ... says which of the following values, in a circle, is sent instead.
R is a little-endian 64-bit word of a ChaCha20 key stream, modulo; words below 2^64 mod (2^44 + (m - 1) w) are drawn
again, after the others. Derived from the definition: no fp64 is used.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from fractions import Fraction

from mpmath import ceil, exp, mpf
from noise import exact, words

UNIT = 2**44


def weight(epsilon: float) -> int:
    return min(UNIT, int(ceil(mpf(UNIT) * exp(-exact(Fraction(epsilon))))) + 1)


def key_of_text(key: bytes, tokens: list[int]) -> bytes:
    """The key of the draws for one text, from the sub-key and the text's original ids."""
    data = b"".join(struct.pack("<q", one) for one in tokens)
    return hmac.new(key, b"milkglass data" + bytes(16) + data, hashlib.sha256).digest()


def sent(key: bytes, epsilon: float, values: list[int], ids: list[int]) -> list[int]:
    stream, w, m = words(key, 0), weight(epsilon), len(values)
    total = UNIT + (m - 1) * w
    result = list(ids)
    waiting = [at for at, one in enumerate(ids) if one in values]
    while waiting:
        again = []
        for at in waiting:
            word = next(stream)
            if word < 2**64 % total:
                again.append(at)
                continue
            draw = word % total
            if draw >= UNIT:
                step = 1 + (draw - UNIT) // w
                result[at] = values[(values.index(ids[at]) + step) % m]
        waiting = again
    return result
