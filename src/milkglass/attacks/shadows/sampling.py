"""Sampling: each shadow token becomes an original drawn by likeness to it.

Of all tokens that a shadow s may stand for (`inverse`), t is drawn with

    p(t | s)  ~  max(0, cos(e_t, e_s))

anew for each place. It is the weakest of the paper's five rules, as it spends its draws on tokens that it holds for
less likely itself. It looks at one token at a time: what it does not know is frequency, context, and how the defence
chose among the shadows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.attacks.shadows.inverse import Floats, Rule, cosines
from milkglass.sequences import Ids


@dataclass(frozen=True)
class ShadowSampling(Rule):
    """Sampling: each shadow token becomes an original drawn by likeness to it.

    Attributes:
        k: how many originals are listed of each.
    """

    k: int = 10

    name = "shadow-sampling"
    title = "Sampling among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").but(
        "A likeness below zero counts as zero; where all are, all originals are equally likely.",
        "Ranks after the first are further draws, without the ones before.",
    )

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        # section 5.7, over T_ori(s)
        weights = np.maximum(cosines(members, shadow), 0.0)
        weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(members), 1 / len(members))
        drawn = rng.choice(len(members), size=int((weights > 0).sum()), replace=False, p=weights)
        return np.asarray(drawn, np.int64)
