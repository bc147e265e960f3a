"""Similarities of rows in NumPy: directions, cosines or distances, and which k fits a table."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError

Metric = Literal["cosine", "euclidean"]
Vectors = NDArray[np.float32]


def directions(vectors: Vectors) -> Vectors:
    """Returns rows of length one. A row of zeros stays zero: its cosine with everything is 0."""
    with np.errstate(over="ignore"):
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
    odd = ((norms < 1e-15) | (norms > 1e15))[:, 0]  # squares leave fp32
    rows = vectors[odd].astype(np.float64)
    unit[odd] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return unit


def require_k(k: int, n: int, lowest: int = 2) -> None:
    if not lowest <= k <= n:
        if n < lowest:
            raise UsageError(f"k is {k}, and this table has too few words for any value", "give a larger table")
        raise UsageError(f"k is {k}, from {lowest} to {n} fit this table", f"give --k {n} or less, or a larger table")


def similarities(rows: Vectors, others: Vectors, metric: Metric) -> NDArray[np.float32]:
    """Returns (b, n), larger for nearer rows: the cosine of unit rows, or minus the Euclidean distance."""
    product = rows @ others.T
    if metric == "cosine":
        return product
    squares = (rows * rows).sum(1)[:, None] + (others * others).sum(1) - 2 * product
    return -np.sqrt(np.maximum(squares, 0))
