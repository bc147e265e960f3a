"""Counts what a comparison costs this machine: time by the clock, time of the processor, and memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milkglass.system import peak_memory_bytes, processor_seconds


@dataclass(frozen=True)
class ComparisonCost:
    """Holds what some work cost: of this process, and of those that it started and waited for.

    Attributes:
        clock: seconds by the clock.
        processor: seconds of the processor, of all cores together.
        peak_bytes: the most memory that one process held.
    """

    clock: float = 0.0
    processor: float = 0.0
    peak_bytes: int = 0

    @classmethod
    def now(cls) -> ComparisonCost:
        """Returns the readings of this moment, from which `since` counts."""
        return cls(time.monotonic(), processor_seconds(), peak_memory_bytes())

    @classmethod
    def since(cls, start: ComparisonCost) -> ComparisonCost:
        """Returns what was spent since the readings `start`. The peak is that of the whole process."""
        now = cls.now()
        return cls(now.clock - start.clock, now.processor - start.processor, now.peak_bytes)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ComparisonCost:
        """Returns the cost of which `dataclasses.asdict` made `stored`."""
        return cls(float(stored["clock"]), float(stored["processor"]), int(stored["peak_bytes"]))

    def __add__(self, other: ComparisonCost) -> ComparisonCost:
        return ComparisonCost(
            self.clock + other.clock, self.processor + other.processor, max(self.peak_bytes, other.peak_bytes)
        )
