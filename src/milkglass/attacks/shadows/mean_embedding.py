"""Mean embedding: each shadow token becomes the original nearest to the mean of them all.

Of all tokens t that a shadow s may stand for (`inverse`), that nearest, by cosine, to the mean of their embeddings:
the most typical one, whatever the shadow itself is like. It looks at one token at a time: what it does not know is
frequency, context, the shadow's own embedding, and how the defence chose among the shadows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.attacks.shadows.inverse import Floats, Rule, cosines
from milkglass.sequences import Ids


@dataclass(frozen=True)
class ShadowMean(Rule):
    """Mean embedding: each shadow token becomes the original nearest to the mean of them all.

    Attributes:
        k: how many originals are listed of each.
    """

    k: int = 10

    name = "shadow-mean"
    title = "Mean embedding among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").but("Equal likenesses are ordered by id.")

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        # section 5.7, over T_ori(s)
        return np.argsort(-cosines(members, members.mean(0)), kind="stable").astype(np.int64)
