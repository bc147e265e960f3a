"""Permutes the vocabulary, and moves each embedding by glide-reflections: SentinelLMs (Mishra et al. 2024).

**Broken**: EDNN recovers every token (Lin et al. 2024), because each line and translation is a multiple of the vector
of ones. It is a control: an attack that reads nothing elsewhere is seen to read something here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import papers
from milkglass.papers import Paper
from milkglass.parameters import limited_field
from milkglass.progress import Progress
from milkglass.schemes.aliases import Slots
from milkglass.schemes.mixture import ClusterReport, Draws, Ids
from milkglass.schemes.scheme import Scheme


@dataclass(frozen=True)
class SentinelLMs(Scheme):
    """Permutes the vocabulary and moves all rows by the same glide-reflections.

    Attributes:
        reflections: how many glide-reflections are applied, 10 in the papers.
    """

    reflections: int = limited_field(10, hint="10 is the papers' choice")

    name: ClassVar[str] = "sentinel"
    broken: ClassVar[str | None] = "SentinelLMs is broken: EDNN reads every token back, whatever the key"
    sorts_hashes: ClassVar[bool] = True
    paper: ClassVar[Paper] = papers.SENTINEL_LMS.with_deviations(
        "The published code derives the permutation from a sum of character codes (10,000 keys) and swaps pairs; "
        "ours sorts the ids by a BLAKE2b hash under a key of 32 bytes.",
        "Positions and token types keep their embeddings: which token it is, is what the scheme would hide.",
        "All rows share the two vectors of a reflection; equation 1 as printed has a pair for each row.",
    )

    def row_map(
        self, table: torch.Tensor, order: Ids, special: Ids, draws: Callable[[str], Draws], progress: Progress,
        slots: Slots, groups: list[Ids] | None = None,
    ) -> Glide:  # fmt: skip
        progress(len(order))
        return self.glide(draws("glide").uniform)

    def glide(self, uniform: Callable[[int], NDArray[np.float64]]) -> Glide:
        """Returns the reflections. `uniform` gives numbers in (0, 1), for each reflection its a and its b."""
        return Glide(uniform(2 * self.reflections).reshape(-1, 2))


@dataclass(frozen=True)
class Glide:
    """Moves rows by consecutive glide-reflections. `lines` (r, 2) has a and b of each.

    e' = e - 2 (e.l / l.l) l + t with l = a 1, t = b 1, and a, b uniform in [0, 1) (EDNN paper, equation 1). a cancels,
    since the length of a reflection's normal has no effect. Computed in fp64, returned in the table's dtype.
    """

    lines: NDArray[np.float64]

    def apply(self, table: torch.Tensor, rows: Ids) -> torch.Tensor:
        """Returns these rows of the table, reflected at each line and moved, in the table's dtype."""
        moved = table[torch.from_numpy(rows)]
        if moved.dim() == 1:  # a bias has no direction to be reflected
            return moved
        reflected = moved.double()
        for a, b in self.lines:
            line = torch.full((table.shape[1],), a, dtype=torch.float64)
            reflected = reflected - 2 * (reflected @ line)[:, None] / (line @ line) * line + b
        return reflected.to(table.dtype)

    def cluster_report(self, k: int) -> ClusterReport:
        return ClusterReport(k=k, clusters=0, sizes={}, below_k=0, singletons=0, verbatim=0)
