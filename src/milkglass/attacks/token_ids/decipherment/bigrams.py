"""What neighbouring ids say: counts of pairs, and a public language model made of such counts.

Used by decipherment.py. Knows nothing of what stands for what: public and scrambled ids are counted alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.sequences import Ids, Sequences

Floats = NDArray[np.float64]

WINDOW = 250  # ids to either side among which an unseen token takes its estimate from
LEAST = 0.003  # what an unseen token counts at the very least


def summed(where: Ids, values: Floats, size: int) -> Floats:
    """(size,) the values that fall to each place, added."""
    return np.bincount(where, values, size).astype(np.float64, copy=False)


@dataclass(frozen=True)
class Bigrams:
    """Distinct pairs (left, right), sorted, and how often each was seen."""

    left: Ids
    right: Ids
    count: Floats

    @classmethod
    def of(cls, texts: Sequences, size: int, distance: int = 1) -> Bigrams:
        """Pairs of ids `distance` apart within one sequence; `size` is n."""
        ids, owner = texts.ids, texts.owner
        within = owner[:-distance] == owner[distance:]
        keys, counts = np.unique(ids[:-distance][within] * size + ids[distance:][within], return_counts=True)
        return cls(keys // size, keys % size, counts.astype(np.float64))


def unseen(counts: Floats, ordinary: NDArray[np.bool_] | None = None) -> Floats:
    """(n,) the count to expect of each id in a second text as long, where it was not seen in the first.

    Good and Turing: the text's tokens seen once have as much in them as all that it lacks. Vocabularies are ordered,
    by frequency or by the time of a merge, or hold blocks (reserved ids, single letters), so this is counted among
    WINDOW ids to either side instead of over the whole vocabulary; nothing of any one vocabulary is written down.
    """
    once = np.cumsum(np.concatenate([[0.0], counts == 1]))
    never = np.cumsum(np.concatenate([[0.0], counts == 0]))
    at = np.arange(len(counts))
    low, high = np.maximum(at - WINDOW, 0), np.minimum(at + WINDOW + 1, len(counts))
    expected = (once[high] - once[low]) / (never[high] - never[low] + 1)
    return np.clip(expected, LEAST, 1.0)


@dataclass(frozen=True)
class PublicBigrams:
    """The attacker's text as numbers, by public id.

    Attributes:
        counts: (n,).
        share: (n,) of running tokens, sums to 1, never zero.
        bigrams: by distance.
    """

    counts: Floats
    share: Floats
    bigrams: dict[int, Bigrams]

    @classmethod
    def of(cls, corpus: Sequences, size: int, distances: tuple[int, ...] = (1, 2)) -> PublicBigrams:
        counts = corpus.counts(size).astype(np.float64)
        smooth = counts + unseen(counts)
        return cls(counts, smooth / smooth.sum(), {d: Bigrams.of(corpus, size, d) for d in distances})
