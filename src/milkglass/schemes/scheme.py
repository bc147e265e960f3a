"""Defines a scheme, which rewrites token-indexed tables: its parameters, and how it maps rows.

`client/obfuscate/scramble.py` reads the tables, asks the scheme for a `RowMap`, permutes the rows of its result and
writes them. One file of this folder is one scheme; the catalogue finds it by the name that a key file keeps.
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
from milkglass.schemes.obfuslm_plus import DimensionMixing

if TYPE_CHECKING:
    from milkglass.schemes.symbols.finder import Evidence


class Scheme(abc.ABC):
    """Decides how token-indexed tables are rewritten.

    Subclasses are frozen dataclasses whose fields are the parameters (parameters.py).

    Attributes:
        name: the scheme's name, as a key file keeps it.
        paper: the paper that describes the scheme.
        broken: why nobody should rely on the scheme. None: no reason is known.
        sorts_hashes: whether ids are permuted by sorting keyed hashes of them; else by a stream of the key.
        needs_heads: whether heads and neurons are rewritten too, so that the parts of a layer must be known.
    """

    name: ClassVar[str]
    paper: ClassVar[Paper]
    broken: ClassVar[str | None] = None
    sorts_hashes: ClassVar[bool] = False
    needs_heads: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self)

    @property
    def k(self) -> int:
        """Returns among how many tokens each is meant to hide; 1 promises nothing."""
        return 1

    @property
    def ids_per_token(self) -> int:
        """Returns r, the number of scrambled ids of each ordinary token."""
        return 1

    @property
    def shares(self) -> bool:
        """Returns whether all rows of a cluster are equal, so that an id names a cluster, not a token."""
        return False

    @property
    def for_labels(self) -> bool:
        """Returns whether the scheme is for models that classify or give scores, whose answers hold no ids."""
        return False

    @property
    def token_symbols(self) -> Ids | None:
        """Returns (n,) the number of each token's symbol if many tokens have one id, or None if no two tokens do."""
        return None

    @property
    def plus(self) -> DimensionMixing | None:
        """Returns how the dimensions of every layer are mixed, or None if they are not."""
        return None

    @property
    def needs_whole_layers(self) -> bool:
        """Returns whether tensors of every layer are rewritten, so that the model's layout must be known."""
        return self.plus is not None

    def stream_width(self, width: int, head_count: int) -> int:
        """Returns D, the dimensions of the new residual stream for d = `width`, which so many heads must divide."""
        return width

    @property
    def supports_delta(self) -> bool:
        """Returns whether most of the model is unchanged, so that a delta is smaller than the whole."""
        return not self.needs_whole_layers

    def suggested_parameters(self, kind: str) -> dict[str, Any]:
        """Returns the parameters that the paper sets for a kind of model, "encoder" or "decoder"."""
        return {}

    @property
    def needs_texts(self) -> bool:
        """Returns whether nothing can be rewritten before `fit` has read the client's rows."""
        return False

    def fit(self, evidence: Evidence, draws: Callable[[str], Draws], progress: Progress) -> Scheme:
        """Returns the scheme with what it finds in the client's rows. Raises UsageError if it reads none.

        Args:
            evidence: what is known of the client's rows.
            draws: gives a stream of the key for each label.
            progress: is told how far the work is.
        """
        raise UsageError(f"{self.name} reads no rows", "leave them out")

    def require_tokens(self, token_count: int, special_count: int) -> None:  # noqa: B027 - most schemes take any number
        """Raises UsageError if a vocabulary of so many tokens, of which some are special, is too small."""

    def with_counts(self, counts: NDArray[np.int64], factor: float) -> Scheme:
        """Returns the scheme in frequency bands. Raises UsageError if it has none.

        `counts` (n,) says how often each token occurs; in one band they differ by less than `factor`.
        """
        raise UsageError(f"{self.name} has no frequency bands", "use obfuslm, or leave bands out")

    @abc.abstractmethod
    def row_map(
        self, table: torch.Tensor, order: Ids, special: Ids, draws: Callable[[str], Draws], progress: Progress,
        slots: Slots, groups: list[Ids] | None = None,
    ) -> RowMap:  # fmt: skip
        """Returns how the rows of a table are mixed.

        Args:
            table: (n, d) by public id.
            order: (n,) the rows in the order in which clusters are begun.
            special: the ids of special tokens.
            draws: gives a stream of the key for each label.
            slots: the rows of the result; without aliases there is one for each token.
            groups: the clusters that the key keeps. If None, they are computed.
        """

    def groups(self, table: torch.Tensor, order: Ids, special: Ids, progress: Progress) -> list[Ids]:
        """Returns the clusters of the tokens that take part. Raises UsageError if the scheme has none.

        Args:
            table, order, special: see `row_map`.
            progress: is told how far the work is.
        """
        raise UsageError(f"{self.name} has no clusters", "use obfuslm")

    def document(self) -> dict[str, Any]:
        """Returns the name and the parameters, as a key file keeps them. An option that is off is left out."""
        entries = {"name": self.name, **asdict(self)}  # type: ignore[call-overload]
        return {name: value for name, value in entries.items() if value is not None}
