"""What this machine is: how many processor cores this process may use, and which addresses are the machine's own."""

from __future__ import annotations

import ipaddress
import os


def cores() -> int:
    """How many cores this process may use, which can be fewer than the machine has. At least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_loopback(host: str) -> bool:
    """Whether what is sent to `host` crosses no network."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
