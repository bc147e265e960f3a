"""Limits how many rows of the table may leave the enclave: a client that may ask for every token has the table.

The limit is a bucket of `burst` rows that fills at `per_hour`. Reading a table of n rows through one enclave takes at
least (n - burst) / per_hour hours. The level is sealed beside the table, starts full when the enclave is built, and is
needed to open the table, so that a restart does not fill the bucket. Rows are charged before they leave, ROWS_AHEAD at
a time: the lowered level is written first, and a process that is killed loses the rows that were charged and not used.

Without a monotonic counter and a clock of its own, no software prevents the following. A machine's owner who restores
an older copy of the level, does not write it, or copies the folder gains up to a burst each time. An owner who changes
the enclave's clock, which the host provides even with SGX, fills the bucket. Each enclave that gets the table from the
provider has its own bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from milkglass.errors import EnclaveError

ROWS_AHEAD = 256  # rows that are charged at a time, if so many are left, so that the level is written less often


class RowsNotCharged(Exception):
    """Rows would leave the enclave that no written level accounts for.

    Attributes:
        row_count: how many rows would leave.
    """

    def __init__(self, row_count: int) -> None:
        super().__init__()
        self.row_count = row_count


@dataclass(frozen=True)
class RowPolicy:
    """Says how many rows of its table the provider lets leave an enclave.

    Attributes:
        per_hour: rows that are added to the bucket in an hour.
        burst: rows that the full bucket holds.
    """

    per_hour: int = 200_000
    burst: int = 20_000

    def hours(self, row_count: int) -> float:
        """Returns the least number of hours in which a table of `row_count` rows can be read."""
        return max(0.0, (row_count - self.burst) / self.per_hour)


@dataclass
class RowBudget:
    """Counts the rows that may leave, as a bucket that fills with time.

    Attributes:
        policy: the bucket's size and rate.
        level: the rows that may be charged, as of `level_time`.
        level_time: the time of `level`, in seconds by `clock`.
        clock: returns seconds.
        charged_count: rows that may leave, and that are not part of `level`.
    """

    policy: RowPolicy
    level: float
    clock: Callable[[], float] = time.monotonic  # setting the date does not change it
    level_time: float = field(init=False)
    charged_count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.level_time = self.clock()

    def take(self, row_count: int) -> None:
        """Lets charged rows leave. Raises RowsNotCharged if fewer were charged, EnclaveError for more than a burst."""
        if row_count > self.policy.burst:
            raise EnclaveError(
                f"{row_count} tokens at once, the provider allows {self.policy.burst}", "shorten the text"
            )
        if row_count > self.charged_count:
            raise RowsNotCharged(row_count)
        self.charged_count -= row_count

    def refund(self) -> float:
        """Adds charged rows that did not leave to the level again, and returns the level."""
        self.level, self.charged_count = self.level + self.charged_count, 0
        return self.level

    def charge(self, row_count: int) -> float:
        """Charges rows, and returns the level to be written before they leave. Raises EnclaveError beyond the limit."""
        now = self.clock()
        elapsed = max(0.0, now - self.level_time)  # a clock that is set back fills nothing
        # Charged rows take room in the bucket until they leave
        free_room = max(0.0, self.policy.burst - self.charged_count)
        self.level = min(free_room, self.level + elapsed * self.policy.per_hour / 3600)
        self.level_time = max(self.level_time, now)
        available_count = self.level + self.charged_count
        if row_count > available_count:
            seconds = (row_count - available_count) * 3600 / self.policy.per_hour
            raise EnclaveError(
                f"{row_count} more rows of the table were asked for, and the provider's limit leaves "
                f"{int(available_count)}",
                f"try again in {seconds:.0f} s; the provider sets the rate ({self.policy.per_hour} rows an hour)",
            )
        granted_count = int(min(self.level, max(row_count - self.charged_count, ROWS_AHEAD)))
        self.level, self.charged_count = self.level - granted_count, self.charged_count + granted_count
        return self.level
