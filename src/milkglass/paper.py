"""Where a method comes from, and where we depart from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paper:
    """A citation. `deviations` lists, one sentence each, what our code does otherwise than the paper, and why."""

    title: str
    authors: str
    year: int
    venue: str
    deviations: tuple[str, ...] = ()
