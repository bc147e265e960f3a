"""The likelihood of a text in the attacker's language: an n-gram model of public ids.

    p(c | a b) = (count(a b c) + kinds(a b) p(c | b)) / (count(a b) + kinds(a b))

p(c | b) comes from p(c), and p(c) from 1/v, in the same way. This is Witten and Bell's interpolation: kinds(h) is the
number of different ids seen after h. It has no parameters, and no text is impossible.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from milkglass.sequences import Ids, Sequences, looked_up

Floats = NDArray[np.float64]
ORDER = 3


class Level:
    """Counts of the runs of k ids.

    Attributes:
        keys: the runs as sorted numbers.
        times: how often each occurs.
        heads, after, kinds: the runs without their last id, how often they went on, and with how many different ids.
    """

    def __init__(self, numbers: Ids, size: int) -> None:
        self.keys, self.times = np.unique(numbers, return_counts=True)
        self.heads, where, self.kinds = np.unique(self.keys // size, return_inverse=True, return_counts=True)
        self.after = np.bincount(where, self.times, len(self.heads)).astype(np.int64)

    def over(self, numbers: Ids, size: int, lower: Floats) -> Floats:
        """Returns the probability of each run's last id, from the probabilities `lower` by shorter runs."""
        times = looked_up(self.keys, self.times, numbers)
        after, kinds = (looked_up(self.heads, values, numbers // size) for values in (self.after, self.kinds))
        return np.where(kinds > 0, (times + kinds * lower) / np.maximum(after + kinds, 1), lower)


class Prior:
    """An interpolated trigram model of public ids.

    Attributes:
        levels: the counts for runs of 1, 2 and 3 ids.
        size: v.
    """

    def __init__(self, corpus: Sequences, size: int) -> None:
        """Counts the runs of public ids below `size`."""
        self.levels, self.size = [Level(_runs(corpus, k, size), size) for k in range(1, ORDER + 1)], size

    def cost(self, ids: Ids) -> float:
        """Returns the mean negative log-likelihood (nats) of a text's tokens; 0 for an empty text."""
        if not len(ids):
            return 0.0
        text = Sequences(ids, np.array([len(ids)]))
        p = np.full(len(ids), 1 / self.size)
        for k, level in enumerate(self.levels, start=1):
            p[k - 1 :] = level.over(_runs(text, k, self.size), self.size, p[k - 1 :])
        return float(-np.log(p).mean())


def _runs(texts: Sequences, k: int, size: int) -> Ids:
    """Returns every run of k ids within one text as one number, (((a v) + b) v) + c."""
    ids, owner = texts.ids, texts.owner
    count = max(0, len(ids) - k + 1)
    numbers = np.zeros(count, np.int64)
    for place in range(k):
        numbers = numbers * size + ids[place : place + count]
    return np.asarray(numbers[owner[:count] == owner[k - 1 : k - 1 + count]])
