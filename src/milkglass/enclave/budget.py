"""How many rows of the table may leave the enclave: a client that may ask for every token has the table.

A bucket of `burst` rows that fills at `per_hour`. Reading a table of n rows takes (n - burst) / per_hour hours or more,
and one call for each row of an answer. The level is sealed beside the table, so that a restart fills no bucket. Anyone
who puts an older copy of it back, or kills the process before the level is written, wins up to a burst each time:
without a monotonic counter no software prevents that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from milkglass.errors import EnclaveError


@dataclass(frozen=True)
class RowPolicy:
    """What the provider allows.

    Attributes:
        per_hour: rows an hour.
        burst: rows at once.
    """

    per_hour: int = 200_000
    burst: int = 20_000

    def hours(self, rows: int) -> float:
        """At least so many hours are needed to read a table of so many rows."""
        return max(0.0, (rows - self.burst) / self.per_hour)


@dataclass
class RowBudget:
    """The bucket.

    Attributes:
        policy: its size and rate.
        level: rows that may leave now, as of `since`.
        since: seconds, of `clock`.
    """

    policy: RowPolicy
    level: float
    clock: Callable[[], float] = time.time
    since: float = field(init=False)

    def __post_init__(self) -> None:
        self.since = self.clock()

    def take(self, rows: int) -> None:
        """Raises EnclaveError, and takes nothing, where the bucket holds fewer."""
        now = self.clock()
        passed = max(0.0, now - self.since)  # a clock that is set back fills nothing
        self.level = min(float(self.policy.burst), self.level + passed * self.policy.per_hour / 3600)
        self.since = max(self.since, now)
        if rows > self.policy.burst:
            raise EnclaveError(f"{rows} tokens at once, the provider allows {self.policy.burst}", "shorten the text")
        if rows > self.level:
            seconds = (rows - self.level) * 3600 / self.policy.per_hour
            raise EnclaveError(
                f"{rows} more rows of the table were asked for, and the provider's limit leaves {int(self.level)}",
                f"try again in {seconds:.0f} s; the provider sets the rate ({self.policy.per_hour} rows an hour)",
            )
        self.level -= rows
