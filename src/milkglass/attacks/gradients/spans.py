"""Computes row spaces of gradients: the span of the vectors that a weight matrix multiplied.

The gradient of W in y = W x over the positions of a batch is dY^T X. Its rows are combinations of the rows of X. So
each vector that entered lies in their span, and other vectors of the vocabulary do not:

    |v - R R^T v| / |v|,     R an orthonormal basis of the span

If the rows themselves were sent, each number has an error by rounding or by noise of a known size. With G the rows
that were sent, a vector v = c G of the span is then off by |c| times that error, and `Span.distances` is in units of
what the error explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_BELOW = 0.1  # single precision is enough to see that a vector is farther away than this
ROUNDING_UNITS = 64.0  # a singular value of at most so many units of rounding, relative to the largest, may be rounding
SUM_ROUNDINGS = 4.0  # roundings of a number in fp32, one at each step of a sum; in 16 bits it is rounded once
EDGE_FACTOR = 2.0  # times the largest singular value of the errors alone: larger ones are of the rows
FORWARD_ERROR = 2.5e-5  # share by which a public vector that is computed again differs at most


@dataclass(frozen=True, eq=False)
class Span:
    """Measures how far vectors are from a linear span.

    Attributes:
        basis: (m, r) orthonormal columns, float64.
        projection: (m, d) what multiplies vectors before they are compared. None: they are compared directly.
        is_full: whether more vectors may lie in the span than its rank shows: the rank is that of the whole space, or
            the number of rows from which the span was made.
        singular_values: (r,) the singular values of the rows. None if the rows' errors are not known.
        error: the largest singular value of the rows' errors, in the same units.
    """

    basis: Tensor
    projection: Tensor | None
    is_full: bool
    singular_values: Tensor | None = None
    error: float = 0.0

    @property
    def rank(self) -> int:
        """Returns r, the number of dimensions of the span."""
        return self.basis.shape[1]

    def distances(self, vectors: Tensor) -> Tensor:
        """Returns (...) the distances of vectors (..., d) from the span, relative to their norms.

        They are exact where they are below EXACT_BELOW. With `singular_values` they are in units of what the
        errors explain.
        """
        flat = vectors.reshape(-1, vectors.shape[-1])
        rows = flat.float() if self.projection is None else flat.float() @ self.projection.float().T
        coordinates, squares = rows @ self.basis.float(), rows.square().sum(-1).clamp_min(1e-30)
        # By the part in the span: wrong by 1e-3 where little lies outside
        distances = (1 - coordinates.square().sum(-1) / squares).clamp_min(0).sqrt().double()
        near_indices = (distances < EXACT_BELOW).nonzero()[:, 0]
        near_rows = flat[near_indices].double()
        if self.projection is not None:
            near_rows = near_rows @ self.projection.double().T
        residuals = near_rows - (near_rows @ self.basis) @ self.basis.T  # the part outside
        distances[near_indices] = residuals.norm(dim=-1) / near_rows.norm(dim=-1).clamp_min(1e-300)
        if self.singular_values is not None:
            explained = self.error * (coordinates / self.singular_values.float()).norm(dim=-1) / squares.sqrt()
            distances = distances / torch.hypot(explained, torch.full_like(explained, FORWARD_ERROR)).double()
        return distances.reshape(vectors.shape[:-1])


def row_space(matrices: Sequence[Tensor], projection: Tensor | None = None) -> Span:
    """Returns the span of all rows of some matrices, by singular values in float64.

    Each matrix is first scaled to the same norm, so that small gradients count as much as large ones.

    Args:
        matrices: (k, m) each.
        projection: (m, d) what multiplies vectors before they are compared. None: they are compared directly.
    """
    nonzero = [matrix for matrix in matrices if matrix.abs().sum() > 0]
    eps = max((torch.finfo(matrix.dtype).eps for matrix in nonzero), default=torch.finfo(torch.float32).eps)
    width = matrices[0].shape[1]
    if not nonzero:
        return Span(matrices[0].new_zeros(width, 0, dtype=torch.float64), projection, False)
    stacked = torch.cat([matrix.double() / matrix.double().norm() for matrix in nonzero])
    _, singular_values, right_vectors = torch.linalg.svd(stacked, full_matrices=False)
    rank = numerical_rank(singular_values, eps)
    return Span(right_vectors[:rank].T.contiguous(), projection, rank == min(stacked.shape))


def span_of_sent_rows(rows: Tensor, noise: float) -> Span:
    """Returns the span of rows (k, m) that were sent, without the directions that errors hide.

    `noise` is the standard deviation of the noise on each number.

    The errors are rounding to the rows' dtype, uniform in half a unit of the last place, and added noise. As a random
    matrix they have singular values of at most about s (sqrt(k) + sqrt(m)), s their standard deviation (Vershynin 2018,
    theorem 4.4.5).
    """
    exact_rows = rows.double()
    rounding_count = SUM_ROUNDINGS if rows.dtype in (torch.float32, torch.float64) else 1.0
    rounding = rounding_count * torch.finfo(rows.dtype).eps * float(exact_rows.square().mean().sqrt()) / 12**0.5
    error = math.hypot(rounding, noise) * (len(rows) ** 0.5 + rows.shape[1] ** 0.5)
    _, singular_values, right_vectors = torch.linalg.svd(exact_rows, full_matrices=False)
    rank = int((singular_values > EDGE_FACTOR * error).sum())
    return Span(right_vectors[:rank].T.contiguous(), None, rank == rows.shape[1], singular_values[:rank], error)


def numerical_rank(singular_values: Tensor, eps: float) -> int:
    """Returns how many singular values, largest first, of numbers of precision `eps`, are more than rounding.

    The rank is at the widest gap, as a ratio, among the values that may be rounding: those below ROUNDING_UNITS * eps
    of the largest. If there are none, as with noise, the rank is full. Values far below eps count as eps / 16, so that
    an exact zero beside a rounded one is not a gap.
    """
    relative = (singular_values / singular_values[0].clamp_min(1e-300)).clamp_min(eps / 16)
    possible_ends = (relative[1:] <= ROUNDING_UNITS * eps).nonzero()[:, 0]
    if not len(possible_ends):
        return len(singular_values)
    gaps = relative[:-1][possible_ends] / relative[1:][possible_ends]
    return int(possible_ends[gaps.argmax()]) + 1
