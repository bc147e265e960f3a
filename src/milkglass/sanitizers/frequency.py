"""Which words are sensitive: those that are rare in a corpus, or not in it at all (CMIF, section 4.1).

The counts are of the user's own text. What is sensitive hence depends on it, which no guarantee here covers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from milkglass.sanitizers.sanitizer import SHARE
from milkglass.sanitizers.tables.table import Mask


def sensitive_words(counts: NDArray[np.int64], share: float) -> Mask:
    """(n,) the rarest `share` of the words that occur, as rare ones as the last of them too, and all that never do."""
    SHARE.require(share, "the share of sensitive words", "0.2 is CMIF's choice")
    seen = np.sort(counts[counts > 0])
    last = round(share * len(seen))
    bound = seen[last - 1] if last else 0
    return counts <= bound
