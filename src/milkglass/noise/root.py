"""Makes streams of draws from the secret of a client half, and secret matrices.

noise/grid.py draws noise on data from `NoiseStream.stream`.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from scipy.special import ndtri

from milkglass.noise.stream import Stream, stream_for, subkey
from milkglass.sequences import Ids

SECRET_BYTES = 32  # length of a client half's secret


class NoiseStream:
    """Draws tensors and permutations from one stream.

    The same draws in the same order from one source give the same numbers.

    Attributes:
        stream: the source, from which noise on data is drawn directly.
    """

    def __init__(self, source: bytes | Stream) -> None:
        self.stream = source if isinstance(source, Stream) else Stream(source)

    def bound_to(self, states: torch.Tensor) -> NoiseStream:
        """Returns a stream of draws that depends on the numbers of these states too (noise/stream.py).

        The last bits of states depend on what else was computed beside them, and states that differ must not get the
        same noise.
        """
        return NoiseStream(stream_for({"hidden": states}, self.stream))

    def gaussian(self, *shape: int) -> torch.Tensor:
        """Returns standard normal fp32 numbers by the inverse distribution function.

        They are for secret keys, not noise on data.
        """
        flat = ndtri(self.stream.uniform(math.prod(shape))).astype(np.float32)
        return torch.from_numpy(flat).reshape(shape)

    def orthogonal(self, size: int) -> torch.Tensor:
        """Returns (size, size) an fp64 matrix that is uniform over the orthogonal group."""
        return orthogonal_from_gaussian(self.gaussian(size, size).double())

    def order(self, count: int) -> Ids:
        """Returns (count,) a uniform permutation of 0 to count - 1."""
        return self.stream.order(count)

    def seed(self) -> int:
        """Returns a seed for PyTorch's generator, which draws the halves' first weights.

        The seed and the weights are not secret.
        """
        return int(self.stream.words(1)[0])


def orthogonal_from_gaussian(gaussian: torch.Tensor) -> torch.Tensor:
    """Returns a uniform orthogonal matrix, perhaps a reflection, from standard normals (d, d).

    Signs make the result unique (Mezzadri 2007).
    """
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


class NoiseRoot:
    """Makes streams of draws from the secret of a client half, 32 bytes, and a salt.

    Streams under different salts are independent.
    """

    def __init__(self, secret: bytes, salt: str) -> None:
        self._secret, self._salt = secret, salt

    def draws(self, *label: str | int) -> NoiseStream:
        """Returns the stream of draws for one purpose, which the label names."""
        return NoiseStream(subkey(self._secret, self._salt, "encoder " + " ".join(map(str, label))))

    def of_text(self, ids: Ids, *label: str | int) -> NoiseStream:
        """Returns the stream of draws for one text.

        The text's ids are in the label, so that different texts never get the same noise: otherwise the
        difference of two texts would cross in the clear.
        """
        return self.draws(*label, hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest())


class MixingMatrix:
    """Combines the rows of other matrices by a fresh secret matrix, and separates them again.

        U = A [H; S]          H (t, d): what is hidden; S (k, d): rows that stand for nothing, shields
        H W = the first t rows of A^-1 (U W)          W: the server's weights

    A = P diag(s) Q with P and Q uniform orthogonal matrices and s log-uniform from 1 / sqrt(c) to sqrt(c). Its
    condition number is at most c, and 1 if A is orthogonal. All of it is fp64, so that only U and the answer are
    rounded. A combination does not hide the span of the rows.

    Attributes:
        matrix: (t + k, t + k) A, fp64.
        inverse: A^-1, fp64.
        shields: (k, d) S, fp64.
    """

    def __init__(
        self, draws: NoiseStream, rows: torch.Tensor, condition_number: float = 1.0, shield_count: int = 0,
        shield_energy: float = 1.0,
    ) -> None:  # fmt: skip
        """Draws a matrix for rows (t, d).

        Args:
            draws: the stream of the secret numbers.
            rows: (t, d) give only the sizes of the matrices and the norm of the shields.
            condition_number: c, 1 or more; with 1 A is orthogonal.
            shield_count: k; shields have Gaussian directions.
            shield_energy: squared norm of each shield, relative to the rows' mean squared norm.
        """
        size, width = len(rows) + shield_count, rows.shape[1]
        p, q = (draws.orthogonal(size) for _ in range(2))
        uniform = torch.from_numpy(draws.stream.uniform(size))
        singular_values = (math.log(condition_number) * (uniform - 0.5)).exp()
        directions = torch.nn.functional.normalize(draws.gaussian(shield_count, width).double(), dim=1)
        norm = float(rows.double().square().sum(1).mean() * shield_energy) ** 0.5
        self.matrix, self.inverse = (p * singular_values) @ q, (q.T / singular_values) @ p.T
        self.shields = directions * norm

    def mix(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns (t + k, d) U for rows (t, d), in their dtype."""
        return (self.matrix @ torch.cat([rows.double(), self.shields])).to(rows.dtype)

    def unmix(self, answer: torch.Tensor) -> torch.Tensor:
        """Returns (t, m) H W for the answer U W (t + k, m), in its dtype."""
        row_count = len(self.matrix) - len(self.shields)
        return (self.inverse[:row_count] @ answer.double()).to(answer.dtype)
