"""Secret numbers as tensors: every draw of an encoder's defence comes from ChaCha20 key streams.

A sub-key is used for one stream only (client/streams.py). What this module does not know: what numbers are for, and the
rounding of floating-point noise (Mironov 2012, CCS): a draw is a 52-bit uniform number put through an inverse
distribution function in fp64 and rounded to fp32, which no proof of differential privacy over the reals covers.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri

from milkglass.client.streams import Stream, subkey
from milkglass.sequences import Ids

SECRET = 32  # bytes


class Draws:
    """One stream. Asking for the same shapes in the same order under the same key gives the same numbers."""

    def __init__(self, key: bytes) -> None:
        self._stream = Stream(key)

    def _shaped(self, flat: NDArray[np.float64], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(flat.astype(np.float32)).reshape(shape)

    def gaussian(self, *shape: int) -> torch.Tensor:
        """Standard normal, fp32, by the inverse distribution function."""
        return self._shaped(ndtri(self._stream.uniform(math.prod(shape))), shape)

    def laplace(self, *shape: int) -> torch.Tensor:
        """Laplace of scale 1, fp32."""
        return self._shaped(self._stream.laplace(math.prod(shape)), shape)

    def order(self, count: int) -> Ids:
        """A uniform order of 0 to count - 1: ties among 52-bit numbers are too rare to count."""
        return np.argsort(self._stream.uniform(count), kind="stable").astype(np.int64)

    def below(self, limit: int, count: int) -> Ids:
        """`count` whole numbers from 0 to limit - 1."""
        return np.floor(self._stream.uniform(count) * limit).astype(np.int64)

    def seed(self) -> int:
        """For a generator of torch, which draws what no guarantee rests on: first weights, dropout."""
        return int(self._stream.words(1)[0])


class Root:
    """The secret, 32 bytes, with a salt: what is drawn under other parameters is independent of what is drawn here."""

    def __init__(self, secret: bytes, salt: str) -> None:
        self._secret, self._salt = secret, salt

    def draws(self, *label: str | int) -> Draws:
        return Draws(subkey(self._secret, self._salt, "encoder " + " ".join(map(str, label))))

    def of_text(self, ids: Ids, *label: str | int) -> Draws:
        """For one text: its ids are in the label, so that two texts never meet the same noise, whatever else repeats.
        With one noise on two texts, their difference would cross in the clear."""
        return self.draws(*label, hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest())
