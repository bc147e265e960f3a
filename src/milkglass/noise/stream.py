"""Makes ChaCha20 key streams, and the sub-keys of which they are made.

A sub-key is HKDF-SHA256(root, salt = digest of the base model, info = "milkglass/1 " + label), so the same key used
with another model gives another permutation. `vectors/` holds known answers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

KEY_BYTES = 32


def subkey(root: bytes, model_digest: str, label: str) -> bytes:
    """Returns the sub-key (KEY_BYTES) of the secret `root` for one purpose, which the label names."""
    salt = model_digest.encode()
    return HKDF(hashes.SHA256(), KEY_BYTES, salt, b"milkglass/1 " + label.encode()).derive(root)


class Stream:
    """Draws numbers from a ChaCha20 key stream: the same key gives the same numbers in the same order.

    A key is used for one stream only, so the nonce is fixed, except for `reserve`.

    Raises:
        ValueError: the key is not of KEY_BYTES bytes.
    """

    def __init__(self, key: bytes, nonce: int = 0) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes, {KEY_BYTES} are needed")
        self._key, self._nonce = key, nonce
        self._cipher = Cipher(algorithms.ChaCha20(key, nonce.to_bytes(16, "big")), None).encryptor()
        self._reserve: Stream | None = None

    @classmethod
    def of_seed(cls, *parts: int | str | bytes) -> Stream:
        """Returns the stream of a seed that consists of these parts. Anyone who guesses the parts can repeat it.

        A client's parts hold 256 secret bits, unless its user gave a seed.
        """
        hasher = hashlib.sha256(b"milkglass seed")
        for part in parts:
            encoded = part if isinstance(part, bytes) else str(part).encode()
            hasher.update(type(part).__name__.encode() + len(encoded).to_bytes(8, "little") + encoded)
        return cls(hasher.digest())

    @property
    def reserve(self) -> Stream:
        """Returns a second stream of the same key, under the next nonce.

        A draw that needs more bits reads them there, so that this stream keeps its positions.
        """
        if self._reserve is None:
            self._reserve = Stream(self._key, self._nonce + 1)
        return self._reserve

    def child(self) -> Stream:
        """Returns an independent stream, whose key is the next 32 bytes of this one."""
        return Stream(self.bytes(KEY_BYTES))

    def derive(self, data: bytes) -> Stream:
        """Returns an independent stream for this data, HMAC-SHA256 under this one's key. This one does not move on."""
        return Stream(hmac.digest(self._key, b"milkglass data" + self._nonce.to_bytes(16, "big") + data, "sha256"))

    def bytes(self, count: int) -> bytes:
        """Returns the next `count` bytes."""
        return self._cipher.update(b"\0" * count)

    def words(self, count: int) -> NDArray[np.uint32]:
        """Returns the next `count` little-endian 32-bit words."""
        return np.frombuffer(self.bytes(4 * count), dtype="<u4")

    def long_words(self, count: int) -> NDArray[np.uint64]:
        """Returns the next `count` little-endian 64-bit words."""
        return np.frombuffer(self.bytes(8 * count), dtype="<u8")

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Returns `count` numbers strictly between 0 and 1, of 52 bits each. With 53, the largest would round to 1."""
        return ((self.long_words(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def random(self, shape: int | tuple[int, ...]) -> NDArray[np.float64]:
        """Returns an array of this shape of `uniform` numbers."""
        return self.uniform(math.prod(np.atleast_1d(shape).tolist())).reshape(shape)

    def laplace(self, count: int) -> NDArray[np.float64]:
        """Returns `count` draws of the Laplace distribution with scale 1 in fp64, by its inverse distribution function.

        Only for numbers that are rounded to a grid afterwards, as in WeightSynth. Noise on data is `grid.add_laplace`.
        """
        centred = self.uniform(count) - 0.5
        return -np.sign(centred) * np.log1p(-2 * np.abs(centred))

    def below(self, limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns (n,) a uniform whole number from 0 to limit - 1 for each limit (n,) from 1 to 2^63 - 1.

        It is exactly uniform: the first 2^64 mod limit of the words are rejected and drawn again. Raises ValueError for
        a limit below 1.
        """
        limits = np.asarray(limits, np.int64)
        if limits.size and int(limits.min()) < 1:
            raise ValueError("a limit below 1")
        unsigned = limits.astype(np.uint64)
        rejected_below = (np.uint64(0) - unsigned) % unsigned  # 2^64 mod limit
        drawn = np.empty(len(limits), np.int64)
        undrawn = np.arange(len(limits))
        while len(undrawn):
            words = self.long_words(len(undrawn))
            accepted = words >= rejected_below[undrawn]
            selected = undrawn[accepted]
            drawn[selected] = (words[accepted] % unsigned[selected]).astype(np.int64)
            undrawn = undrawn[~accepted]
        return drawn

    def integers(self, limit: int, count: int) -> NDArray[np.int64]:
        """Returns `count` uniform whole numbers from 0 to limit - 1."""
        return self.below(np.full(count, limit, np.int64))

    def order(self, count: int) -> NDArray[np.int64]:
        """Returns (count,) a uniform permutation of 0 to count - 1.

        It sorts 64-bit words: among a million, two are equal with a probability below 2^-25.
        """
        return np.argsort(self.long_words(count), kind="stable").astype(np.int64)


# --- streams that depend on the data which their noise covers, so that no noise is ever used for two inputs -----------
# A stream that follows from a secret and a label alone would give two inputs the same noise, and their difference would
# be released without noise. Even one input is two if a gradient is computed with other threads, CPUs or libraries: its
# last bits differ, and they identify the tokens that were read. So the key of noise is an HMAC over the very numbers to
# which the noise is added.


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns the SHA-256 over the tensors' names, shapes, types and numbers."""
    import torch

    hasher = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        hasher.update(json.dumps([name, [*tensor.shape], str(tensor.dtype)]).encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return hasher.digest()


def stream_for(tensors: Mapping[str, torch.Tensor], stream: Stream) -> Stream:
    """Returns an independent stream of `stream` for the noise on these tensors: the same for the same numbers only."""
    return stream.derive(tensors_digest(tensors))
