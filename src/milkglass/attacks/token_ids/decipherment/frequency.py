"""How well the count of a scrambled id fits the count of a public one.

The logarithms differ by a Gaussian whose variance has two parts: what two texts of one kind differ by anyway, tau^2,
and the sampling error of both counts, (1 + private size / public size) / (count + 1/2). tau is about 0.3 where both
texts are of one kind and above 1 where they are not. Nobody has to say which it is: inside groups of candidates the
counts themselves show, by the likelihood of each tau (`spread`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass.attacks.token_ids.decipherment.bigrams import Floats, PublicBigrams
from milkglass.attacks.token_ids.decipherment.block_assignment import BlockAssignment
from milkglass.sequences import Ids

SPREADS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)


@dataclass(frozen=True)
class FrequencyFit:
    """Counts of scrambled ids beside those that the public text predicts.

    Attributes:
        seen: (n',) counts by scrambled id.
        expected: (n,) by public id, what the private text should hold of each, under one of its scrambled ids where it
            has several.
        ratio: size of the private text over that of the public one, without tokens that are already known.
    """

    seen: Floats
    expected: Floats
    ratio: float

    @classmethod
    def of(cls, seen: Floats, public: PublicBigrams, rows: Ids, members: Ids, aliases: int = 1) -> FrequencyFit:
        """The fit over the ids that are still free.

        Args:
            rows, members: the scrambled and public ids still to be matched.
            aliases: over how many ids a token's count is spread, and with it the part of its variance that is the
                public text's.
        """
        total = float(seen[rows].sum())
        mass, size = float(public.share[members].sum()), float(public.counts[members].sum())
        return cls(seen, public.share * (total / max(mass, 1e-300) / aliases), total / max(size, 1.0) / aliases)

    def scores(self, rows: Ids, members: Ids, tau: float) -> Floats:
        """Log likelihood of each pair; `rows` and `members` of any shapes that broadcast together."""
        seen, expected = self.seen[rows], self.expected[members]
        variance = tau**2 + (1 + self.ratio) / (np.maximum(seen, expected) + 0.5)
        return -((np.log(seen + 0.5) - np.log(expected + 0.5)) ** 2) / (2 * variance) - np.log(variance) / 2


def spread(fit: FrequencyFit, blocks: BlockAssignment) -> float:
    """The tau under which the ids that were seen are likeliest, each being any of its candidates."""
    telling = (blocks.widths > 1) & (fit.seen[blocks.rows] > 0)
    if not telling.any():
        return SPREADS[-1]

    def likelihood(tau: float) -> float:
        scores = fit.scores(blocks.rows[blocks.row], blocks.member, tau)
        top = np.maximum.reduceat(scores, blocks.starts)
        mean = blocks.per_row(np.exp(scores - top[blocks.row])) / blocks.widths
        return float((top + np.log(mean))[telling].mean())

    return max(SPREADS, key=likelihood)
