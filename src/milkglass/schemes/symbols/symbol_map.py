"""Defines a map from tokens to symbols: the symbol of each token, and how the row of a symbol is made.

    row s of the new table = sum of w_t E_t / sum of w_t over the tokens t of symbol s

The map is one of the scheme's parameters, since it cannot be recomputed: its input stays with the client.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.schemes.mixture import ClusterReport, Ids, Mixture

HINT = "make a new key with `milkglass obfuscate --scheme coarse`"


@dataclass(frozen=True)
class MergedRows(Mixture):
    """Merges the rows of each symbol's tokens into one, their weighted mean."""

    def cluster_report(self, k: int) -> ClusterReport:
        """Returns the promise; `verbatim` counts tokens with their own symbol."""
        shared = self.sizes[self.sizes > 1]
        sizes, counts = np.unique(shared, return_counts=True)
        return ClusterReport(
            k=k,
            clusters=len(shared),
            sizes={int(size): int(count) for size, count in zip(sizes, counts, strict=True)},
            below_k=int(shared[shared < k].sum()),
            singletons=0,
            verbatim=int((self.sizes == 1).sum()),
            shared=True,
        )


@dataclass(frozen=True)
class SymbolMap:
    """Maps tokens to symbols, in the form that a key file has.

    Attributes:
        tokens: base64 of zlib of (n,) little-endian int32, the number of each token's symbol, from 0 without gaps.
        weights: base64 of zlib of (n,) little-endian float32, above 0: w_t of the module.
    """

    tokens: str = field(repr=False)
    weights: str = field(repr=False)

    @classmethod
    def of(cls, tokens: Ids, weights: NDArray[np.floating]) -> SymbolMap:
        """Returns a map. Raises UsageError if the arrays do not make one."""
        symbol_map = cls(_pack(np.asarray(tokens, "<i4")), _pack(np.asarray(weights, "<f4")))
        symbol_map.require()
        return symbol_map

    def require(self) -> None:
        """Raises UsageError if this is not a map: if it leaves a symbol out, or a weight is not above 0."""
        symbol_of_token, weights = self.symbol_of_token, self.token_weights
        if not len(symbol_of_token) or int(symbol_of_token.min()) < 0 or (np.bincount(symbol_of_token) == 0).any():
            raise UsageError("a map of symbols leaves a number out, or is empty", HINT)
        if len(weights) != len(symbol_of_token) or not (np.isfinite(weights) & (weights > 0)).all():
            raise UsageError(f"a map of {len(symbol_of_token)} tokens has weights that are not above 0", HINT)

    @cached_property
    def symbol_of_token(self) -> Ids:
        """Returns (n,) the number of each token's symbol."""
        return np.frombuffer(_unpack(self.tokens), "<i4").astype(np.int64)

    @cached_property
    def token_weights(self) -> NDArray[np.float32]:
        """Returns (n,) w_t."""
        return np.frombuffer(_unpack(self.weights), "<f4").astype(np.float32)

    def mixture(self) -> MergedRows:
        """Returns the rows of the symbols as mixtures of the rows of tokens."""
        symbol_of_token = self.symbol_of_token
        order = np.argsort(symbol_of_token, kind="stable").astype(np.int64)
        counts = np.bincount(symbol_of_token)
        weights = self.token_weights / np.bincount(symbol_of_token, self.token_weights)[symbol_of_token]
        starts = np.concatenate([[0], np.cumsum(counts)])
        return MergedRows(starts.astype(np.int64), order, weights[order].astype(np.float32), counts.astype(np.int64))


def shared_symbols(symbol_of_token: Ids) -> Ids:
    """Returns the symbols that several tokens have, ascending."""
    return np.flatnonzero(np.bincount(symbol_of_token) > 1)


def _pack(array: NDArray[np.generic]) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()


def _unpack(text: str) -> bytes:
    """Returns what `_pack` packed. Raises UsageError for anything else."""
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error) as error:
        raise UsageError("a map of symbols cannot be read", HINT) from error
