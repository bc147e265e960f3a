"""Mechanisms and losses of the defences of encoders, transcribed literally: loops over numbers, nothing clever.

The oracle of `milkglass.hidden_states`. Needs the standard library and NumPy, and imports nothing of milkglass. Noise
is given, not drawn.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


# --- Balle and Wang 2018, Theorem 8: the analytic Gaussian mechanism --------------------------------------------------
def phi(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def delta_of(sigma: float, epsilon: float, sensitivity: float) -> float:
    a = sensitivity / (2 * sigma)
    b = epsilon * sigma / sensitivity
    return phi(a - b) - math.exp(epsilon) * phi(-a - b)


def sigma_of(epsilon: float, delta: float, sensitivity: float) -> float:
    """Bisection: delta falls as sigma grows."""
    low, high = 1e-3 * sensitivity, 1e3 * sensitivity
    for _ in range(200):
        middle = (low + high) / 2
        if delta_of(middle, epsilon, sensitivity) > delta:
            low = middle
        else:
            high = middle
    return high


# --- DP-Forward, section 4 --------------------------------------------------------------------------------------------
def dp_forward(x: Matrix, clip: float, sigma: float, z: Matrix) -> Matrix:
    """x, z: (t, d)."""
    squares = 0.0
    for row in x:
        for value in row:
            squares += value * value
    norm = math.sqrt(squares)
    factor = clip / norm if norm > clip else 1.0
    out = np.zeros_like(x)
    for i in range(len(x)):
        for j in range(len(x[0])):
            out[i, j] = x[i, j] * factor + sigma * z[i, j]
    return out


# --- CAPE, section 3 --------------------------------------------------------------------------------------------------
def cape(x: Matrix, scale: float, z: Matrix) -> Matrix:
    """x: (t, d); z: (d,). Returns (d,)."""
    mean = [sum(x[i, j] for i in range(len(x))) / len(x) for j in range(x.shape[1])]
    low, high = min(mean), max(mean)
    if high == low:
        return np.array([0.5 + scale * one for one in z])
    return np.array([(value - low) / (high - low) + scale * one for value, one in zip(mean, z, strict=True)])


def balanced(scores: Matrix, bag: Matrix) -> float:
    there, absent = [], []
    for i in range(len(scores)):
        for j in range(scores.shape[1]):
            p = 1 / (1 + math.exp(-scores[i, j]))
            if bag[i, j] == 1:
                there.append(-math.log(p))
            else:
                absent.append(-math.log(1 - p))
    return (sum(there) / max(1, len(there)) + sum(absent) / max(1, len(absent))) / 2


# --- TextObfuscator, section 3 ----------------------------------------------------------------------------------------
def textobfuscator(x: Matrix, clip: float | None, scale: float, z: Matrix) -> Matrix:
    out = np.zeros_like(x)
    for i, row in enumerate(x):
        length = sum(abs(value) for value in row)
        factor = 1.0 if clip is None or length <= clip * len(row) else clip * len(row) / length
        for j, value in enumerate(row):
            out[i, j] = value * factor + scale * z[i, j]
    return out


def close(states: Matrix, clusters: list[int], centres: Matrix) -> float:
    total = 0.0
    for state, cluster in zip(states, clusters, strict=True):
        total += sum((a - b) ** 2 for a, b in zip(state, centres[cluster], strict=True)) / len(state)
    return total / len(states)


def away(states: Matrix, clusters: list[int]) -> float:
    means = []
    for cluster in sorted(set(clusters)):
        members = [state for state, one in zip(states, clusters, strict=True) if one == cluster]
        means.append(sum(members) / len(members))
    total, pairs = 0.0, 0
    for i in range(len(means)):
        for j in range(i + 1, len(means)):
            total += sum((a - b) ** 2 for a, b in zip(means[i], means[j], strict=True)) / len(means[i])
            pairs += 1
    return -total / pairs if pairs else 0.0


# --- TextMixer, section 4 ---------------------------------------------------------------------------------------------
def mixed(parts: list[Matrix], keys: list[Matrix], length: int) -> Matrix:
    """keys: (d,) or (d, d)."""
    d = parts[0].shape[1]
    out = np.zeros((length, d))
    for part, key in zip(parts, keys, strict=True):
        for i in range(min(length, len(part))):
            turned = [key[j] * part[i, j] for j in range(d)] if key.ndim == 1 else key @ part[i]
            for j in range(d):
                out[i, j] += turned[j] / len(parts)
    return out
