"""Aliases: each ordinary token has several scrambled ids, and the client draws one at each occurrence. Ours.

A scrambled id then occurs 1/r as often as its token does, so that counts and neighbours, by which a corpus is
deciphered, are spread over r ids. With W^(a) the mixture of alias a, drawn with noise of its own over the same
clusters, and o(s) the token of slot s, a(s) which of its aliases it is:

    row s of the scrambled table, before it is permuted = row o(s) of W^(a(s)) E

Likewise heads and biases, so that the logits of all aliases of a token name the same token. An ordinary token has r
places in the softmax and a special one has 1: until it is tuned, a model that generates ends its texts later than the
original would, by log r nats; and log r nats of the loss cannot be learnt, since the alias is drawn at random.

What it does not hide: two aliases of one token mix the same cluster, and occur between the same neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from milkglass.schemes.mixture import Ids, Promise, RowMap

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Slots:
    """Which token each of n' places is for, before the permutation: origin (n',) ids of tokens, copy (n',) which of
    the token's aliases, from 0.

    The first n slots are the n tokens in order; then come, alias by alias from the second, all tokens with aliases in
    ascending order. n' = n + (r - 1) (n - single).
    """

    origin: Ids
    copy: Ids
    copies: int

    @classmethod
    def of(cls, n: int, copies: int = 1, single: Sequence[int] = ()) -> Slots:
        """single: ids with one place only, for any `copies`."""
        tokens, several = np.arange(n), np.setdiff1d(np.arange(n), np.asarray(single, np.int64))
        origin = np.concatenate([tokens, *[several] * (copies - 1)])
        copy = np.concatenate([np.zeros(n, np.int64), np.repeat(np.arange(1, copies), len(several))])
        return cls(origin.astype(np.int64), copy.astype(np.int64), copies)

    @property
    def tokens(self) -> int:
        """n."""
        return int((self.copy == 0).sum())


@dataclass(frozen=True)
class Aliased:
    """A mixture of n rows for each alias; what is in the place of a table's rows is numbered by slots."""

    parts: tuple[RowMap, ...]
    slots: Slots

    def apply(self, table: torch.Tensor, rows: Ids) -> torch.Tensor:
        """rows: slots. table: (n, ...)."""
        import torch

        result = table.new_empty((len(rows), *table.shape[1:]))
        origin, copy = self.slots.origin[rows], self.slots.copy[rows]
        for number, part in enumerate(self.parts):
            where = np.flatnonzero(copy == number)
            if len(where):
                result[torch.from_numpy(where)] = part.apply(table, origin[where])
        return result

    def promise(self, k: int) -> Promise:
        """In tokens, as without aliases."""
        return replace(self.parts[0].promise(k), aliases=self.slots.copies)
