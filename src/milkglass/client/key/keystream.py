"""Permutations of a vocabulary, drawn from a key's streams (noise/stream.py). `vectors/` holds known answers.

Out of scope: what is permuted, and for whom.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from milkglass.noise.stream import Stream


def permutation(key: bytes, n: int, pinned: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """A uniform permutation of n ids, sigma[original] = scrambled; `pinned` ids keep their place.

    Fisher-Yates from the end; each index by rejection sampling of 32-bit words, so that no index is likelier.
    """
    movable = np.setdiff1d(np.arange(n, dtype=np.int32), np.asarray(pinned, np.int32))
    shuffled = movable.tolist()
    stream = Stream(key)
    buffer: list[int] = []
    for i in range(len(shuffled) - 1, 0, -1):
        limit = (1 << 32) - (1 << 32) % (i + 1)
        while True:
            if not buffer:
                buffer = stream.words(4096).tolist()[::-1]
            word = buffer.pop()
            if word < limit:
                break
        j = word % (i + 1)
        shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
    sigma = np.arange(n, dtype=np.int32)
    sigma[movable] = shuffled
    return sigma


def hashed_permutation(key: bytes, n: int, pinned: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """The same by hashing, as SentinelLMs maps tokens: ids sorted by BLAKE2b of each under the key."""
    movable = np.setdiff1d(np.arange(n, dtype=np.int32), np.asarray(pinned, np.int32))
    hashes = [hashlib.blake2b(int(one).to_bytes(8, "little"), key=key, digest_size=16).digest() for one in movable]
    sigma = np.arange(n, dtype=np.int32)
    sigma[movable[sorted(range(len(movable)), key=hashes.__getitem__)]] = movable
    return sigma
