"""Solves the linear algebra of the cluster solve: finds the few public rows that span a few scrambled rows.

Rows and tokens have norm 1, but in `unit_rows`, `weight_thresholds` and `equal_rows`. Shapes: b problems at a time, m
scrambled rows and z candidate tokens in each; n tokens of the vocabulary; r rows and c tokens of one cluster; d
dimensions.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from milkglass.sequences import Ids

MIN_EIGENVALUE = 1e-14  # a smaller eigenvalue of a Gram matrix is taken as this
TOKENS_AT_A_TIME = 4096  # tokens projected at a time
MAX_ROUNDS = 12  # rounds of an elimination
STANDARD_ERRORS = (0.0, 1.0, 2.0, 3.0, 4.0)  # how many of them a weight must exceed, round by round


def unit_rows(rows: Tensor) -> Tensor:
    """Returns the rows scaled to length 1. A zero row stays zero."""
    return torch.nn.functional.normalize(rows, dim=-1, eps=1e-30)


def bases(row_groups: Tensor) -> Tensor:
    """Returns (b, d, m) orthonormal columns that span each group of rows (b, m, d)."""
    rows = row_groups.double()
    eigenvalues, vectors = torch.linalg.eigh(rows @ rows.transpose(1, 2))
    return (rows.transpose(1, 2) @ (vectors / eigenvalues.clamp_min(MIN_EIGENVALUE).sqrt()[:, None, :])).float()


def explained_shares(tokens: Tensor, row_groups: Tensor) -> Tensor:
    """Returns (b, n) the share of each token's (n, d) squared length in the span of each group of rows (b, m, d)."""
    b, m, d = row_groups.shape
    stacked = bases(row_groups).permute(1, 0, 2).reshape(d, b * m)
    shares = []
    for block in tokens.split(TOKENS_AT_A_TIME):
        image = (block @ stacked).view(-1, b, m)
        shares.append(torch.einsum("nbm,nbm->bn", image, image))
    return torch.cat(shares, dim=1)


def eliminate(tokens: Tensor, target: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Finds which tokens (b, z, d) make up each target (b, d) with positive weights, by backward elimination.

    Each round solves least squares on the remaining tokens. Then those are left out whose weights do not exceed the
    round's number of standard errors (STANDARD_ERRORS). Without noise only the members have weights after the first
    round, because z < d makes a chance fit impossible.

    Args:
        noise: the norm of a target's error; the target's own norm is 1.

    Returns:
        (b, z) whether each token remains, and (b, z) its weight.
    """
    tokens, target = tokens.double(), target.double()
    gram = tokens @ tokens.transpose(1, 2)
    products = (tokens @ target[:, :, None])[:, :, 0]
    error = noise / tokens.shape[2] ** 0.5  # of each coordinate
    eye = torch.eye(gram.shape[1], dtype=gram.dtype)
    is_active = torch.ones(products.shape, dtype=torch.bool)
    weights = products
    for round_index in range(MAX_ROUNDS):
        mask = is_active.double()
        inverse = torch.linalg.inv(gram * mask[:, :, None] * mask[:, None, :] + eye * (1 - mask + 1e-12)[:, None, :])
        weights = (inverse @ (products * mask)[:, :, None])[:, :, 0] * mask
        error_count = STANDARD_ERRORS[min(round_index, len(STANDARD_ERRORS) - 1)]
        limit = error_count * error * torch.diagonal(inverse, dim1=1, dim2=2).clamp_min(0).sqrt()
        is_dropped = is_active & (weights <= limit)
        is_active &= ~is_dropped
        if round_index >= len(STANDARD_ERRORS) - 1 and not is_dropped.any():
            break
    return is_active, weights * is_active


def misfits(rows: Tensor, tokens: Tensor) -> Tensor:
    """Returns (r,) the distance of each row (r, d) of norm 1 from the span of the tokens (c, d)."""
    basis = torch.linalg.qr(tokens.double().T)[0].to(rows.dtype)
    return (rows - (rows @ basis) @ basis.T).norm(dim=1)


def best_additions(tokens: Tensor, present: Tensor, target: Tensor, count: int) -> Tensor:
    """Returns (count,) which tokens (n, d) most reduce a target's misfit (d,), each added alone to `present` (c, d)."""
    basis = torch.linalg.qr(present.double().T)[0].float()
    residual = target - basis @ (basis.T @ target)
    norms_outside = (1 - (tokens @ basis).square().sum(1)).clamp_min(1e-3).sqrt()
    return ((tokens @ residual) / norms_outside).topk(min(count, len(tokens))).indices


def weight_thresholds(tokens: Tensor, rows: Tensor, noise: float) -> NDArray[np.float64]:
    """Returns (r, c) the threshold above which a weight of token c in row r is more than noise."""
    vectors = tokens.double()
    spread = torch.diagonal(torch.linalg.pinv(vectors @ vectors.T, hermitian=True)).clamp_min(0).sqrt()
    return (6 * noise / vectors.shape[1] ** 0.5 * rows.double().norm(dim=1)[:, None] * spread).numpy()


def log_softmax(scores: Tensor) -> Tensor:
    """Returns (r, n) the log softmax of each row, in fp64."""
    return torch.log_softmax(scores.double(), 1)


def equal_rows(table: Tensor) -> dict[bytes, list[int]]:
    """Returns the indices of the rows with each content. Rows are equal if they are so to the last bit."""
    indices_by_content: dict[bytes, list[int]] = {}
    for index, row in enumerate(table.numpy()):
        indices_by_content.setdefault((row + 0.0).tobytes(), []).append(index)  # + 0: minus zero is zero
    return indices_by_content


def connected_parts(mixes: NDArray[np.bool_]) -> list[tuple[Ids, Ids]]:
    """Returns the rows and columns of each connected part of `mixes` (r, c): whether each row mixes each token.

    If a part has more tokens than rows, or no tokens, the parts are not clusters, and all rows and tokens are one part.
    """
    r, c = mixes.shape
    graph = np.zeros((r + c, r + c), np.bool_)
    graph[:r, r:] = mixes
    count, label = connected_components(graph, directed=False)
    parts = [(np.flatnonzero(label[:r] == part), np.flatnonzero(label[r:] == part)) for part in range(count)]
    if all(0 < len(columns) <= len(rows) for rows, columns in parts):
        return parts
    return [(np.arange(r), np.arange(c))]
