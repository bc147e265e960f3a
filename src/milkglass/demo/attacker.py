"""The attacker of the demo: the uploaded table, the public model, and nothing else.

It takes for each scrambled id the public token with the nearest embedding. It is handed the truth only to be graded.
What this module does not know: stronger attacks, which read many ids together (THREATS.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.attacks.embeddings.nearest_rows import nearest
from milkglass.client.codec.codec import Codec
from milkglass.demo.result import DemoToken, NeighbourRecovery, View

Ids = NDArray[np.int64]
SPACE = "␣"  # a token that is nothing but white space


@dataclass
class Attacker:
    """table, public: (n, d), the obfuscated embeddings by scrambled id, the original ones by original id."""

    table: torch.Tensor
    public: torch.Tensor
    tokenizer: Any  # the public model's
    _seen: dict[int, Ids] = field(default_factory=dict, repr=False)

    def read(self, scrambled: Ids) -> Ids:
        """The three likeliest original ids of each scrambled one: (t, 3), best first. Each id is attacked once."""
        fresh = np.array(sorted(set(scrambled.tolist()) - self._seen.keys()), np.int64)
        if len(fresh):
            result = nearest(self.table[torch.from_numpy(fresh)], self.public, 3).numpy()
            self._seen.update(zip(fresh.tolist(), result, strict=True))
        return np.array([self._seen[one] for one in scrambled.tolist()], np.int64).reshape(-1, 3)

    def view(self, codec: Codec, client: str, scrambled: Ids) -> View:
        """`scrambled`: ordinary tokens only."""
        right = self.read(scrambled)[:, 0] == codec.inverse[scrambled]
        words = [self.tokenizer.decode([one]).strip() or SPACE for one in self.read(scrambled)[:, 0].tolist()]
        pieces = tuple(DemoToken(word, bool(hit)) for word, hit in zip(words, right, strict=True))
        return View(client, tuple(scrambled.tolist()), pieces)

    def grade(self, codec: Codec, running: Ids, k: int, sampled: int, seed: int) -> NeighbourRecovery:
        """Over `sampled` ordinary tokens of the vocabulary, and over the running ones of the test texts."""
        everything = np.flatnonzero(codec.visible)
        draw = np.random.default_rng(seed).choice(everything, min(sampled, len(everything)), replace=False)
        vocabulary = self._rates(codec, codec.sigma[draw].astype(np.int64))
        texts = self._rates(codec, running)
        return NeighbourRecovery(*vocabulary, len(draw), *texts, len(running), 1 / len(self.public), 1 / k)

    def _rates(self, codec: Codec, scrambled: Ids) -> tuple[float, float]:
        hits = self.read(scrambled) == codec.inverse[scrambled][:, None]
        return float(hits[:, 0].mean()), float(hits.any(axis=1).mean())


def ordinary(codec: Codec, scrambled: NDArray[Any]) -> Ids:
    """Without special tokens, which are permuted and not mixed: whoever has both models reads all of them."""
    ids = scrambled.astype(np.int64)
    return ids[codec.visible[codec.inverse[ids]]]
