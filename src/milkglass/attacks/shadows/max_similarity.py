"""Maximum similarity: each shadow token becomes the original that is nearest to it.

Of all tokens t that a shadow s may stand for (`inverse`), that of the largest cos(e_t, e_s), the others behind it in
order. GHOST throws out the nearest neighbours with meaning in common, not all that are near, so that nearness still
says something. It looks at one token at a time: what it does not know is frequency, context, and how the defence chose
among the shadows. Special tokens stand for themselves, and are read so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.attacks.shadows.inverse import Floats, Rule, cosines
from milkglass.sequences import Ids


@dataclass(frozen=True)
class ShadowMaximum(Rule):
    """Maximum similarity: each shadow token becomes the original that is nearest to it.

    Attributes:
        k: how many originals are listed of each.
    """

    k: int = 10

    name = "shadow-max"
    title = "Maximum similarity among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").but("Equal likenesses are ordered by id.")

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        # section 5.7, over T_ori(s)
        return np.argsort(-cosines(members, shadow), kind="stable").astype(np.int64)
