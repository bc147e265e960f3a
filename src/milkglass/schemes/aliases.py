"""Gives each ordinary token r scrambled ids, its aliases, of which the client draws one at each occurrence.

A scrambled id then occurs 1/r as often as its token. Counts and neighbours, by which a corpus is deciphered, are spread
over r ids. With W^(a) the mixture of alias a, drawn with its own noise over the same clusters, o(s) the token of slot s
and a(s) its alias:

    row s of the scrambled table, before it is permuted = row o(s) of W^(a(s)) E

Heads and biases are mixed in the same way, so that the logits of all aliases of a token are those of the same token. An
ordinary token has r entries in the softmax and a special one has 1. Until it is tuned, the end token of a generating
model therefore loses log r nats against the others, so that texts end later; and log r nats of the loss stay, since the
alias is random. Aliases are not the paper's.

What it does not hide: two aliases of one token mix the same cluster, and occur between the same neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from milkglass.schemes.mixture import ClusterReport, Ids, RowMap

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Slots:
    """Says which token and alias each of n' slots stands for, before the permutation.

    The first n slots are the n tokens in order. Then follow, alias by alias from the second, all tokens with aliases in
    ascending order. n' = n + (r - 1) (n - |single|).

    Attributes:
        origin: (n',) ids of tokens.
        alias: (n',) which of the token's aliases, from 0.
        aliases_per_token: r, of an ordinary token.
    """

    origin: Ids
    alias: Ids
    aliases_per_token: int

    @classmethod
    def of(cls, n: int, aliases_per_token: int = 1, single: Sequence[int] = ()) -> Slots:
        """Returns the slots. `single` are ids with only one slot, whatever `aliases_per_token` is."""
        tokens, with_aliases = np.arange(n), np.setdiff1d(np.arange(n), np.asarray(single, np.int64))
        origin = np.concatenate([tokens, *[with_aliases] * (aliases_per_token - 1)])
        alias = np.concatenate([np.zeros(n, np.int64), np.repeat(np.arange(1, aliases_per_token), len(with_aliases))])
        return cls(origin.astype(np.int64), alias.astype(np.int64), aliases_per_token)

    @property
    def token_count(self) -> int:
        """Returns n, the number of tokens."""
        return int((self.alias == 0).sum())


@dataclass(frozen=True)
class AliasedMixture:
    """Joins the mixtures of all aliases, each of n rows, to a single row map.

    Attributes:
        mixtures: one for each alias, in order.
        slots: the token and the alias of each row of the result.
    """

    mixtures: tuple[RowMap, ...]
    slots: Slots

    def apply(self, table: torch.Tensor, rows: Ids) -> torch.Tensor:
        """Returns (slots, ...) the rows of the new table for the slots `rows`."""
        import torch

        mixed = table.new_empty((len(rows), *table.shape[1:]))
        origin, alias = self.slots.origin[rows], self.slots.alias[rows]
        for index, mixture in enumerate(self.mixtures):
            positions = np.flatnonzero(alias == index)
            if len(positions):
                mixed[torch.from_numpy(positions)] = mixture.apply(table, origin[positions])
        return mixed

    def cluster_report(self, k: int) -> ClusterReport:
        """Returns the promise of the first alias's mixture, whose counts are of tokens, with the number of aliases."""
        return replace(self.mixtures[0].cluster_report(k), aliases=self.slots.aliases_per_token)
