"""Secret matrices that combine the rows of other matrices, and undo it: orthogonal, or with a condition number.

    U = A [H; S]          H (t, d): what is hidden; S (k, d): rows that stand for nothing, shields
    H W = the first t rows of A^-1 (U W)

A = P diag(s) Q with P and Q uniform orthogonal matrices and s log-uniform from 1 / sqrt(c) to sqrt(c). Its condition
number is at most c, and 1 if A is orthogonal. All of it is fp64, so that only U and the answer are rounded. A
combination does not hide the span of the rows.
"""

from __future__ import annotations

import math

import torch

from milkglass.noise.root import NoiseStream


class MixingMatrix:
    """A fresh matrix for one batch of rows.

    Attributes:
        matrix: (t + k, t + k) A, fp64.
        inverse: A^-1, fp64.
        shields: (k, d) S, fp64.
    """

    def __init__(
        self, draws: NoiseStream, rows: torch.Tensor, condition: float = 1.0, shields: int = 0, energy: float = 1.0
    ) -> None:
        """Draws a matrix for rows (t, d).

        Args:
            draws: the only source of random numbers.
            rows: (t, d).
            condition: c, 1 or more; 1: A is orthogonal.
            shields: k, Gaussian directions.
            energy: squared length of each shield, relative to the rows' mean squared length.
        """
        size, width = len(rows) + shields, rows.shape[1]
        left, right = (draws.orthogonal(size) for _ in range(2))
        uniform = torch.from_numpy(draws.stream.uniform(size))
        stretch = (math.log(condition) * (uniform - 0.5)).exp()
        directions = torch.nn.functional.normalize(draws.gaussian(shields, width).double(), dim=1)
        length = float(rows.double().square().sum(1).mean() * energy) ** 0.5
        self.matrix, self.inverse = (left * stretch) @ right, (right.T / stretch) @ left.T
        self.shields = directions * length

    def mixed(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns (t + k, d) U for rows (t, d), in their dtype."""
        return (self.matrix @ torch.cat([rows.double(), self.shields])).to(rows.dtype)

    def unmixed(self, answer: torch.Tensor) -> torch.Tensor:
        """Returns (t, m) H W for the answer (t + k, m) to U, in its dtype."""
        rows = len(self.matrix) - len(self.shields)
        return (self.inverse[:rows] @ answer.double()).to(answer.dtype)
