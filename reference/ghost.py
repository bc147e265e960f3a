"""GHOST (ASIA CCS '26), transcribed literally: Algorithm 1 and Algorithm 2, a token and a candidate at a time.

The oracle of `milkglass.sanitizers.ghost`. Needs NumPy and, for hidden states, a transformers model; imports nothing of
milkglass. Two things follow the published code and not the paper: the overlap is a share of k, and the search ends at
k + 100. Early stop is by sweep. Hidden states are of one sentence at its own length, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
States = Callable[[list[list[int]]], list[Matrix]]  # sequences of one length -> of each (layers, tokens, width)


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------
def ranking(x: Matrix, t: int, fixed: set[int]) -> list[int]:
    """All other tokens, nearest first."""
    norms = np.sqrt((x * x).sum(axis=1))
    cosines = (x @ x[t]) / np.maximum(norms * norms[t], 1e-30)
    return [int(j) for j in np.argsort(-cosines, kind="stable") if j != t and int(j) not in fixed]


def search(
    x: Matrix, lemmas: Sequence[Any], fixed: set[int], k: int, overlap: float,
    indirect: bool = True, direct: bool = True, lemma: bool = True, tokens: Sequence[int] | None = None,
) -> dict[int, tuple[list[int], int, bool]]:  # fmt: skip
    """Of each token its shadows, the k at which it has some, and whether it fell back. fixed: special tokens.
    tokens: whose shadows are asked for; None: everybody's."""
    ranks: dict[int, list[int]] = {}
    found: dict[int, tuple[list[int], int, bool]] = {t: ([t], 0, False) for t in fixed}
    for t in range(len(x)) if tokens is None else tokens:
        if t in fixed:
            continue
        if t not in ranks:
            ranks[t] = ranking(x, t, fixed)
        others = ranks[t]
        width = k
        while True:
            mine = others[:width]
            shadows = []
            for other in mine:
                if other not in ranks:
                    ranks[other] = ranking(x, other, fixed)
                theirs = ranks[other][:width]
                similar = indirect and len(set(mine) & set(theirs)) / min(width, len(others)) > overlap
                similar = similar or (direct and t in theirs)
                similar = similar or (lemma and lemmas[t] == lemmas[other])
                if not similar:
                    shadows.append(other)
            if shadows:
                found[t] = (shadows, len(mine), False)
                break
            if width >= k + 100 or width >= len(others):
                found[t] = (others[:k], len(mine), True)
                break
            width += 10
    return found


# --- Algorithm 2 ------------------------------------------------------------------------------------------------------
def states_of(model: Any) -> States:
    """Hidden states of a transformers model, embeddings and every layer, by its own output_hidden_states."""
    import torch

    def states(sequences: list[list[int]]) -> list[Matrix]:
        with torch.inference_mode():
            hidden = model(input_ids=torch.tensor(sequences), output_hidden_states=True).hidden_states
        return list(np.stack([layer.double().numpy() for layer in hidden], axis=1))

    return states


def loss(target: Matrix, found: Matrix) -> float:
    """The sum over layers of the mean squared error."""
    return float(sum(((a - b) ** 2).mean() for a, b in zip(target, found, strict=True)))


def select(
    states: States, original: list[int], shadows: dict[int, list[int]], start: list[int],
    threshold: float, beams: int = 1, sweeps: int = 20, together: bool = False,
) -> tuple[list[int], float, list[float]]:  # fmt: skip
    """The chosen sequence, its loss, and the best loss after each position that was visited.

    together: the candidates of a position in one forward, as the published code has them; else one at a time.
    """
    target = states([original])[0]
    beam = [(loss(target, states([start])[0]), start)]
    history = [beam[0][0]]
    for _ in range(sweeps):
        before = beam[0][0]
        for i, token in enumerate(original):
            if shadows[token] == [token]:
                continue
            pool: list[list[int]] = []
            for _, one in beam:
                for other in shadows[token]:
                    tried = [*one[:i], other, *one[i + 1 :]]
                    if tried not in pool:
                        pool.append(tried)
            found = states(pool) if together else [states([one])[0] for one in pool]
            losses = [loss(target, one) for one in found]
            order = sorted(range(len(pool)), key=lambda at: losses[at])
            beam = [(losses[at], pool[at]) for at in order[:beams]]
            history.append(loss(target, states([beam[0][1]])[0]))  # Algorithm 2, line 9
        if abs(before - beam[0][0]) < threshold:
            break
    return beam[0][1], beam[0][0], history
