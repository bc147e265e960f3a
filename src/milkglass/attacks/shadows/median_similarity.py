"""Median similarity: each shadow token becomes the original in the middle, by likeness to it.

Of all tokens t that a shadow s may stand for (`inverse`), that with the median cos(e_t, e_s): a defence which takes
shadows from the middle of its lists is read from the middle. Further ranks go outwards from there. It looks at one
token at a time: what it does not know is frequency, context, and how the defence chose among the shadows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.attacks.shadows.inverse import Floats, Rule, cosines
from milkglass.sequences import Ids


@dataclass(frozen=True)
class ShadowMedian(Rule):
    """Median similarity: each shadow token becomes the original in the middle, by likeness to it.

    Attributes:
        k: how many originals are listed of each.
    """

    k: int = 10

    name = "shadow-median"
    title = "Median similarity among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").but("Of an even number, the one below the middle; the paper does not say.")

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        # section 5.7, over T_ori(s)
        order = np.argsort(cosines(members, shadow), kind="stable")  # least alike first
        middle = (len(order) - 1) // 2
        outwards = np.argsort(np.abs(np.arange(len(order)) - middle), kind="stable")
        return order[outwards].astype(np.int64)
