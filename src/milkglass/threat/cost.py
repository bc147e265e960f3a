"""How long an attack takes, as each declares it: an estimate for a person who waits. No result depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Processor seconds of an attack that runs to its end and is graded:

        fixed + rows n / 10^3 + table n^2 d / 10^12 + tokens t / 10^6

    They are of one thread of the machine on which attacks were timed; audit/plan.py says how fast this machine is.

    Attributes:
        fixed: whatever is attacked.
        rows: for n = 1,000 rows of a table.
        table: for n^2 d = 10^12, where each of n rows of d dimensions is compared with every other.
        tokens: for t = a million tokens, sent and public.
    """

    fixed: float = 0.5
    rows: float = 0.0
    table: float = 0.0
    tokens: float = 15.0

    def seconds(self, n: int, d: int, t: int) -> float:
        return self.fixed + self.rows * n / 1e3 + self.table * n * n * d / 1e12 + self.tokens * t / 1e6
