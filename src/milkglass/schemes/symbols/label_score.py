"""The label score of a token: what its presence says of the label, by the client's own rows (naive Bayes).

With c_k(t) the texts of class k that hold t, n_k all texts of class k, and "other" all other classes,

    score_k(t) = log (c_k + 1) / (n_k + 2) - log (c_other + 1) / (n_other + 2)       (Laplace's rule on both sides)

times trust(t) = c / (c + 4), c = c_k + c_other: a token that was seen once says little. One coordinate a class, over
sqrt 2: with two classes the coordinates are opposite, and distances are those of one log odds. For a regression there
is one coordinate, the mean score of the texts that hold the token, times trust. A token that was seen in fewer than two
texts takes 0.7 of the mean of all others, weighted by trust and exp(12 (cos - 1)).

Out of scope: combinations of tokens, which is what the model is trained for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from milkglass.schemes.symbols.finder import Floats, TaskTexts

PRIOR = 4.0  # texts that a token's own score must outweigh
SEEN = 0.3  # of trust: from two texts on a token has a score of its own
SHARPNESS = 12.0  # of the kernel over cosines
CAUTION = 0.7  # of what the neighbours say
BLOCK = 1024  # rows of cosines held at a time


def label_scores(labelled: TaskTexts, size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(n, f) the scores times trust, and (n,) the trust."""
    pairs = np.unique(labelled.texts.owner * size + labelled.texts.ids)  # a token counts once a text
    text, token = pairs // size, pairs % size
    seen = np.bincount(token, minlength=size).astype(np.float64)
    trust = seen / (seen + PRIOR)
    if labelled.classes == 0:
        total = np.bincount(token, labelled.labels[text], size)
        return (trust * total / np.maximum(seen, 1))[:, None], trust
    columns = []
    for number in range(labelled.classes):
        inside = labelled.labels == number
        own, whole = np.bincount(token, inside[text], size), int(inside.sum())
        other = seen - own
        odds = np.log((own + 1) / (whole + 2)) - np.log((other + 1) / (len(inside) - whole + 2))
        columns.append(trust * odds / np.sqrt(2))
    return np.stack(columns, axis=1), trust


def with_neighbours(scores: NDArray[np.float64], trust: NDArray[np.float64], unit: Floats) -> Floats:
    """(n, f) the scores, where tokens that were hardly seen have their neighbours'. unit: (n, d) rows of length 1."""
    known, result = np.flatnonzero(trust > 0), scores.copy()
    unseen = np.flatnonzero(trust <= SEEN)
    if not len(known):
        return result.astype(np.float32)
    against = unit[known]
    for start in range(0, len(unseen), BLOCK):
        part = unseen[start : start + BLOCK]
        near = np.exp(SHARPNESS * (unit[part] @ against.T - 1)) * trust[known]
        result[part] = CAUTION * (near @ scores[known]) / (near.sum(1, keepdims=True) + 1e-9)
    return result.astype(np.float32)
