"""SANTEXT, CUSTEXT and RNM, transcribed literally: a row, a word, a draw at a time.

The oracle of `milkglass.sanitizers`. Needs NumPy only and imports nothing of milkglass.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def lengths(x: Matrix) -> Matrix:
    return np.sqrt((x * x).sum(axis=1))


def cosine_row(x: Matrix, i: int, norms: Matrix | None = None) -> Matrix:
    """The cosine of row i with every row. norms: the rows' lengths, where they are at hand."""
    norms = lengths(x) if norms is None else norms
    return (x @ x[i]) / np.maximum(norms * norms[i], 1e-30)


def candidate_list(x: Matrix, i: int, k: int, norms: Matrix | None = None) -> tuple[list[int], list[float]]:
    """RNM, 3.2: the k words of the largest cosine but i itself, and their cosines normalised within the list."""
    cosines = cosine_row(x, i, norms)
    order = [int(j) for j in np.argsort(-cosines, kind="stable")[: k + 1] if j != i][:k]
    values = [float(cosines[j]) for j in order]
    low, high = min(values), max(values)
    return order, [(value - low) / (high - low) if high > low else 0.0 for value in values]


def noisy_max(scores: list[float], scale: float, rng: np.random.Generator) -> int:
    """Report-noisy-max, once."""
    noisy = [score + rng.laplace(0, scale) for score in scores]
    return int(np.argmax(noisy))


def santext_law(x: Matrix, at: Matrix, epsilon: float) -> Matrix:
    """Probabilities of every word as a substitute for a word at `at`."""
    weights = np.exp(-epsilon / 2 * np.sqrt(((x - at) ** 2).sum(axis=1)))
    return weights / weights.sum()


def santext_plus_law(
    x: Matrix, vocabulary: dict[int, int], sensitive: set[int], word: int, epsilon: float, p: float
) -> dict[int, float]:
    """SANTEXT+, Algorithm 2 of Yue et al.: V = V_S and V_N, the sensitive and the other words of the corpus.

    A word of V_S becomes y of V_S with probability ~ exp(-eps/2 d(word, y)). A word of V_N is kept with probability
    1 - p, and becomes y of V_S by the same law with probability p. vocabulary: how often each word of the corpus
    occurs; words that do not occur are neither in V_S nor in V_N.
    """
    v_s = [y for y in vocabulary if y in sensitive and vocabulary[y] > 0]
    weights = {}
    for y in v_s:
        distance = float(np.sqrt(((x[word] - x[y]) ** 2).sum()))
        weights[y] = float(np.exp(-epsilon / 2 * distance))
    total = sum(weights.values())
    replaced = {y: weight / total for y, weight in weights.items()}
    if word in sensitive:
        return replaced
    law = {y: p * probability for y, probability in replaced.items()}
    law[word] = law.get(word, 0.0) + (1 - p)
    return law


def santext_draw(x: Matrix, word: int, epsilon: float, rng: np.random.Generator) -> int:
    return int(rng.choice(len(x), p=santext_law(x, x[word], epsilon)))


def custext_groups(x: Matrix, order: list[int], k: int, metric: str) -> list[list[int]]:
    """Greedy: the first free word takes the nearest free ones; fewer than k left over join the last group."""
    free, groups, norms = set(range(len(x))), [], lengths(x)
    for i in order:
        if i not in free or len(free) < k:
            continue
        near = cosine_row(x, i, norms) if metric == "cosine" else -np.linalg.norm(x - x[i], axis=1)
        near[i] = np.inf
        group: list[int] = []
        for j in np.argsort(-near, kind="stable"):
            if int(j) in free:
                group.append(int(j))
            if len(group) == k:
                break
        groups.append(group)
        free -= set(group)
    groups[-1] += sorted(free)
    return groups


def custext_law(x: Matrix, group: list[int], i: int, epsilon: float, metric: str) -> Matrix:
    """Probabilities over the group of word i."""
    near = cosine_row(x, i)[group] if metric == "cosine" else -np.linalg.norm(x[group] - x[i], axis=1)
    u = (near - near.min()) / (near.max() - near.min())
    weights = np.exp(epsilon * u / 2)
    return weights / weights.sum()
