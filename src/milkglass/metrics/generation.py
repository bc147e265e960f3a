"""How good generated text is: perplexity, and ROUGE against references; each with a bootstrap interval over texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.metrics import text
from milkglass.metrics.interval import Interval, ratio
from milkglass.metrics.resample import resampled


def perplexity(losses: NDArray[np.float64], tokens: NDArray[np.float64], rng: np.random.Generator) -> Interval:
    """exp of the mean loss of a token. losses: (u,) each text's sum, in nats; tokens: (u,) how many it has. Texts are
    what is resampled, for the tokens of one fall together. nan where there are no tokens."""
    if losses.shape != tokens.shape or losses.ndim != 1:
        raise UsageError(f"losses of shape {losses.shape} for tokens of shape {tokens.shape}", "give one a text")

    def statistic(counts: NDArray[np.float64]) -> NDArray[np.float64]:
        below = counts @ tokens
        return np.exp(np.divide(counts @ losses, below, out=np.full(len(below), np.nan), where=below > 0))

    return resampled(statistic, len(losses), rng)


def rouge(texts: Sequence[str], references: Sequence[str], rng: np.random.Generator) -> dict[str, Interval]:
    """Mean F of each measure of text.py, by its name."""
    if len(texts) != len(references):
        raise UsageError(f"{len(texts)} texts for {len(references)} references", "give one each")
    rows = [text.likeness(reference, one) for one, reference in zip(texts, references, strict=True)]
    scores = np.array(rows, np.float64).reshape(-1, len(text.NAMES))
    ones = np.ones(len(scores))
    return {name: ratio(scores[:, i], ones, rng) for i, name in enumerate(text.NAMES)}
