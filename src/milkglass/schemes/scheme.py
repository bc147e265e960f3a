"""What a scheme that rewrites token-indexed tables is: its parameters, and how it maps rows.

`client/obfuscate/scramble.py` reads the tables, asks the scheme for a `RowMap`, permutes what that gives and writes it.
One file of this folder is one scheme, and `of` finds it by the name that a key file keeps.

What this module does not know: keys, files, models.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.papers import Paper
from milkglass.progress import Progress
from milkglass.schemes.aliases import Slots
from milkglass.schemes.mixture import Ids, RowMap


class Draws(Protocol):
    """Secret numbers of one purpose; a key's stream."""

    def uniform(self, count: int) -> NDArray[np.float64]: ...

    def laplace(self, count: int) -> NDArray[np.float64]: ...


class Scheme(abc.ABC):
    """Final subclasses are frozen dataclasses whose fields are the parameters."""

    name: ClassVar[str]
    paper: ClassVar[Paper]
    broken: ClassVar[str | None] = None  # why nobody should rely on it
    hashed: ClassVar[bool] = False  # whether the permutation sorts keyed hashes

    @property
    @abc.abstractmethod
    def k(self) -> int:
        """Among how many tokens each is meant to hide; 1 promises nothing."""

    @property
    def copies(self) -> int:
        """r: how many scrambled ids each ordinary token has."""
        return 1

    @property
    def shares(self) -> bool:
        """Whether all rows of a cluster are one, and an id names a cluster and no token."""
        return False

    @abc.abstractmethod
    def row_map(
        self,
        table: torch.Tensor,
        order: Ids,
        special: Ids,
        draws: Callable[[str], Draws],
        progress: Progress,
        slots: Slots,
        groups: list[Ids] | None = None,
    ) -> RowMap:
        """table: (n, d). order: (n,) rows in the order of their scrambled ids. special: ids of special tokens. draws: a
        stream for each label. progress: receives how many rows are done. slots: by which the rows that it gives are
        numbered; without aliases, by tokens. groups: the clusters, where the key keeps them; None: found here."""

    def groups(self, table: torch.Tensor, order: Ids, special: Ids, progress: Progress) -> list[Ids]:
        """The clusters of the tokens that take part. Raises UsageError for a scheme without any."""
        raise UsageError(f"{self.name} has no clusters", "use obfuslm")

    def told(self) -> dict[str, Any]:
        """The name and the parameters, as a key file keeps them; an option that is off is left out."""
        result = {"name": self.name, **asdict(self)}  # type: ignore[call-overload]
        return {name: value for name, value in result.items() if value is not None}
