"""KNN: read each obfuscated embedding as the public token whose embedding is nearest (Qu et al. 2021).

The weakest attack of all, and the one that every paper prints. It looks at one token at a time: what frequencies,
neighbours and repetition give away besides is not counted here (THREATS.md).
"""

from __future__ import annotations

import torch


def nearest(obfuscated: torch.Tensor, public: torch.Tensor, k: int) -> torch.Tensor:
    """For each row of `obfuscated` (n, d), the `k` rows of `public` (m, d) of highest cosine: (n, k), best first."""
    unit = torch.nn.functional.normalize(public.float(), dim=1)
    found = []
    for block in obfuscated.float().split(512):
        found.append((torch.nn.functional.normalize(block, dim=1) @ unit.T).topk(k, dim=1).indices)
    return torch.cat(found)
