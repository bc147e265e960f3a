"""Small scenes for attacks: a random public table, a scrambled one, sentences, and the truth about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from milkglass.models.view import Model
from milkglass.schemes.mixture import Mixture
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.sequences import Ids, Sequences
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from milkglass.threat.truth import Truth

SPECIAL = 2  # the first ids are special tokens: [CLS] and [SEP]
CONFIG = {"model_type": "bert"}
Change = Callable[[torch.Tensor, int], torch.Tensor]  # a table and a seed to a table


@dataclass(frozen=True)
class Scene:
    transcript: Transcript
    knowledge: Knowledge
    truth: Truth
    sigma: Ids


def model(table: torch.Tensor) -> Model:
    return Model({"embeddings.word_embeddings.weight": table}, CONFIG)


def clumped(n: int, d: int, seed: int) -> torch.Tensor:
    """Rows in loose clumps with a common mean, as real embeddings lie, and of their size."""
    make = torch.Generator().manual_seed(seed)
    centres = torch.randn(max(2, n // 25), d, generator=make)
    return 0.05 * (centres[torch.randint(len(centres), (n,), generator=make)] + torch.randn(n, d, generator=make) + 0.3)


def chain(n: int, sentences: int, seed: int, branches: int = 6) -> list[Ids]:
    """Sentences of 6 to 15 ordinary tokens from a Markov chain with Zipf's frequencies, between ids 0 and 1.

    The chain depends on n and branches alone: two seeds give two texts of one language.
    """
    language = np.random.default_rng(n * 1000 + branches)
    zipf = 1 / np.arange(1, n - SPECIAL + 1)
    follows = language.choice(n - SPECIAL, size=(n - SPECIAL, branches), p=zipf / zipf.sum())
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(sentences):
        at = int(rng.choice(n - SPECIAL, p=zipf / zipf.sum()))
        words = [at]
        for _ in range(int(rng.integers(5, 15))):
            at = int(follows[at, rng.integers(branches)])
            words.append(at)
        made.append(np.array([0, *(word + SPECIAL for word in words), 1], np.int64))
    return made


def scene(
    change: Change, n: int = 300, d: int = 24, sentences: int = 40, seed: int = 1, public: int | None = None
) -> Scene:
    """change: what the scheme does to the table. public: how many sentences of the same language are known."""
    table = clumped(n, d, seed)
    sigma = np.random.default_rng(seed + 1).permutation(n).astype(np.int64)
    sent = Sequences.of(sigma[one] for one in chain(n, sentences, seed + 2))
    inverse = np.argsort(sigma)
    ordinary = np.arange(n) >= SPECIAL
    known = Sequences.of(chain(n, public, seed + 3)) if public else None

    def simulate(key: int) -> tuple[Model, Ids]:
        own = np.random.default_rng(key).permutation(n).astype(np.int64)
        return scrambled(table, change, own, key), own

    return Scene(
        Transcript((Weights(scrambled(table, change, sigma, seed)), Tokens(sent)), n),
        Knowledge(public_model=model(table), corpus=known, simulate=simulate),
        Truth(inverse, ordinary, ordinary, lambda ids: " ".join(f"w{i}" for i in ids.tolist()), sent),
        sigma,
    )


def scrambled(table: torch.Tensor, change: Change, sigma: Ids, seed: int) -> Model:
    shuffled = torch.empty_like(table)
    shuffled[torch.from_numpy(sigma)] = change(table, seed)
    return model(shuffled)


def plain(table: torch.Tensor, seed: int) -> torch.Tensor:
    return table


def obfuslm(k: int = 5, epsilon: float = 1.0, beta: float = 0.9) -> Change:
    def change(table: torch.Tensor, seed: int) -> torch.Tensor:
        rng = np.random.default_rng(seed)
        order = rng.permutation(np.arange(SPECIAL, len(table)))
        mixture: Mixture = ObfusLM(k, epsilon, beta).mixture(table, order, lambda count: rng.laplace(size=count))
        return mixture.apply(table, np.arange(len(table)))

    return change
