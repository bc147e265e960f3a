"""Row scaling: each embedding is multiplied by a secret factor. Broken: a factor does not change a row's direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from milkglass.papers import Paper, unpublished_method
from milkglass.parameters import limited_field
from milkglass.progress import Progress
from milkglass.schemes.aliases import Slots
from milkglass.schemes.mixture import Draws, Ids, Mixture
from milkglass.schemes.scheme import Scheme


@dataclass(frozen=True)
class RowScaling(Scheme):
    """The scheme and its parameter.

    Attributes:
        spread: factors are uniform in 1 - spread to 1 + spread.
    """

    spread: float = limited_field(0.5, above=0, below=1)

    name: ClassVar[str] = "row-scaling"
    broken: ClassVar[str | None] = "row scaling is broken: cosines recover every token"
    paper: ClassVar[Paper] = unpublished_method("Secret lengths of embeddings")

    def row_map(
        self, table: torch.Tensor, order: Ids, special: Ids, draws: Callable[[str], Draws], progress: Progress,
        slots: Slots, groups: list[Ids] | None = None,
    ) -> Mixture:  # fmt: skip
        n = len(table)
        factors = 1 + self.spread * (2 * draws("row-scaling").uniform(n) - 1)
        progress(len(order))
        return Mixture(np.arange(n + 1), np.arange(n), factors.astype(np.float32), np.zeros(n, np.int64))
