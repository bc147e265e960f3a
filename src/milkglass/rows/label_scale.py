"""Standardises the scores of a regression: the server sees mean 0 and spread 1.

    sent = (score - mean) / spread,  read = mean + spread * answer

The mean and spread of the training data stay sealed in the key, so the server learns neither the unit nor the range of
the scores. It learns their order, the shape of their distribution, and which row has which: labels are not scrambled,
and a score tells more of a row than a class does. Standardised scores also train in fewer steps, since a new head
starts near 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from milkglass.errors import CodecError


@dataclass(frozen=True)
class Scale:
    """The mean and the spread (standard deviation, above 0) of scores, in the user's unit."""

    mean: float
    spread: float

    @classmethod
    def of(cls, scores: Iterable[float]) -> Scale:
        """Returns the scale of scores in one pass (Welford's updates). Raises CodecError if they do not differ."""
        count, mean, squares = 0, 0.0, 0.0
        for score in scores:
            count += 1
            step = score - mean
            mean += step / count
            squares += step * (score - mean)
        spread = math.sqrt(squares / count) if count else 0.0
        if not math.isfinite(spread) or spread <= 1e-9 * max(1.0, abs(mean)):
            raise CodecError(f"the {count} scores do not differ, or are too large", "a regression needs two at least")
        return cls(mean, spread)

    @classmethod
    def kept(cls, raw: Any) -> Scale | None:
        """Returns the scale that `document` wrote, or None for None."""
        return None if raw is None else cls(float(raw[0]), float(raw[1]))

    def document(self) -> list[float]:
        return [self.mean, self.spread]

    def sent(self, score: float) -> float:
        return (score - self.mean) / self.spread

    def read(self, answer: float) -> float:
        return self.mean + self.spread * answer

    def suits(self, other: Scale) -> bool:
        """Returns whether data of the scale `other` may be sent by this one.

        A second fine-tune then reads like the first. This holds if the sent mean is within 1 of 0, and the sent spread
        between 1/2 and 2.
        """
        return abs(self.sent(other.mean)) <= 1 and 0.5 <= other.spread / self.spread <= 2


def score_of(where: str, value: Any) -> float:
    """Returns a label as a number. Raises CodecError, which names the row `where`, if it is not a finite number."""
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise CodecError(f"{where} has a label that is not a number", "a regression needs one in every row")
    return result
