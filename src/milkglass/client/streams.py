"""Sub-keys by label, and what is drawn of them: key streams, numbers, permutations.

Sub-keys are HKDF-SHA256(root, salt = digest of the base model, info = "milkglass/1 " + label), so a key used with
another model gives another permutation. All draws come from ChaCha20 key streams, never from a framework's generator
(those change between versions, and are not cryptographic). `vectors/` holds known answers.

What this module does not know: what is drawn for.
"""

from __future__ import annotations

import hashlib

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray


def subkey(root: bytes, model_digest: str, label: str) -> bytes:
    """32 bytes for one purpose."""
    salt = model_digest.encode()
    return HKDF(hashes.SHA256(), 32, salt, b"milkglass/1 " + label.encode()).derive(root)


class Stream:
    """A ChaCha20 key stream. The nonce is fixed because each sub-key is used for one stream only."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.ChaCha20(key, b"\0" * 16), None).encryptor()

    def words(self, count: int) -> NDArray[np.uint32]:
        """The next `count` little-endian 32-bit words."""
        return np.frombuffer(self._cipher.update(b"\0" * (4 * count)), dtype="<u4")

    def uniform(self, count: int) -> NDArray[np.float64]:
        """`count` numbers strictly between 0 and 1, 52 bits each (with 53, the largest would round to 1)."""
        words = np.frombuffer(self._cipher.update(b"\0" * (8 * count)), dtype="<u8")
        return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def laplace(self, count: int) -> NDArray[np.float64]:
        """`count` draws of the Laplace distribution with scale 1, by its inverse distribution function."""
        centred = self.uniform(count) - 0.5
        return -np.sign(centred) * np.log1p(-2 * np.abs(centred))


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
