"""The secret of a client half, and the streams that are drawn from it: for each text, each key, each order.

noise/grid.py draws noise on data from `NoiseStream.stream`.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from scipy.special import ndtri

from milkglass.noise.stream import Stream, bound, subkey
from milkglass.sequences import Ids

SECRET = 32  # bytes


class NoiseStream:
    """One stream. The same shapes in the same order under the same key give the same numbers.

    Attributes:
        stream: the source of noise on data.
    """

    def __init__(self, key: bytes | Stream) -> None:
        self.stream = key if isinstance(key, Stream) else Stream(key)

    def bound(self, hidden: torch.Tensor) -> NoiseStream:
        """Returns separate draws for these states (noise/stream.py).

        The last bits of states depend on what else was computed beside them, and noise must not repeat where they
        differ.
        """
        return NoiseStream(bound(self.stream, {"hidden": hidden}))

    def gaussian(self, *shape: int) -> torch.Tensor:
        """Returns standard normal fp32 numbers by the inverse distribution function.

        Only for secret keys, never for noise on data.
        """
        flat = ndtri(self.stream.uniform(math.prod(shape))).astype(np.float32)
        return torch.from_numpy(flat).reshape(shape)

    def orthogonal(self, size: int) -> torch.Tensor:
        """Returns (size, size) fp64, uniform over the orthogonal group."""
        return rotation(self.gaussian(size, size).double())

    def order(self, count: int) -> Ids:
        """Returns a uniform order of 0 to count - 1."""
        return self.stream.order(count)

    def below(self, limit: int, count: int) -> Ids:
        """Returns `count` integers from 0 to limit - 1."""
        return self.stream.integers(limit, count)

    def seed(self) -> int:
        """Returns a seed for PyTorch's generator, which draws the first weights of the halves. These are no secret."""
        return int(self.stream.words(1)[0])


def rotation(gaussian: torch.Tensor) -> torch.Tensor:
    """Returns a uniform orthogonal matrix from standard normals.

    The signs make the factorisation unique (Mezzadri 2007).
    """
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


class NoiseRoot:
    """The secret, 32 bytes, with a salt. Draws under other parameters are independent of the draws here."""

    def __init__(self, secret: bytes, salt: str) -> None:
        self._secret, self._salt = secret, salt

    def draws(self, *label: str | int) -> NoiseStream:
        return NoiseStream(subkey(self._secret, self._salt, "encoder " + " ".join(map(str, label))))

    def of_text(self, ids: Ids, *label: str | int) -> NoiseStream:
        """Returns draws for one text. Its ids are in the label, so that two texts never get the same noise.

        With one noise on two texts, their difference would cross in the clear.
        """
        return self.draws(*label, hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest())
