"""Small tables for the tests of sanitizers, and a test of drawn counts against a law."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chisquare

from milkglass.sanitizers.custext import CusText
from milkglass.sanitizers.sanitizer import UNKNOWN
from milkglass.sanitizers.santext import SanText
from milkglass.sanitizers.table import WordVectors

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import sanitizers as literal  # noqa: E402, F401

_NAMES = """
apple banana cherry date elder fig grape house garden river mountain valley doctor nurse letter window silver copper
orange yellow purple winter summer autumn spring monday friday north south west
"""
WORDS = _NAMES.split()


def table(n: int = 12, d: int = 3, seed: int = 0, special: tuple[int, ...] = ()) -> WordVectors:
    """n words with random vectors."""
    vectors = np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)
    mask = np.isin(np.arange(n), special) if special else None
    words = [*WORDS, *(f"{a}{b}ish" for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz")]
    return WordVectors(tuple(words[:n]), vectors, mask)


def fits(drawn: NDArray[np.int64], law: NDArray[np.float64], least: float = 1e-3) -> None:
    """A chi-square test, words that are expected less than 5 times together."""
    counts = np.bincount(drawn, minlength=len(law)).astype(float)
    assert not counts[law == 0].any(), "something impossible was drawn"
    expected = law * len(drawn)
    rare = (expected < 5) & (law > 0)
    seen, hoped = counts[expected >= 5], expected[expected >= 5]
    if rare.any():
        seen, hoped = np.append(seen, counts[rare].sum()), np.append(hoped, expected[rare].sum())
    assert chisquare(seen, hoped * (seen.sum() / hoped.sum())).pvalue > least


def santext_law(sanitizer: SanText, row: int) -> NDArray[np.float64]:
    """(n,) the probabilities of what a row of the table, or UNKNOWN, is replaced by, from the definition."""
    at = sanitizer.vectors.mean(0) if row == UNKNOWN else sanitizer.table.vectors[row]
    outputs = sanitizer.outputs()
    logits = -sanitizer.epsilon / 2 * np.linalg.norm(sanitizer.vectors[outputs].astype(np.float64) - at, axis=1)
    weights = np.exp(logits - logits.max())
    result = np.zeros(len(sanitizer.table))
    result[sanitizer.table.candidates[outputs]] = weights / weights.sum()
    return result


def custext_law(sanitizer: CusText, row: int) -> NDArray[np.float64]:
    """The same of CUSTEXT."""
    result = np.zeros(len(sanitizer.table))
    if row == UNKNOWN:
        result[sanitizer.table.candidates] = 1 / len(sanitizer.vectors)
        return result
    place = sanitizer.table.places[row]
    members = sanitizer.groups.members[sanitizer.groups.group[place]]
    weights = np.exp(sanitizer.epsilon * sanitizer.groups.scores[place] / 2)
    result[sanitizer.table.candidates[members[members >= 0]]] = (weights / weights.sum())[members >= 0]
    return result
