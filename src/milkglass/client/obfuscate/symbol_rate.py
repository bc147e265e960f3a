"""What a coarse vocabulary lets through: the rate of a map, and which of its limits do not hold.

    at most    log2 m' bits a token, m' ids in all, whatever the reader knows
    in data    - sum over ids of p log2 p, p the id's share of the running tokens; special tokens do not count

and what naming the commonest token of each id reads, which is the weakest attack and needs no context.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.schemes.coarse import Coarse, mass_of
from milkglass.schemes.symbols.diversity import bits_and_shares


@dataclass(frozen=True)
class SymbolRate:
    """The rate of one map on one text.

    Attributes:
        ids: m', how many there are.
        most_bits: log2 m'.
        bits: a token of the text, by the ids' own shares.
        running, content: share of these tokens that the commonest token of each id is.
        symbols: ids to which the limits apply.
        alone: the other ids: one for each special token and function word.
        alone_running: share of the running tokens that have such an id.
        unmet: symbols that break a limit, those of a single token too.
        unmet_running: share of the running tokens that have such a symbol.
    """

    ids: int
    most_bits: float
    bits: float
    running: float
    content: float
    symbols: int
    alone: int
    alone_running: float
    unmet: int
    unmet_running: float


def rate_of(
    scheme: Coarse,
    counts: NDArray[np.int64],
    sent: NDArray[np.int64],
    content: NDArray[np.bool_],
    exempt: NDArray[np.int64],
) -> SymbolRate:
    """scheme: with its map. counts: (n,) by which tokens are common. sent: (n,) occurrences in the client's texts, 0
    for special tokens. content: (n,) which tokens carry content. exempt: ids of tokens to which the limits do not
    apply (`Coarse.exempt`). Shares of nothing are 0."""
    numbers, size = scheme.token_symbols, int(scheme.token_symbols.max()) + 1
    mass, alone = mass_of(counts), np.isin(np.arange(size), numbers[exempt])
    bits, share = bits_and_shares(numbers, mass, size)
    unmet = ~alone & scheme.limits.broken(bits, share)
    commonest = np.zeros(len(numbers), np.bool_)
    order = np.lexsort((np.arange(len(numbers)), -mass, numbers))
    commonest[order[np.unique(numbers[order], return_index=True)[1]]] = True
    running = np.bincount(numbers, sent, size)
    return SymbolRate(
        ids=size,
        most_bits=float(np.log2(size)),
        bits=bits_in(running),
        running=_share(sent, commonest),
        content=_share(np.where(content, sent, 0), commonest),
        symbols=int((~alone).sum()),
        alone=int(alone.sum()),
        alone_running=_share(running, alone),
        unmet=int(unmet.sum()),
        unmet_running=_share(running, unmet),
    )


def bits_in(occurrences: NDArray[np.number]) -> float:
    """Bits a token of a text, by the shares of its ids. occurrences: (m',) of each id; of none at all: 0."""
    used = occurrences[occurrences > 0] / max(1, occurrences.sum())
    return float(-(used * np.log2(used)).sum()) + 0.0


def _share(amounts: NDArray[np.number], which: NDArray[np.bool_]) -> float:
    whole = float(amounts.sum())
    return float(amounts[which].sum()) / whole if whole else 0.0
