"""What a parameter may be, said once beside its default: checked when it is set, and told to whoever sets it.

    epsilon: float = limited(8.0, above=0)

What this module does not know: any method, and limits that need more than one value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from milkglass.errors import UsageError

LIMIT = "limit"  # of a field's metadata


@dataclass(frozen=True)
class Limit:
    """low: the least value; with `open` the value lies above it. below: and under this. whole: a whole number."""

    low: float
    open: bool
    below: float = math.inf
    whole: bool = False

    def holds(self, value: float) -> bool:
        return (value > self.low if self.open else value >= self.low) and value < self.below  # nan is in no range

    def __str__(self) -> str:
        noun = "a whole number" if self.whole else "a finite number"
        low = f"above {self.low:g}" if self.open else f"of {self.low:g} or more"
        return f"{noun} {low}" + (f" and below {self.below:g}" if math.isfinite(self.below) else "")


def limited(
    default: Any, *, least: float = 0, above: float | None = None, below: float = math.inf, whole: bool = False
) -> Any:
    """A dataclass field. A value of None is left to the field's type."""
    limit = Limit(least, False, below, whole) if above is None else Limit(above, True, below, whole)
    return field(default=default, metadata={LIMIT: limit})


def limits_of(kind: Any) -> dict[str, Limit]:
    """The limits of a dataclass's fields, by name."""
    return {one.name: one.metadata[LIMIT] for one in fields(kind) if LIMIT in one.metadata}


def require(created: Any) -> None:
    """Raises UsageError for the first field that is outside its limit."""
    for one in fields(created):
        limit, value = one.metadata.get(LIMIT), getattr(created, one.name)
        if limit is not None and value is not None and not limit.holds(value):
            raise UsageError(f"{one.name} is {value}, {limit} is needed", f"{_shown(one.default)} is the default")


def _shown(default: Any) -> str:
    return "none" if default is None else str(default)
