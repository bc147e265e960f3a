"""ObfusLM+, equation 2, transcribed literally on arrays by name, one statement for one line.

The oracle of `milkglass.schemes.obfuslm_plus` and `milkglass.client.obfuscate.plus`. Needs NumPy only, imports nothing
of milkglass, and knows the Llama family's names only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from reference.obfuslm import Matrix, embed_cluster, weight_synth

NORM_OF = {
    "q_proj": "input_layernorm",
    "k_proj": "input_layernorm",
    "v_proj": "input_layernorm",
    "gate_proj": "post_attention_layernorm",
    "up_proj": "post_attention_layernorm",
}


def mixing(table: Matrix, k: int, epsilon: float, beta: float, order: NDArray[np.int64], noise: Matrix) -> Matrix:
    """W* of the table E~ (n, d), its dimensions visited in `order`. noise: draws of Laplace(1), taken in order."""
    columns = table.T.astype(np.float64)[order]
    clusters = embed_cluster(columns, k, beta)
    visited = weight_synth(columns, clusters, epsilon, noise)
    w = np.zeros_like(visited)
    w[np.ix_(order, order)] = visited
    return w


def shuffle_columns(x: Matrix, sigma: NDArray[np.int64]) -> Matrix:
    """sigma*(X): column j goes to place sigma[j]."""
    y = np.empty_like(x)
    y[:, sigma] = x
    return y


def shuffle_rows(x: Matrix, sigma: NDArray[np.int64]) -> Matrix:
    y = np.empty_like(x)
    y[sigma] = x
    return y


def apply(tensors: Mapping[str, Matrix], w: Matrix, sigma: NDArray[np.int64], form: str) -> dict[str, Matrix]:
    """tensors: the model, its table E~ and head H~ as ObfusLM left them. Returns all, norms folded."""
    if form == "symmetrise":
        w = (w + w.T) / 2
    reading = np.linalg.inv(w).T if form == "exact" else w
    writing = w.T if form == "exact" else w
    done = {}
    for name, x in tensors.items():
        layer, part = name.rpartition("layers.")[2].split(".")[0], name.split(".")[-2]
        if part == "embed_tokens":
            done[name] = shuffle_columns(x @ w, sigma)
        elif part == "lm_head":
            done[name] = shuffle_columns((x * tensors["model.norm.weight"]) @ reading, sigma)
        elif part in NORM_OF:
            gain = tensors[f"model.layers.{layer}.{NORM_OF[part]}.weight"]
            done[name] = shuffle_columns((x * gain) @ reading, sigma)
        elif part in ("o_proj", "down_proj"):
            done[name] = shuffle_rows(writing @ x, sigma)
        else:
            done[name] = np.ones_like(x)
    return done
