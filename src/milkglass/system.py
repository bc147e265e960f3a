"""What this machine is: cores and memory that this process may use, which addresses are the machine's own, and who may
read this process's memory."""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import sys
from pathlib import Path

PR_SET_DUMPABLE = 4
ALLOW_DEBUGGER = "MILKGLASS_ALLOW_DEBUGGER"  # a variable: "1" for core dumps and debuggers


def cores() -> int:
    """How many cores this process may use, which can be fewer than the machine has. At least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory(available: bool) -> int | None:
    """Bytes of main memory that this process may have; available: of these, what is free or can be freed at once. A
    container's limit counts. None: the system does not say."""
    try:
        told = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE))
        result = int(told["MemAvailable" if available else "MemTotal"]) << 10
    except (OSError, KeyError, ValueError):
        return None
    return min(result, _container_memory(available) or result)


def _container_memory(available: bool) -> int | None:
    """The same by the limit of the control group (version 2); None: there is none."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text("ascii"))
        if not available:
            return limit
        used = int((group / "memory.current").read_text("ascii"))
        cached = re.search(r"^file (\d+)$", (group / "memory.stat").read_text("ascii"), re.MULTILINE)
        return max(0, limit - used + (int(cached[1]) if cached else 0))
    except (OSError, ValueError):  # no such group, or "max"
        return None


def is_loopback(host: str) -> bool:
    """Whether what is sent to `host` crosses no network."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keep_private() -> None:
    """`close_memory`, in a process that holds a key, a passphrase or text, unless its user allows a debugger."""
    if os.environ.get(ALLOW_DEBUGGER) != "1":
        close_memory()


def close_memory() -> bool:
    """No core dump of this process, and no other process of the same user reads its memory or traces it (Linux;
    elsewhere core dumps alone). Returns whether both hold.

    A process that another program replaces, or that this one starts as a new program, is open again. Swap is not
    covered, and neither is whoever owns the machine.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return False
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0)
