"""Makes secret coordinates of the residual stream and of what is inside a layer (AloePri, section 5.2).

What writes to the stream is multiplied by P, what reads it by Q (Algorithm 1, section 5.2.1). For d dimensions and an
expansion of h, with U in O(d), Z in O(d + 2h):

    P = [B  C  E] Z          B = U + lambda V       (d, d), V of variance 1/d
    Q = Z^T [B^-1; F; D]     E = E1 E2, F = F1 F2   (d, h), (h, d), of rank h/2
                             C F = 0, E D = 0       C (d, h), D (h, d), drawn for each P and each Q
    P Q = B B^-1 + C F + E D = I, whichever C and D: all P of one family go with all of its Q.

Rows are vectors: a state x (d,) becomes x P, and x P Q = x.

Inside a layer (Algorithm 2, section 5.2.3; the feed-forward network, 5.2.4) the heads of a group read one key head, and
the draws for its keys apply to all their queries:

    q T, k T^-T     T = R H Z: each pair of dimensions that rotary positions turn together is turned by a secret angle
                    (R) and scaled (H), which commutes with rotary positions; pairs are permuted in windows (Z)
    v U, U^-1 W_o   U (e, e) invertible
    heads           key heads are permuted, and inside each group the queries' heads
    neurons         gate Z', up H' Z', (H' Z')^-1 down: permuted, and scaled if nothing nonlinear follows

Z is exact if the pairs of a window turn equally fast, and approximate otherwise.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from milkglass.schemes.mixture import Ids

Part = Literal["queries", "keys", "values", "output", "gate", "up", "down"]


class KeyDraws(Protocol):
    """Draws secret matrices and orders for one purpose."""

    def gaussian(self, *shape: int) -> Tensor: ...

    def orthogonal(self, size: int) -> Tensor: ...

    def order(self, count: int) -> Ids: ...


class StreamKeys(abc.ABC):
    """Gives the matrices P (d, D) and Q (D, d) of one family, fp64. P Q = I for each P and each Q.

    Attributes:
        kappa: the root mean square of x P relative to that of x, for x of no preferred direction. RMSNorm divides by
            the former, so what reads after it is multiplied by kappa.
    """

    kappa: float

    @abc.abstractmethod
    def write_key(self, draws: KeyDraws) -> Tensor:
        """Returns a P for one tensor that writes."""

    @abc.abstractmethod
    def read_key(self, draws: KeyDraws) -> Tensor:
        """Returns a Q for one tensor that reads."""


@dataclass(frozen=True)
class OrthogonalKeys(StreamKeys):
    """Gives one orthogonal P (d, d), and its transpose as Q. P keeps lengths, so the norms are exact."""

    matrix: Tensor
    kappa: float = 1.0

    def write_key(self, draws: KeyDraws) -> Tensor:
        return self.matrix

    def read_key(self, draws: KeyDraws) -> Tensor:
        return self.matrix.T


class KeyMatrices(StreamKeys):
    """Draws P and Q by Algorithm 1, and holds what all P and Q of a key share.

    Attributes:
        b, b_inverse, e, f, z: B, its inverse, E, F and Z of the module.
        kernel_f: (h, h - h/2) an orthonormal basis of the rows c with c F = 0.
        kernel_e: (h, h - h/2) an orthonormal basis of the columns d with E d = 0.
        kappa: its square is (|B|^2 + |E|^2 + h - h/2) / D with Frobenius norms, the mean over the draws of C.
    """

    def __init__(self, near_orthogonal: Tensor, expansion: int, draws: KeyDraws) -> None:
        """Draws the shared matrices for B (d, d) = `near_orthogonal` and h = `expansion`."""
        self.b, self.b_inverse = near_orthogonal, torch.linalg.inv(near_orthogonal)
        d, h, rank = len(near_orthogonal), expansion, expansion // 2

        def normal(rows: int, columns: int) -> Tensor:
            return draws.gaussian(rows, columns).double() / d**0.5

        e1, e2, f1, f2 = normal(d, rank), normal(rank, h), normal(h, rank), normal(rank, d)
        self.e, self.f, self.z = e1 @ e2, f1 @ f2, draws.orthogonal(d + 2 * h)
        self.kernel_f = torch.linalg.qr(f1, mode="complete")[0][:, rank:]
        self.kernel_e = torch.linalg.qr(e2.T, mode="complete")[0][:, rank:]
        mean_square = (float(self.b.square().sum() + self.e.square().sum()) + (h - rank)) / (d + 2 * h)
        self.kappa = mean_square**0.5

    def write_key(self, draws: KeyDraws) -> Tensor:
        d, kernel_size = len(self.b), self.kernel_f.shape[1]
        c = draws.gaussian(d, kernel_size).double() / d**0.5 @ self.kernel_f.T
        return torch.cat([self.b, c, self.e], dim=1) @ self.z

    def read_key(self, draws: KeyDraws) -> Tensor:
        d, kernel_size = len(self.b), self.kernel_e.shape[1]
        d_matrix = self.kernel_e @ draws.gaussian(kernel_size, d).double() / d**0.5
        return self.z.T @ torch.cat([self.b_inverse, self.f, d_matrix])


@dataclass(frozen=True)
class LayerShape:
    """Holds the sizes of a decoder's layer.

    Attributes:
        head_count: the number of query heads.
        key_head_count: the number of key heads, and of value heads; divides `head_count`.
        head_size: e, even. Dimension i and i + e/2 are a pair.
        neuron_count: f, the number of neurons of the feed-forward network.
        rotary_base: pair i turns by base^(-2i/e) radians a token.
    """

    head_count: int
    key_head_count: int
    head_size: int
    neuron_count: int
    rotary_base: float

    @property
    def frequencies(self) -> Tensor:
        """Returns (e/2,) the radians by which each pair turns a token."""
        return self.rotary_base ** (-torch.arange(0, self.head_size, 2, dtype=torch.float64) / self.head_size)


@dataclass(frozen=True)
class RotaryPairSecrets:
    """Says how the pairs of one key head's dimensions are turned, scaled and moved.

    Attributes:
        angles: (e/2,) of R, radians.
        scales: (e/2,) of H, positive.
        order: (e/2,) of Z: place i has pair order[i].
    """

    angles: Tensor
    scales: Tensor
    order: Ids

    @classmethod
    def identity(cls, count: int) -> RotaryPairSecrets:
        """Returns `count` pairs that are not turned, scaled or moved."""
        return cls(
            torch.zeros(count, dtype=torch.float64),
            torch.ones(count, dtype=torch.float64),
            np.arange(count, dtype=np.int64),
        )

    def matrix(self, inverse: bool = False) -> Tensor:
        """Returns T or T^-T, (e, e) fp64."""
        sizes = 1 / self.scales if inverse else self.scales
        cosine, sine = torch.diag(self.angles.cos() * sizes), torch.diag(self.angles.sin() * sizes)
        turned = torch.cat([torch.cat([cosine, sine], dim=1), torch.cat([-sine, cosine], dim=1)])
        order = torch.from_numpy(self.order)
        return turned[:, torch.cat([order, order + len(order)])]


class LayerKeys:
    """Holds the secrets of one layer, fp64, and applies them to its tensors.

    Attributes:
        matrices: by part, (key_heads, e, e) that multiply queries, keys and values from the right; for "output", U^-1.
        key_order: (key_heads,) the key head in each place.
        query_order: (key_heads, heads / key_heads) the head of the group in each place.
        neuron_order: (f,) the neuron in each place.
        scales: (f,) the factor of each neuron of the "up" matrix, which the gate multiplies.
    """

    def __init__(
        self, shape: LayerShape, pairs: list[RotaryPairSecrets], mixing: list[Tensor], scales: Tensor, draws: KeyDraws
    ) -> None:
        """Draws the orders. `pairs` and `mixing` (U) have an entry for each key head."""
        self.matrices: dict[Part, Tensor] = {
            "queries": torch.stack([pair.matrix() for pair in pairs]),
            "keys": torch.stack([pair.matrix(inverse=True) for pair in pairs]),
            "values": torch.stack(mixing),
            "output": torch.stack([torch.linalg.inv(matrix) for matrix in mixing]),
        }
        group_size = shape.head_count // shape.key_head_count
        self.query_order = np.stack([draws.order(group_size) for _ in range(shape.key_head_count)])
        self.key_order, self.neuron_order = draws.order(shape.key_head_count), draws.order(shape.neuron_count)
        self.scales = scales

    def rows(self, part: Part, matrix: Tensor) -> Tensor:
        """Returns the new value of a weight or bias (g, ...), fp64, of a part that reads the stream."""
        if part in ("gate", "up"):
            scaled = matrix if part == "gate" else matrix * self.scales.reshape(-1, *(1,) * (matrix.dim() - 1))
            return scaled[torch.from_numpy(self.neuron_order)]
        key_head_count, e = len(self.key_order), self.matrices[part].shape[1]
        heads = matrix.reshape(key_head_count, -1, e, matrix.shape[1] if matrix.dim() == 2 else 1)
        turned = torch.einsum("kab,kgac->kgbc", self.matrices[part], heads)
        return self._permute(turned, part == "queries").reshape(matrix.shape)

    def columns(self, part: Part, matrix: Tensor) -> Tensor:
        """Returns the new value of a weight (d, g), fp64, of a part that writes to the stream."""
        if part == "down":
            return (matrix / self.scales)[:, torch.from_numpy(self.neuron_order)]
        key_head_count, e = len(self.key_order), self.matrices[part].shape[1]
        heads = matrix.T.reshape(key_head_count, -1, e, len(matrix))
        turned = torch.einsum("kba,kgac->kgbc", self.matrices[part], heads)
        return self._permute(turned, True).reshape(matrix.T.shape).T

    def _permute(self, heads: Tensor, permutes_inside: bool) -> Tensor:
        """Returns heads (key_heads, group, ...) in secret orders: with `permutes_inside` of each group, then of all."""
        if permutes_inside:
            heads = torch.stack([head[torch.from_numpy(self.query_order[k])] for k, head in enumerate(heads)])
        return heads[torch.from_numpy(self.key_order)]


def uniform(count: int, draws: KeyDraws) -> Tensor:
    """Returns (count,) fp64 numbers between 0 and 1."""
    return torch.special.ndtr(draws.gaussian(count).double())


def permute_windows(frequencies: Tensor, max_window: int, sharpness: float, draws: KeyDraws) -> Ids:
    """Returns (e/2,) an order of the pairs: consecutive windows, each permuted.

    A window that begins at pair t has w pairs, at most `max_window`, with odds exp(sharpness (frequency of its last
    pair - frequency of t)): it is wide if frequencies are similar.
    """
    count = len(frequencies)
    order: list[int] = []
    while len(order) < count:
        start = len(order)
        window = frequencies[start : start + max_window]
        cumulative = torch.softmax(sharpness * (window - window[0]), 0).cumsum(0)
        size = min(len(window), 1 + int((cumulative < uniform(1, draws)).sum()))
        order += (start + draws.order(size)).tolist()
    return np.array(order, np.int64)
