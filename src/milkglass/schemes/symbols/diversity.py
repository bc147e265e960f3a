"""Limits every symbol: its bits of entropy over its tokens, and the largest share of one token.

With p(t) the share of token t in the mass of its symbol,

    bits(s) = - sum of p(t) log2 p(t) >= h         share(s) = max of p(t) <= p_max

A symbol that breaks a limit is joined to the nearest symbol with which both hold, or else to the nearest, and checked
again. At most half of the symbols are given up like this. A symbol is left as it is if its heaviest token has more than
p_max of all mass, since no union could hold the limit; client/obfuscate/symbol_rate.py reports the symbols that still
break one. Two tokens of one word count as two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.schemes.mixture import Ids
from milkglass.schemes.symbols.finder import FoundSymbols

Floats = NDArray[np.float64]
ROUNDING_SLACK = 1e-9  # sums in another order may round to the other side of a limit


@dataclass(frozen=True)
class DiversityLimits:
    """Holds the limits of every symbol, and says which symbols break one.

    Attributes:
        min_bits: h of the module.
        max_share: p_max of the module.
    """

    min_bits: float
    max_share: float

    def are_broken_by(self, bits: Floats, share: Floats) -> NDArray[np.bool_]:
        """Returns (m,) whether each symbol breaks a limit, by its bits and its largest share."""
        return (bits < self.min_bits - ROUNDING_SLACK) | (share > self.max_share + ROUNDING_SLACK)


def bits_and_shares(symbol_of_token: Ids, mass: Floats, symbol_count: int) -> tuple[Floats, Floats]:
    """Returns (m,) each symbol's entropy in bits and (m,) its largest share of one token, for masses (c,) of tokens."""
    return _measures(*_sums(symbol_of_token, mass, symbol_count))


def join_symbols(clusters: FoundSymbols, mass: Floats, limits: DiversityLimits) -> Ids:
    """Returns (c,) the symbol of each token, from 0 without gaps, after symbols that broke a limit joined others."""
    _, symbol_of_token = np.unique(clusters.symbol_of_token, return_inverse=True)
    symbol_count = int(symbol_of_token.max()) + 1
    total, mass_log_sum, heaviest = _sums(symbol_of_token, mass, symbol_count)
    centres = np.zeros((symbol_count, clusters.points.shape[1]))
    weight = np.sqrt(mass)
    np.add.at(centres, symbol_of_token, clusters.points * weight[:, None])
    centre_weight = np.bincount(symbol_of_token, weight, symbol_count)
    is_live, joined_to = np.ones(symbol_count, np.bool_), np.arange(symbol_count)
    is_hopeless = heaviest > limits.max_share * mass.sum()  # no union is large enough
    for _ in range(symbol_count // 2):
        bits, share = _measures(total, mass_log_sum, heaviest)
        is_broken = is_live & limits.are_broken_by(bits, share) & ~is_hopeless
        if not is_broken.any():
            break
        weakest = int(np.flatnonzero(is_broken)[bits[is_broken].argmin()])
        centre_means = centres / centre_weight[:, None]
        distance = ((centre_means - centre_means[weakest]) ** 2).sum(1)
        union = total + total[weakest], mass_log_sum + mass_log_sum[weakest], np.maximum(heaviest, heaviest[weakest])
        is_possible = is_live & ~limits.are_broken_by(*_measures(*union))
        is_allowed = is_possible if is_possible[np.arange(symbol_count) != weakest].any() else is_live.copy()
        is_allowed[weakest] = False
        partner = int(np.where(is_allowed, distance, np.inf).argmin())
        for amounts in (total, mass_log_sum, centres, centre_weight):
            amounts[partner] += amounts[weakest]
        heaviest[partner] = max(heaviest[partner], heaviest[weakest])
        is_hopeless[partner] |= is_hopeless[weakest]
        is_live[weakest], joined_to[joined_to == weakest] = False, partner
    return np.unique(joined_to[symbol_of_token], return_inverse=True)[1].astype(np.int64)


def _sums(symbol_of_token: Ids, mass: Floats, symbol_count: int) -> tuple[Floats, Floats, Floats]:
    """Returns (m,) of each symbol its mass, the sum of mass log2 mass, and the mass of its heaviest token."""
    heaviest = np.zeros(symbol_count)
    np.maximum.at(heaviest, symbol_of_token, mass)
    total = np.bincount(symbol_of_token, mass, symbol_count).astype(np.float64)
    return total, np.bincount(symbol_of_token, mass * np.log2(mass), symbol_count).astype(np.float64), heaviest


def _measures(total: Floats, mass_log_sum: Floats, heaviest: Floats) -> tuple[Floats, Floats]:
    """Returns (m,) the entropies H = log2 M - (sum of w log2 w) / M, and (m,) the largest shares."""
    return np.log2(total) - mass_log_sum / total, heaviest / total
