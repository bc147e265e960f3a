"""LAMP's discrete proposals: other orders of the same tokens (Balunovic et al. 2022, section 4.2).

Swap two tokens, move one, move a span, put a prefix at the end. They are orders of the places that are free, so that
special tokens and padding stay where they are.
"""

from __future__ import annotations

import numpy as np

from milkglass.sequences import Ids


def swapped(count: int, rng: np.random.Generator) -> Ids:
    """(count,) with two places exchanged."""
    order = np.arange(count)
    i, j = rng.choice(count, 2, replace=False)
    order[[i, j]] = order[[j, i]]
    return order


def span_moved(count: int, rng: np.random.Generator, longest: int | None = None) -> Ids:
    """(count,) with a span of at most `longest` places, and fewer than all, put elsewhere."""
    width = int(rng.integers(1, min(count - 1, longest or count - 1) + 1))
    start = int(rng.integers(count - width + 1))
    rest = np.delete(np.arange(count), np.s_[start : start + width])
    to = int(rng.choice(np.delete(np.arange(len(rest) + 1), start)))  # not where it was
    return np.insert(rest, to, np.arange(start, start + width))


def token_moved(count: int, rng: np.random.Generator) -> Ids:
    """(count,) with one place put elsewhere."""
    return span_moved(count, rng, longest=1)


def rotated(count: int, rng: np.random.Generator) -> Ids:
    """(count,) with a prefix put at the end."""
    return np.roll(np.arange(count), -int(rng.integers(1, count)))


MOVES = (swapped, token_moved, span_moved, rotated)


def proposals(count: int, expected: int, rng: np.random.Generator) -> list[Ids]:
    """At most `expected` different orders of `count` places, none of them the order as it is, all four moves in
    turn."""
    if count < 2:
        return []
    drawn = [MOVES[number % len(MOVES)](count, rng) for number in range(expected)]
    return list({one.tobytes(): one for one in drawn}.values())
