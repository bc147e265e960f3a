"""How many processor cores this process may use, which can be fewer than the machine has."""

from __future__ import annotations

import os


def cores() -> int:
    """At least 1. Where the system cannot say what a process may use, all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
