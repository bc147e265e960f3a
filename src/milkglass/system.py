"""What this machine is: how many processor cores this process may use, which addresses are the machine's own, and who
may read this process's memory."""

from __future__ import annotations

import ipaddress
import os
import resource
import sys

PR_SET_DUMPABLE = 4
ALLOW_DEBUGGER = "MILKGLASS_ALLOW_DEBUGGER"  # a variable: "1" for core dumps and debuggers


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
