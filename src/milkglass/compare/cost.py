"""Counts what a comparison costs this machine: time by the clock, time of the processor, and memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milkglass.system import peak_memory_bytes, processor_seconds


@dataclass(frozen=True)
class ComparisonCost:
    """Holds what some work cost: of this process, and of those that it started and waited for.

    Attributes:
        clock: seconds by the clock.
        processor: seconds of the processor, of all cores together.
        peak_bytes: the most memory that one process held between its own start and the end of the work.
    """

    clock: float = 0.0
    processor: float = 0.0
    peak_bytes: int = 0

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ComparisonCost:
        """Returns the cost of which `dataclasses.asdict` made `stored`."""
        return cls(float(stored["clock"]), float(stored["processor"]), int(stored["peak_bytes"]))

    def __add__(self, other: ComparisonCost) -> ComparisonCost:
        peak_bytes = max(self.peak_bytes, other.peak_bytes)
        return ComparisonCost(self.clock + other.clock, self.processor + other.processor, peak_bytes)


@dataclass(frozen=True)
class Stopwatch:
    """Counts what is spent from the moment at which it is made.

    Attributes:
        clock: the reading of `time.monotonic` then.
        processor: the CPU seconds that were spent then.
    """

    clock: float = field(default_factory=time.monotonic)
    processor: float = field(default_factory=processor_seconds)

    def cost(self) -> ComparisonCost:
        """Returns what was spent since then."""
        return ComparisonCost(time.monotonic() - self.clock, processor_seconds() - self.processor, peak_memory_bytes())
