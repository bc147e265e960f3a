"""Secret coordinates of the residual stream: what writes to it is multiplied by P, what reads it by Q, and P Q = I.

AloePri, Algorithm 1 (section 5.2.1), for d dimensions and an expansion of h, with U in O(d), Z in O(d + 2h):

    P = [B  C  E] Z          B = U + lambda V       (d, d), V of variance 1/d
    Q = Z^T [B^-1; F; D]     E = E1 E2, F = F1 F2   (d, h), (h, d), of rank h/2
                             C F = 0, E D = 0       C (d, h), D (h, d), anew for each P and each Q
    P Q = B B^-1 + C F + E D = I, whichever C and D: all P of one family go with all of its Q.

Rows are vectors: a state x (d,) becomes x P, and x P Q = x.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from milkglass.schemes.mixture import Ids


class KeyDraws(Protocol):
    """Secret numbers of one purpose, as matrices."""

    def gaussian(self, *shape: int) -> Tensor: ...

    def orthogonal(self, size: int) -> Tensor: ...

    def order(self, count: int) -> Ids: ...


class StreamKeys(abc.ABC):
    """A family of P (d, D) and Q (D, d), fp64.

    Attributes:
        kappa: the root mean square of x P relative to that of x, for x of no preferred direction. RMSNorm divides by
            the former, so what reads after it is multiplied by kappa.
    """

    kappa: float

    @abc.abstractmethod
    def writing(self, draws: KeyDraws) -> Tensor:
        """Returns a P for one tensor that writes."""

    @abc.abstractmethod
    def reading(self, draws: KeyDraws) -> Tensor:
        """Returns a Q for one tensor that reads."""


@dataclass(frozen=True)
class OrthogonalKeys(StreamKeys):
    """One orthogonal P, with its transpose as Q. It keeps lengths, so the norms are exact.

    Attributes:
        matrix: P (d, d).
    """

    matrix: Tensor
    kappa: float = 1.0

    def writing(self, draws: KeyDraws) -> Tensor:
        return self.matrix

    def reading(self, draws: KeyDraws) -> Tensor:
        return self.matrix.T


class KeyMatrices(StreamKeys):
    """Algorithm 1: what all P and Q of a key share.

    Attributes:
        b, b_inverse, e, f, z: see the module.
        beside_f: (h, h - h/2) an orthonormal basis of the rows c with c F = 0.
        beside_e: (h, h - h/2) an orthonormal basis of the columns d with E d = 0.
        kappa: its mean square over the draws of C: |B|^2 + |E|^2 + d (h - h/2) / d over D, each a Frobenius norm.
    """

    def __init__(self, near_orthogonal: Tensor, expansion: int, draws: KeyDraws) -> None:
        """Draws the shared matrices for B (d, d) = `near_orthogonal` and h = `expansion`."""
        self.b, self.b_inverse = near_orthogonal, torch.linalg.inv(near_orthogonal)
        d, h, rank = len(near_orthogonal), expansion, expansion // 2

        def normal(rows: int, columns: int) -> Tensor:
            return draws.gaussian(rows, columns).double() / d**0.5

        e1, e2, f1, f2 = normal(d, rank), normal(rank, h), normal(h, rank), normal(rank, d)
        self.e, self.f, self.z = e1 @ e2, f1 @ f2, draws.orthogonal(d + 2 * h)
        self.beside_f = torch.linalg.qr(f1, mode="complete")[0][:, rank:]
        self.beside_e = torch.linalg.qr(e2.T, mode="complete")[0][:, rank:]
        mean_square = (float(self.b.square().sum() + self.e.square().sum()) + (h - rank)) / (d + 2 * h)
        self.kappa = mean_square**0.5

    def writing(self, draws: KeyDraws) -> Tensor:
        d, free = len(self.b), self.beside_f.shape[1]
        c = draws.gaussian(d, free).double() / d**0.5 @ self.beside_f.T
        return torch.cat([self.b, c, self.e], dim=1) @ self.z

    def reading(self, draws: KeyDraws) -> Tensor:
        d, free = len(self.b), self.beside_e.shape[1]
        below = self.beside_e @ draws.gaussian(free, d).double() / d**0.5
        return self.z.T @ torch.cat([self.b_inverse, self.f, below])
