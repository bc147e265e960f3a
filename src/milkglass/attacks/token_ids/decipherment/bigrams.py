"""What counts say: of pairs of neighbouring ids, and how well the count of a scrambled id fits that of a public one.

The logarithms of two counts differ by a Gaussian whose variance has two parts: what two texts of one kind differ by
anyway, tau^2, and the sampling error of both counts, (1 + private size / public size) / (count + 1/2). tau is about 0.3
where both texts are of one kind and above 1 where they are not. Nobody has to say which it is: inside groups of
candidates the counts themselves show, by the likelihood of each tau (`spread` in decipherment.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from milkglass.sequences import Ids, Sequences

Floats = NDArray[np.float64]

WINDOW = 250  # ids to either side among which an unseen token takes its estimate from
MIN_COUNT = 0.003  # what an unseen token counts at the very least


def summed(where: Ids, values: Floats, size: int) -> Floats:
    """(size,) the values that fall to each place, added."""
    return np.bincount(where, values, size).astype(np.float64, copy=False)


class Bigrams:
    """Distinct pairs (left, right), sorted, and how often (count) each was seen."""

    def __init__(self, texts: Sequences, size: int, distance: int = 1) -> None:
        """Pairs of ids `distance` apart within one sequence; `size` is n."""
        ids, owner = texts.ids, texts.owner
        within = owner[:-distance] == owner[distance:]
        keys, counts = np.unique(ids[:-distance][within] * size + ids[distance:][within], return_counts=True)
        self.left, self.right, self.count = keys // size, keys % size, counts.astype(np.float64)


def unseen(counts: Floats) -> Floats:
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
    return np.clip(expected, MIN_COUNT, 1.0)


class PublicBigrams:
    """The attacker's text as numbers, by public id.

    Attributes:
        counts: (n,).
        share: (n,) of running tokens, sums to 1, never zero.
        bigrams: by distance.
    """

    def __init__(self, corpus: Sequences, size: int, distances: tuple[int, ...] = (1, 2)) -> None:
        self.counts = corpus.counts(size).astype(np.float64)
        smooth = self.counts + unseen(self.counts)
        self.share = smooth / smooth.sum()
        self.bigrams = {d: Bigrams(corpus, size, d) for d in distances}


class FrequencyFit:
    """Counts of scrambled ids beside those that the public text predicts.

    Attributes:
        seen: (n',) counts by scrambled id.
        expected: (n,) by public id, what the private text should hold of each, under one of its scrambled ids where it
            has several.
        ratio: size of the private text over that of the public one, without tokens that are already known.
    """

    def __init__(self, seen: Floats, public: PublicBigrams, rows: Ids, members: Ids, aliases: int = 1) -> None:
        """The fit over the ids that are still free.

        Args:
            rows, members: the scrambled and public ids still to be matched.
            aliases: over how many ids a token's count is spread, and with it the part of its variance that is the
                public text's.
        """
        total = float(seen[rows].sum())
        mass, size = float(public.share[members].sum()), float(public.counts[members].sum())
        self.seen, self.expected = seen, public.share * (total / max(mass, 1e-300) / aliases)
        self.ratio = total / max(size, 1.0) / aliases

    def scores(self, rows: Ids, members: Ids, tau: float) -> Floats:
        """Log likelihood of each pair; `rows` and `members` of any shapes that broadcast together."""
        seen, expected = self.seen[rows], self.expected[members]
        variance = tau**2 + (1 + self.ratio) / (np.maximum(seen, expected) + 0.5)
        return -((np.log(seen + 0.5) - np.log(expected + 0.5)) ** 2) / (2 * variance) - np.log(variance) / 2
