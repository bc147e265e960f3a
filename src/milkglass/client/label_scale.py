"""The numbers of a regression, on their way to the server and back: sent with mean 0 and spread 1.

    sent = (score - mean) / spread,    read = mean + spread * answer

mean and spread are the training data's own and stay here, sealed in the key; so the server learns neither the unit nor
the range of the scores. It does learn their order and the shape of their distribution, and which row has which: labels
are not scrambled, and a score tells more of a row than a class does. A new head starts near 0, so a standardised score
also trains in fewer steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from milkglass.errors import CodecError


@dataclass(frozen=True)
class Scale:
    """mean and spread (the standard deviation, above 0), in the user's unit."""

    mean: float
    spread: float

    @classmethod
    def of(cls, scores: Iterable[float]) -> Scale:
        """By Welford's updates: one pass, whatever the size. Raises CodecError where nothing can be learnt."""
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
        """As `told` gave it, out of a key; None where there is none."""
        return None if raw is None else cls(float(raw[0]), float(raw[1]))

    def document(self) -> list[float]:
        return [self.mean, self.spread]

    def sent(self, score: float) -> float:
        return (score - self.mean) / self.spread

    def read(self, answer: float) -> float:
        return self.mean + self.spread * answer

    def suits(self, other: Scale) -> bool:
        """Whether data of the scale `other` may be sent by this one, so that a second fine-tune reads like the first:
        where that leaves the mean within 1 of 0 and the spread between 1/2 and 2."""
        return abs(self.sent(other.mean)) <= 1 and 0.5 <= other.spread / self.spread <= 2


def score_of(where: str, value: Any) -> float:
    """where: the row's name in messages. Raises CodecError for what is not a finite number."""
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise CodecError(f"{where} has a label that is not a number", "a regression needs one in every row")
    return result
