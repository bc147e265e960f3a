"""What a scheme that rewrites token-indexed tables is: its parameters, and how it maps rows.

`client/obfuscate/scramble.py` reads the tables, asks the scheme for a `RowMap`, permutes what that gives and writes it.
One file of this folder is one scheme, and `of` finds it by the name that a key file keeps.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.papers import Paper
from milkglass.parameters import require
from milkglass.progress import Progress
from milkglass.schemes.aliases import Slots
from milkglass.schemes.mixture import Draws, Ids, RowMap
from milkglass.schemes.obfuslm_plus import Plus

if TYPE_CHECKING:
    from milkglass.schemes.symbols.finder import Evidence


class Scheme(abc.ABC):
    """Final subclasses are frozen dataclasses whose fields are the parameters (milkglass/parameters.py).

    Attributes:
        name: as a key file keeps it.
        broken: why it must not be relied on.
        hashed: whether the permutation sorts keyed hashes.
        needs_heads: whether heads and neurons are rewritten too, so that the parts of a layer must be known.
    """

    name: ClassVar[str]
    paper: ClassVar[Paper]
    broken: ClassVar[str | None] = None
    hashed: ClassVar[bool] = False
    needs_heads: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self)

    @property
    def k(self) -> int:
        """Among how many tokens each is meant to hide; 1 promises nothing."""
        return 1

    @property
    def copies(self) -> int:
        """r: how many scrambled ids each ordinary token has."""
        return 1

    @property
    def shares(self) -> bool:
        """Whether all rows of a cluster are one, and an id names a cluster and no token."""
        return False

    @property
    def for_labels(self) -> bool:
        """Whether it is made for a model that classifies or gives scores, of which nobody reads ids."""
        return False

    @property
    def token_symbols(self) -> Ids | None:
        """(n,) the number of each token's symbol, where many tokens have one id; None: no two tokens do."""
        return None

    @property
    def plus(self) -> Plus | None:
        """How the dimensions of every layer are mixed as well, where they are."""
        return None

    @property
    def needs_whole_layers(self) -> bool:
        """Whether tensors of every layer are rewritten, so that the model's layout must be known."""
        return self.plus is not None

    def stream_width(self, width: int, heads: int) -> int:
        """D, the dimensions of the new stream. width: d. heads: must divide D, as configs of some models demand."""
        return width

    @property
    def supports_delta(self) -> bool:
        """Whether most of the model is unchanged, so that a delta is smaller than the whole."""
        return not self.needs_whole_layers

    def suggested(self, kind: str) -> dict[str, Any]:
        """Parameters that the paper sets by the kind of model, "encoder" or "decoder", in place of the defaults."""
        return {}

    @property
    def needs_texts(self) -> bool:
        """Whether nothing can be rewritten before `found` has read the client's rows."""
        return False

    def found(self, evidence: Evidence, draws: Callable[[str], Draws], progress: Progress) -> Scheme:
        """The scheme with what it finds in the client's rows. draws: a stream of the key for each label. Raises
        UsageError for a scheme that reads none."""
        raise UsageError(f"{self.name} reads no rows", "leave them out")

    def require_tokens(self, tokens: int, special: int) -> None:  # noqa: B027 - most schemes take any number
        """Raises UsageError for a vocabulary of too few tokens. special: how many of them are special."""

    def with_counts(self, counts: NDArray[np.int64], factor: float) -> Scheme:
        """The scheme in frequency bands. counts: (n,) of each token. Raises UsageError for a scheme without bands."""
        raise UsageError(f"{self.name} has no frequency bands", "use obfuslm, or leave bands out")

    @abc.abstractmethod
    def row_map(
        self, table: torch.Tensor, order: Ids, special: Ids, draws: Callable[[str], Draws], progress: Progress,
        slots: Slots, groups: list[Ids] | None = None,
    ) -> RowMap:  # fmt: skip
        """How the rows of a table are mixed.

        Args:
            table: (n, d).
            order: (n,) rows in the order of their scrambled ids.
            special: ids of special tokens.
            draws: a stream for each label.
            progress: receives how many rows are done.
            slots: by which the rows of the result are numbered; without aliases, by tokens.
            groups: the clusters, where the key keeps them; None: they are computed.
        """

    def groups(self, table: torch.Tensor, order: Ids, special: Ids, progress: Progress) -> list[Ids]:
        """The clusters of the tokens that take part. Raises UsageError for a scheme without any."""
        raise UsageError(f"{self.name} has no clusters", "use obfuslm")

    def document(self) -> dict[str, Any]:
        """The name and the parameters, as a key file keeps them; an option that is off is left out."""
        result = {"name": self.name, **asdict(self)}  # type: ignore[call-overload]
        return {name: value for name, value in result.items() if value is not None}
