"""The rate of a coarse vocabulary: how much of the text its ids reveal, and which limits of the map do not hold.

    at most     log2 m' bits a token, m' ids in all, whatever the reader knows
    in data     - sum over ids of p log2 p, p the id's share of the running tokens; special tokens do not count

It also measures the weakest attack, which needs no context: naming the likeliest token of each sent id. Where m of the
ids are exchanged by randomised response, and each sent one has N bits of chance (noise/responses.py),

    at most     log2 (m' - m + 2^(log2 m - N)), the capacity of both kinds of ids together (Shannon 1948)
    in data     the same sum with p of what is sent, less N times the share of the exchanged ids
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.noise.responses import RandomisedResponse
from milkglass.schemes.coarse import Coarse, mass_of
from milkglass.schemes.symbols.diversity import bits_and_largest_shares
from milkglass.schemes.symbols.symbol_map import shared_symbols


@dataclass(frozen=True)
class SymbolRate:
    """Holds how much of one text the ids of one map reveal.

    Attributes:
        ids: m', the number of ids.
        most_bits: the most bits a token that the ids can carry.
        bits: bits a token of the text, by the ids' own shares.
        running: the share of running tokens read by naming the likeliest token of each sent id. If ids are sent
            unchanged, that is the commonest token of the id.
        content: the same share of content tokens.
        symbols: the number of ids to which the limits apply.
        alone: the number of ids to which no limit applies: those of special tokens and function words.
        alone_running: the share of running tokens that have such an id.
        unmet: the number of symbols that break a limit, including symbols of a single token.
        unmet_running: the share of running tokens that have such a symbol.
        epsilon: of the exchange of ids; 0: they are sent unchanged.
        kept: the chance that an id of several tokens is sent unchanged.
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
    sent_counts: NDArray[np.int64],
    is_content: NDArray[np.bool_],
    exempt_ids: NDArray[np.int64],
) -> SymbolRate:
    """Returns the rate of a map. Shares of nothing are 0.

    Args:
        scheme: the coarse vocabulary, with its map.
        counts: (n,) how common each token is.
        sent_counts: (n,) occurrences in the client's texts, 0 for special tokens.
        is_content: (n,) whether each token carries content.
        exempt_ids: ids of tokens to which the limits do not apply (`Coarse.exempt`).
    """
    symbol_of, size = scheme.token_symbols, int(scheme.token_symbols.max()) + 1
    mass, is_exempt = mass_of(counts), np.isin(np.arange(size), symbol_of[exempt_ids])
    bits, largest_shares = bits_and_largest_shares(symbol_of, mass, size)
    is_unmet = ~is_exempt & scheme.limits.are_broken_by(bits, largest_shares)
    is_commonest = np.zeros(len(symbol_of), np.bool_)
    order = np.lexsort((np.arange(len(symbol_of)), -mass, symbol_of))
    is_commonest[order[np.unique(symbol_of[order], return_index=True)[1]]] = True
    occurrences, responses = np.bincount(symbol_of, sent_counts, size), symbol_responses(scheme)
    read_mass = read_share_by_name(symbol_of, mass, is_commonest, responses)
    return SymbolRate(
        ids=size,
        most_bits=most_bits(size, responses),
        bits=bits_in(occurrences, responses),
        running=_share(sent_counts, read_mass),
        content=_share(np.where(is_content, sent_counts, 0), read_mass),
        symbols=int((~is_exempt).sum()),
        alone=int(is_exempt.sum()),
        alone_running=_share(occurrences, is_exempt),
        unmet=int(is_unmet.sum()),
        unmet_running=_share(occurrences, is_unmet),
        epsilon=scheme.epsilon or 0.0,
        kept=1.0 if responses is None else responses.keep_probability,
    )


def read_share_by_name(
    symbol_of: NDArray[np.int64], mass: NDArray[np.float64], is_commonest: NDArray[np.bool_],
    responses: RandomisedResponse | None,
) -> NDArray[np.float64]:  # fmt: skip
    """Returns (n,) for each token the share of its occurrences that naming the likeliest token of each sent id reads.

    Args:
        symbol_of: (n,) the symbol of each token.
        mass: (n,) the share of each token by its count.
        is_commonest: (n,) whether each token is the most common one of its symbol.
        responses: the exchange of ids. None: they are sent unchanged.
    """
    read_shares = is_commonest.astype(np.float64)
    if responses is None or len(responses.values) < 2:
        return read_shares
    commonest_ids = np.flatnonzero(is_commonest & np.isin(symbol_of, responses.values))
    top = commonest_ids[mass[commonest_ids].argmax()]  # of all exchanged symbols: it is sent as any of them
    exchanged = (1 - responses.keep_probability) / (len(responses.values) - 1)
    is_exchanged = mass[top] * exchanged > mass[commonest_ids] * responses.keep_probability
    read_shares[commonest_ids] = np.where(is_exchanged, 0.0, responses.keep_probability)
    read_shares[top] = responses.keep_probability + exchanged * is_exchanged.sum()
    return read_shares


def symbol_responses(scheme: Coarse) -> RandomisedResponse | None:
    """Returns the exchange of a scheme's symbols by their numbers. None: symbols are sent unchanged."""
    if scheme.epsilon is None:
        return None
    return RandomisedResponse(shared_symbols(scheme.token_symbols), scheme.epsilon)


def most_bits(size: int, responses: RandomisedResponse | None) -> float:
    """Returns the most bits a token that m' = `size` ids can carry."""
    if responses is None:
        return float(np.log2(size))
    m = len(responses.values)
    return float(np.log2(size - m + m * 2.0**-responses.noise_bits))


def bits_in(occurrences: NDArray[np.number], responses: RandomisedResponse | None) -> float:
    """Returns bits a token of a text, by the occurrences (m',) of its ids; 0 for an empty text."""
    sent = occurrences if responses is None else responses.expected_counts(occurrences)
    probabilities = sent[sent > 0] / max(1, sent.sum())
    chance = 0.0 if responses is None else responses.noise_bits * _share(occurrences, responses.values)
    return max(0.0, float(-(probabilities * np.log2(probabilities)).sum()) - chance)


def _share(amounts: NDArray[np.number], selection: NDArray[np.number] | NDArray[np.bool_]) -> float:
    """Returns a share of all amounts. `selection` is a mask, indices, or how much of each counts."""
    total, counted = float(amounts.sum()), amounts * selection if selection.dtype.kind == "f" else amounts[selection]
    return float(counted.sum()) / total if total else 0.0
