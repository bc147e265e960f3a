"""How long an attack takes, as each declares it: an estimate for a person who waits. No result depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Processor seconds of an attack that runs to its end and is graded: fixed + table n^2 d / 10^12 + tokens t / 10^6.

    They are of one thread of the machine on which attacks were timed; audit/plan.py says how fast this machine is.

    Attributes:
        fixed: whatever is attacked.
        table: for n^2 d = 10^12, where each of n rows of d dimensions is compared with every other.
        tokens: for t = a million tokens, sent and public.
    """

    fixed: float = 1.0
    table: float = 0.0
    tokens: float = 15.0

    def seconds(self, rows: int, width: int, tokens: int) -> float:
        """rows: n; width: d; tokens: t."""
        return self.fixed + self.table * rows * rows * width / 1e12 + self.tokens * tokens / 1e6
