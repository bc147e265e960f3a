"""What a coarse vocabulary lets through: the rate of a map, and which of its limits do not hold.

    at most    log2 m' bits a token, m' ids in all, whatever the reader knows
    in data    - sum over ids of p log2 p, p the id's share of the running tokens; special tokens do not count

and what naming the likeliest token of each sent id reads, which is the weakest attack and needs no context. Where m of
the ids are exchanged by randomised response, of which each sent one has N bits of chance (noise/responses.py),

    at most    log2 (m' - m + 2^(log2 m - N)), the capacity of both kinds of ids together (Shannon 1948)
    in data    the same sum with p of what is sent, less N times the share of the exchanged ids
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.noise.responses import RandomisedResponse
from milkglass.schemes.coarse import Coarse, mass_of
from milkglass.schemes.symbols.diversity import bits_and_shares
from milkglass.schemes.symbols.symbol_map import shared_symbols


@dataclass(frozen=True)
class SymbolRate:
    """The rate of one map on one text.

    Attributes:
        ids: m', how many there are.
        most_bits: a token, at most.
        bits: a token of the text, by the ids' own shares.
        running, content: share of these tokens that naming the likeliest token of each sent id reads; where ids are
            sent as they are, that is the commonest token of the id.
        symbols: ids to which the limits apply.
        alone: the other ids: one for each special token and function word.
        alone_running: share of the running tokens that have such an id.
        unmet: symbols that break a limit, those of a single token too.
        unmet_running: share of the running tokens that have such a symbol.
        epsilon: of the exchange of ids; 0: they are sent as they are.
        kept: chance that an id of several tokens is sent as it is.
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
    epsilon: float = 0.0
    kept: float = 1.0


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
    running, responses = np.bincount(numbers, sent, size), responses_in(scheme)
    named = read_by_name(numbers, mass, commonest, responses)
    return SymbolRate(
        ids=size,
        most_bits=most_bits(size, responses),
        bits=bits_in(running, responses),
        running=_share(sent, named),
        content=_share(np.where(content, sent, 0), named),
        symbols=int((~alone).sum()),
        alone=int(alone.sum()),
        alone_running=_share(running, alone),
        unmet=int(unmet.sum()),
        unmet_running=_share(running, unmet),
        epsilon=scheme.epsilon or 0.0,
        kept=1.0 if responses is None else responses.kept,
    )


def read_by_name(
    numbers: NDArray[np.int64], mass: NDArray[np.float64], commonest: NDArray[np.bool_],
    responses: RandomisedResponse | None,
) -> NDArray[np.float64]:  # fmt: skip
    """(n,) of each token the share of its occurrences that are read by naming the likeliest token of each sent id.
    Arguments as in `rate_of`; commonest: (n,) the most massive token of each symbol."""
    result = commonest.astype(np.float64)
    if responses is None or len(responses.values) < 2:
        return result
    at = np.flatnonzero(commonest & np.isin(numbers, responses.values))
    top = at[mass[at].argmax()]  # of all exchanged symbols: it is sent as any of them
    other = (1 - responses.kept) / (len(responses.values) - 1)
    better = mass[top] * other > mass[at] * responses.kept
    result[at] = np.where(better, 0.0, responses.kept)
    result[top] = responses.kept + other * better.sum()
    return result


def responses_in(scheme: Coarse) -> RandomisedResponse | None:
    """The exchange of a scheme's symbols by their numbers."""
    if scheme.epsilon is None:
        return None
    return RandomisedResponse(shared_symbols(scheme.token_symbols), scheme.epsilon)


def most_bits(size: int, responses: RandomisedResponse | None) -> float:
    """Bits a token at most, whatever is sent. size: m'."""
    if responses is None:
        return float(np.log2(size))
    m = len(responses.values)
    return float(np.log2(size - m + m * 2.0**-responses.noise_bits))


def bits_in(occurrences: NDArray[np.number], responses: RandomisedResponse | None) -> float:
    """Bits a token of a text, by the shares of its ids. occurrences: (m',) of each id; of none at all: 0."""
    sent = occurrences if responses is None else responses.sent(occurrences)
    used = sent[sent > 0] / max(1, sent.sum())
    chance = 0.0 if responses is None else responses.noise_bits * _share(occurrences, responses.values)
    return max(0.0, float(-(used * np.log2(used)).sum()) - chance)


def _share(amounts: NDArray[np.number], which: NDArray[np.number] | NDArray[np.bool_]) -> float:
    """Of all amounts. which: a mask, indices, or how much of each counts."""
    whole, counted = float(amounts.sum()), amounts * which if which.dtype.kind == "f" else amounts[which]
    return float(counted.sum()) / whole if whole else 0.0
