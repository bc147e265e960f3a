"""Bytes changed at random places, for the tests of what reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence


def mutated(original: bytes, draw: random.Random, most: int, blocks: Sequence[bytes]) -> bytes:
    """One to `most` changes: a byte set, up to 30 bytes taken out or put in, or one of `blocks` written over."""
    data = bytearray(original)
    for _ in range(draw.randint(1, most)):
        at, kind = draw.randrange(len(data) + 1), draw.random()
        if kind < 0.45:
            data[at : at + 1] = draw.randbytes(1)
        elif kind < 0.65:
            del data[at : at + draw.randint(1, 30)]
        elif kind < 0.85:
            data[at:at] = draw.randbytes(draw.randint(1, 30))
        else:
            block = draw.choice(blocks)
            data[at : at + len(block)] = block
    return bytes(data)
