"""Limits every symbol: its bits of entropy over its tokens, and the largest share of one token.

With p(t) the share of token t in the mass of its symbol,

    bits(s) = - sum of p(t) log2 p(t) >= h         share(s) = max of p(t) <= p_max

A symbol that breaks a limit is joined to the nearest symbol with which both hold, or else to the nearest, and checked
again. At most half of the symbols are given up like this. A symbol is left as it is if its heaviest token has more than
p_max of all mass, since no union could hold the limit; client/obfuscate/symbol_rate.py reports the symbols that still
break one. Entropy is over tokens, not words: two tokens that stand for one word count as different.
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
        min_bits: h, the least entropy of a symbol over its tokens, in bits.
        max_share: p_max, the largest share of a symbol's mass that one token may have.
    """

    min_bits: float
    max_share: float

    def are_broken_by(self, bits: Floats, largest_shares: Floats) -> NDArray[np.bool_]:
        """Returns (m,) whether each of m symbols breaks a limit, by its bits (m,) and its largest share (m,)."""
        return (bits < self.min_bits - ROUNDING_SLACK) | (largest_shares > self.max_share + ROUNDING_SLACK)


def bits_and_largest_shares(symbol_of_token: Ids, mass: Floats, symbol_count: int) -> tuple[Floats, Floats]:
    """Returns (m,) the entropy in bits of each of m symbols, and (m,) the largest share of one of its tokens.

    Args:
        symbol_of_token: (c,) the symbol of each of c tokens.
        mass: (c,) how common each token is, above 0.
        symbol_count: m.
    """
    return _measures(*_sums(symbol_of_token, mass, symbol_count))


def join_symbols(found: FoundSymbols, mass: Floats, limits: DiversityLimits) -> Ids:
    """Returns (c,) the symbol of each token, from 0 without gaps, after symbols that broke a limit joined others.

    Args:
        found: the symbols before, and the points by which the nearest is chosen.
        mass: (c,) how common each token is, above 0.
        limits: what every symbol must hold.
    """
    _, symbol_of_token = np.unique(found.symbol_of_token, return_inverse=True)
    symbol_count = int(symbol_of_token.max()) + 1
    total, mass_log_sum, largest_mass = _sums(symbol_of_token, mass, symbol_count)
    centres = np.zeros((symbol_count, found.points.shape[1]))
    weight = np.sqrt(mass)
    np.add.at(centres, symbol_of_token, found.points * weight[:, None])
    centre_weight = np.bincount(symbol_of_token, weight, symbol_count)
    is_live, joined_to = np.ones(symbol_count, np.bool_), np.arange(symbol_count)
    is_hopeless = largest_mass > limits.max_share * mass.sum()  # no union is large enough
    for _ in range(symbol_count // 2):
        bits, largest_shares = _measures(total, mass_log_sum, largest_mass)
        is_broken = is_live & limits.are_broken_by(bits, largest_shares) & ~is_hopeless
        if not is_broken.any():
            break
        weakest = int(np.flatnonzero(is_broken)[bits[is_broken].argmin()])
        centre_means = centres / centre_weight[:, None]
        distance = ((centre_means - centre_means[weakest]) ** 2).sum(1)
        union = (
            total + total[weakest],
            mass_log_sum + mass_log_sum[weakest],
            np.maximum(largest_mass, largest_mass[weakest]),
        )
        is_possible = is_live & ~limits.are_broken_by(*_measures(*union))
        is_allowed = is_possible if is_possible[np.arange(symbol_count) != weakest].any() else is_live.copy()
        is_allowed[weakest] = False
        partner = int(np.where(is_allowed, distance, np.inf).argmin())
        for amounts in (total, mass_log_sum, centres, centre_weight):
            amounts[partner] += amounts[weakest]
        largest_mass[partner] = max(largest_mass[partner], largest_mass[weakest])
        is_hopeless[partner] |= is_hopeless[weakest]
        is_live[weakest], joined_to[joined_to == weakest] = False, partner
    return np.unique(joined_to[symbol_of_token], return_inverse=True)[1].astype(np.int64)


def _sums(symbol_of_token: Ids, mass: Floats, symbol_count: int) -> tuple[Floats, Floats, Floats]:
    """Returns (m,) of each symbol its mass, the sum of mass log2 mass, and the mass of its heaviest token."""
    largest_mass = np.zeros(symbol_count)
    np.maximum.at(largest_mass, symbol_of_token, mass)
    total = np.bincount(symbol_of_token, mass, symbol_count).astype(np.float64)
    return total, np.bincount(symbol_of_token, mass * np.log2(mass), symbol_count).astype(np.float64), largest_mass


def _measures(total: Floats, mass_log_sum: Floats, largest_mass: Floats) -> tuple[Floats, Floats]:
    """Returns (m,) the entropies H = log2 M - (sum of w log2 w) / M, and (m,) the largest shares."""
    return np.log2(total) - mass_log_sum / total, largest_mass / total
