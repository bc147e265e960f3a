"""AloePri as what it computes, transcribed literally: a Llama on plain coordinates, with what the scheme changes of it.

Key matrices cancel (P Q = I) everywhere but in three places, and these are all that is here: noise on both tables, the
lengths that RMSNorm divides by, which are those of the scrambled stream, and the speeds at which pairs of a head's
dimensions turn, since pairs are permuted in windows. The oracle of `milkglass.schemes.covariant` and
`milkglass.client.obfuscate.covariant`. Needs NumPy only, imports nothing of milkglass; fp64; one text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


class State:
    """One text in the residual stream: as it is, and as the server sees it."""

    def __init__(self, plain: Matrix, key: Matrix) -> None:
        self.plain = plain
        self.seen = plain @ key

    def add(self, written: Matrix, key: Matrix) -> None:
        self.plain = self.plain + written
        self.seen = self.seen + written @ key

    def normed(self, gain: Matrix, kappa: float, epsilon: float) -> Matrix:
        mean_square = (self.seen**2).mean(axis=1, keepdims=True)
        return self.plain * kappa / np.sqrt(mean_square + epsilon) * gain


def turned(vectors: Matrix, speeds: Matrix) -> Matrix:
    """Rotary positions: pair i of the vector at place t, as a complex number, times exp(i t speed)."""
    half = vectors.shape[1] // 2
    pairs = vectors[:, :half] + 1j * vectors[:, half:]
    pairs = pairs * np.exp(1j * np.arange(len(vectors))[:, None] * speeds[None, :])
    return np.concatenate([pairs.real, pairs.imag], axis=1)


def softmax(scores: Matrix) -> Matrix:
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def attention(
    x: Matrix, weights: Mapping[str, Matrix], heads: int, key_heads: int, size: int, base: float,
    orders: list[NDArray[np.int64]],
) -> Matrix:  # fmt: skip
    """orders: for each key head the pair that is in each place."""
    every = []
    for head in range(heads):
        group = head // (heads // key_heads)
        speeds = np.empty(size // 2)
        for place, pair in enumerate(orders[group]):
            speeds[pair] = base ** (-2 * place / size)
        q = turned(x @ weights["q_proj"][head * size : (head + 1) * size].T, speeds)
        k = turned(x @ weights["k_proj"][group * size : (group + 1) * size].T, speeds)
        v = x @ weights["v_proj"][group * size : (group + 1) * size].T
        scores = q @ k.T / np.sqrt(size)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        every.append(softmax(scores) @ v)
    return np.concatenate(every, axis=1) @ weights["o_proj"].T


def feed_forward(x: Matrix, weights: Mapping[str, Matrix]) -> Matrix:
    gate, up = x @ weights["gate_proj"].T, x @ weights["up_proj"].T
    return (gate / (1 + np.exp(-gate)) * up) @ weights["down_proj"].T


def logits(
    tensors: Mapping[str, Matrix], config: Mapping[str, Any], ids: list[int], keys: Mapping[str, Matrix], kappa: float,
    orders: list[list[NDArray[np.int64]]], table_noise: Matrix, head_noise: Matrix,
) -> Matrix:  # fmt: skip
    """(t, n). tensors: of a tied Llama, by name. keys: P (d, D) of each tensor that writes. orders: of each layer."""
    table = tensors["model.embed_tokens.weight"]
    epsilon, size = config["rms_norm_eps"], config["head_dim"]
    state = State((table + table_noise)[ids], keys["model.embed_tokens.weight"])
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        parts = {n.split(".")[-2]: x for n, x in tensors.items() if n.startswith(at) and x.ndim == 2}
        x = state.normed(tensors[at + "input_layernorm.weight"], kappa, epsilon)
        written = attention(
            x, parts, config["num_attention_heads"], config["num_key_value_heads"], size, config["base"], orders[layer]
        )
        state.add(written, keys[at + "self_attn.o_proj.weight"])
        x = state.normed(tensors[at + "post_attention_layernorm.weight"], kappa, epsilon)
        state.add(feed_forward(x, parts), keys[at + "mlp.down_proj.weight"])
    return state.normed(tensors["model.norm.weight"], kappa, epsilon) @ (table + head_noise).T
