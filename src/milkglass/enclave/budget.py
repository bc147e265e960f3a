"""How many rows of the table may leave the enclave: a client that may ask for every token has the table.

A bucket of `burst` rows that fills at `per_hour`. Through one enclave a table of n rows takes (n - burst) / per_hour
hours or more; a call gives up to `burst` of them. The level is sealed beside the table, a full one at the build, and
the table does not open without it: a restart fills no bucket. Rows are charged before they leave, `AHEAD` at a time:
the lowered level is written first, and a process that is killed loses what was charged and not used.

Out of scope, since no software prevents it without a monotonic counter and a clock of its own: an owner of the machine
who puts an older copy of the level back, does not write it, or copies the folder wins up to a burst each time; one
who changes the clock that the enclave is given (with SGX too, the host gives it) fills the bucket; and each enclave
that the provider releases the table to has a bucket of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from milkglass.errors import EnclaveError

AHEAD = 256  # rows that are charged at a time: one write of the level for so many tokens of an answer


class NotCharged(Exception):
    """Rows would leave that no written level accounts for. Never leaves the enclave."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows


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
        level: rows that may be charged now, as of `since`.
        since: seconds, of `clock`.
        charged: rows that may leave, and that `level` no longer has.
    """

    policy: RowPolicy
    level: float
    clock: Callable[[], float] = time.monotonic  # which setting the date does not move
    since: float = field(init=False)
    charged: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.since = self.clock()

    def take(self, rows: int) -> None:
        """Let charged rows leave. Raises NotCharged, and takes nothing, where fewer were charged; EnclaveError for more
        than a burst."""
        if rows > self.policy.burst:
            raise EnclaveError(f"{rows} tokens at once, the provider allows {self.policy.burst}", "shorten the text")
        if rows > self.charged:
            raise NotCharged(rows)
        self.charged -= rows

    def refund(self) -> float:
        """Uncharge what was not used. Returns the level."""
        self.level, self.charged = self.level + self.charged, 0
        return self.level

    def charge(self, rows: int) -> float:
        """Make sure that so many rows are charged. Returns the level that is to be written before they leave. Raises
        EnclaveError, and charges nothing, where the bucket holds fewer."""
        now = self.clock()
        passed = max(0.0, now - self.since)  # a clock that is set back fills nothing
        room = max(0.0, self.policy.burst - self.charged)  # what is charged is in the bucket still
        self.level = min(room, self.level + passed * self.policy.per_hour / 3600)
        self.since = max(self.since, now)
        whole = self.level + self.charged
        if rows > whole:
            seconds = (rows - whole) * 3600 / self.policy.per_hour
            raise EnclaveError(
                f"{rows} more rows of the table were asked for, and the provider's limit leaves {int(whole)}",
                f"try again in {seconds:.0f} s; the provider sets the rate ({self.policy.per_hour} rows an hour)",
            )
        more = int(min(self.level, max(rows - self.charged, AHEAD)))
        self.level, self.charged = self.level - more, self.charged + more
        return self.level
