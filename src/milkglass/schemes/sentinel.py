"""SentinelLMs: permute the vocabulary with a key, move each embedding by glide-reflections (Mishra et al. 2024).

**Broken**: EDNN reads every token back (Lin et al. 2024), for each line and translation is a multiple of the vector of
ones. It is here as a control, so that an attack that finds nothing elsewhere is seen to find something here.

What this module does not know: a use in which this protects anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from milkglass.errors import UsageError
from milkglass.paper import Paper


@dataclass(frozen=True)
class SentinelLMs:
    """reflections: how many glide-reflections follow each other, 10 in the papers."""

    reflections: int = 10

    paper: ClassVar[Paper] = Paper(
        "SentinelLMs: Encrypted Input Adaptation and Fine-tuning of Language Models for Private and Secure Inference",
        "Mishra, Li, Deo",
        2024,
        "AAAI",
        (
            "The published code derives the permutation from a sum of character codes (10,000 keys) and swaps pairs; "
            "ours is any permutation of a real key's.",
        ),
    )

    def __post_init__(self) -> None:
        if self.reflections < 0:
            raise UsageError(f"{self.reflections} reflections, at least 0 are needed", "10 is the papers' choice")

    def transform(self, table: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """The glide-reflection of every row of (n, d), `reflections` times, each with its own a and b.

        e' = e - 2 (e.l / l.l) l + t with l = a 1, t = b 1, and a, b uniform in [0, 1) (EDNN paper, equation 1). a
        cancels: a reflection is one whatever the length of its normal. fp32.
        """
        moved = table.double()
        for _ in range(self.reflections):
            a, b = rng.uniform(np.finfo(float).tiny, 1), rng.uniform(0, 1)
            line = torch.full((table.shape[1],), a, dtype=torch.float64)
            moved = moved - 2 * (moved @ line)[:, None] / (line @ line) * line + b
        return moved.float()
