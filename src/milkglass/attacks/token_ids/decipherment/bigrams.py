"""Counts pairs of near ids, and measures how well the count of a scrambled id fits that of a public id.

The logarithms of two counts differ by a Gaussian whose variance has two parts: tau^2 between two texts, and the
sampling error of both counts, (1 + private size / public size) / (count + 1/2). tau is about 0.3 if both texts are of
one kind, and above 1 if not. It is estimated by maximum likelihood within groups of candidates (`likeliest_tau` in
decipherment.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from milkglass.sequences import Ids, Sequences

Floats = NDArray[np.float64]

WINDOW_IDS = 250  # ids to either side of an unseen token, from which its expected count is estimated
MIN_COUNT = 0.003  # the least expected count of an unseen token


def sum_by_index(indices: Ids, values: Floats, size: int) -> Floats:
    """Returns (size,) the sum of the values that have each index."""
    return np.bincount(indices, values, size).astype(np.float64, copy=False)


def normalise(weights: Floats) -> Floats:
    """Returns the weights divided by their sum, zeros if all are zero."""
    return np.asarray(weights / max(float(weights.sum()), 1e-300))


class PairCounts:
    """Counts the distinct pairs of ids at one distance.

    Attributes:
        left, right: (pairs,) the ids of each pair, sorted by the left one, then by the right one.
        counts: (pairs,) how often each pair occurs.
    """

    def __init__(self, texts: Sequences, size: int, distance: int = 1) -> None:
        """Counts the pairs of ids within one sequence.

        Args:
            texts: the sequences.
            size: n, the number of ids.
            distance: how far apart the two ids of a pair are.
        """
        ids, text_of_id = texts.ids, texts.sequence_indices
        is_within_text = text_of_id[:-distance] == text_of_id[distance:]
        keys, counts = np.unique(
            ids[:-distance][is_within_text] * size + ids[distance:][is_within_text], return_counts=True
        )
        self.left, self.right, self.counts = keys // size, keys % size, counts.astype(np.float64)


def unseen_counts(counts: Floats) -> Floats:
    """Returns (n,) the expected count of each id in another text of the same length, if it does not occur in this one.

    Good and Turing: the tokens seen once have as much mass as all unseen ones. Vocabularies are ordered, by frequency
    or by the time of a merge, or hold blocks (reserved ids, single letters). So both are counted among WINDOW_IDS ids
    to either side and not over the whole vocabulary.
    """
    once_before = np.cumsum(np.concatenate([[0.0], counts == 1]))
    never_before = np.cumsum(np.concatenate([[0.0], counts == 0]))
    ids = np.arange(len(counts))
    low, high = np.maximum(ids - WINDOW_IDS, 0), np.minimum(ids + WINDOW_IDS + 1, len(counts))
    expected = (once_before[high] - once_before[low]) / (never_before[high] - never_before[low] + 1)
    return np.clip(expected, MIN_COUNT, 1.0)


class PublicPairCounts:
    """Counts what the attacker's text shows of public ids.

    Attributes:
        counts: (n,) how often each id occurs.
        share: (n,) each id's share of the running tokens, smoothed: it sums to 1 and is never zero.
        pairs: the counts of the text's pairs of ids, by distance.
    """

    def __init__(self, corpus: Sequences, size: int, distances: tuple[int, ...] = (1, 2)) -> None:
        self.counts = corpus.counts(size).astype(np.float64)
        smoothed_counts = self.counts + unseen_counts(self.counts)
        self.share = smoothed_counts / smoothed_counts.sum()
        self.pairs = {d: PairCounts(corpus, size, d) for d in distances}


class FrequencyFit:
    """Compares counts of scrambled ids with those that the public text predicts.

    Attributes:
        scrambled_counts: (n',) how often each scrambled id occurs.
        expected: (n,) the predicted count of each public id in the private text, under one of its scrambled ids.
        ratio: the size of the private text over that of the public one and over `alias_count`, without tokens that are
            already known.
    """

    def __init__(
        self, scrambled_counts: Floats, public: PublicPairCounts, scrambled_ids: Ids, public_ids: Ids, alias_count: int
    ) -> None:
        """Predicts the counts of scrambled ids.

        Args:
            scrambled_counts: (n',) how often each scrambled id occurs.
            public: what the attacker's text shows.
            scrambled_ids: the scrambled ids that are still free.
            public_ids: the public ids that are still free.
            alias_count: how many ids share a token's count. The public text's part of the variance is divided by it,
                too.
        """
        total = float(scrambled_counts[scrambled_ids].sum())
        free_share = float(public.share[public_ids].sum())
        free_count = float(public.counts[public_ids].sum())
        self.scrambled_counts = scrambled_counts
        self.expected = public.share * (total / max(free_share, 1e-300) / alias_count)
        self.ratio = total / max(free_count, 1.0) / alias_count

    def scores(self, scrambled_ids: Ids, public_ids: Ids, tau: float) -> Floats:
        """Returns the log-likelihood of each pair. The shapes of both arrays of ids must broadcast together."""
        scrambled_counts, expected = self.scrambled_counts[scrambled_ids], self.expected[public_ids]
        variance = tau**2 + (1 + self.ratio) / (np.maximum(scrambled_counts, expected) + 0.5)
        return -((np.log(scrambled_counts + 0.5) - np.log(expected + 0.5)) ** 2) / (2 * variance) - np.log(variance) / 2
