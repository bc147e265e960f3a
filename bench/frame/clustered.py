"""Invented tables whose rows lie in clusters, as those of language models do."""

from __future__ import annotations

import torch

CLUSTER, APART, ROWS = 20, 0.7, 8192  # rows around one centre, their distance from it, rows that are made at a time


def clustered(n: int, d: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(n, d): a row is its cluster's centre and noise of its own, all of one direction in part, as real rows are."""
    rng = torch.Generator().manual_seed(0)
    common = torch.randn(d, generator=rng) * 0.5
    centres = torch.randn(max(1, n // CLUSTER), d, generator=rng) + common
    table = torch.empty(n, d, dtype=dtype)
    for start in range(0, n, ROWS):
        part = table[start : start + ROWS]
        own = torch.randint(len(centres), (len(part),), generator=rng)
        part.copy_((centres[own] + APART * torch.randn(part.shape, generator=rng)) * 0.03)
    return table
