"""Asks the machine for its cores, memory and addresses, and protects this process's memory."""

from __future__ import annotations

import gc
import ipaddress
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_THREADS = 8  # the most threads of `in_threads`: more do not read faster
PR_SET_DUMPABLE = 4  # an operation of Linux's prctl
# Environment variables that the libraries below PyTorch read when they are loaded.
LIBRARY_DEFAULTS = {
    # Threads that wait by spinning make a training up to five times as long where other programs use the cores, too
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN keeps a kernel for each shape of a product, by default 1,024 of nearly 1 MB; texts have many lengths
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    # PyTorch has a cache of its own in front of oneDNN's, by default of 1,024 products for each function
    "LRU_CACHE_CAPACITY": "128",
}
ALLOW_DEBUGGER_VARIABLE = "MILKGLASS_ALLOW_DEBUGGER"  # environment variable: "1" allows core dumps and debuggers


def core_count() -> int:
    """Returns how many cores this process may use, at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields what `work` returns for each item, in the order of the items, computed by a thread for each core.

    It suits work that waits or lets other threads run, such as reading and hashing. When an item fails or the caller
    stops, items that have not begun are dropped.
    """
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(min(core_count(), MAX_THREADS))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)


def memory_bytes(only_available: bool) -> int | None:
    """Returns how many bytes of main memory this process may use, within a container's limit. None: not known.

    Args:
        only_available: whether only memory counts that is free or can be freed at once.
    """
    try:
        fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE))
        machine_bytes = int(fields["MemAvailable" if only_available else "MemTotal"]) << 10
    except (OSError, KeyError, ValueError):
        return None
    return min(machine_bytes, _container_memory_bytes(only_available) or machine_bytes)


def _container_memory_bytes(only_available: bool) -> int | None:
    """Returns the bytes that the control group (version 2) allows, or None if there is no limit."""
    group_folder = Path("/sys/fs/cgroup")
    try:
        limit_bytes = int((group_folder / "memory.max").read_text("ascii"))
        if not only_available:
            return limit_bytes
        used_bytes = int((group_folder / "memory.current").read_text("ascii"))
        cached_match = re.search(r"^file (\d+)$", (group_folder / "memory.stat").read_text("ascii"), re.MULTILINE)
        return max(0, limit_bytes - used_bytes + (int(cached_match[1]) if cached_match else 0))
    except (OSError, ValueError):  # no such group, or "max"
        return None


def processor_seconds() -> float:
    """Returns the CPU seconds of this process, and of the processes that it started and waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def peak_memory_bytes() -> int:
    """Returns the most memory that this process held so far, or one that it started and waited for."""
    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(peaks) * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class WorkCost:
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
    def from_json(cls, stored: Mapping[str, Any]) -> WorkCost:
        """Returns the cost of which `dataclasses.asdict` made `stored`."""
        return cls(float(stored["clock"]), float(stored["processor"]), int(stored["peak_bytes"]))

    def __add__(self, other: WorkCost) -> WorkCost:
        peak_bytes = max(self.peak_bytes, other.peak_bytes)
        return WorkCost(self.clock + other.clock, self.processor + other.processor, peak_bytes)


@dataclass(frozen=True)
class Stopwatch:
    """Counts what is spent from the moment at which it is made.

    Attributes:
        clock: the reading of `time.monotonic` then.
        processor: the CPU seconds that were spent then.
    """

    clock: float = field(default_factory=time.monotonic)
    processor: float = field(default_factory=processor_seconds)

    def cost(self) -> WorkCost:
        """Returns what was spent since then."""
        return WorkCost(time.monotonic() - self.clock, processor_seconds() - self.processor, peak_memory_bytes())


def is_loopback(host: str) -> bool:
    """Returns whether what is sent to `host` crosses no network."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def close_memory_unless_debugged() -> None:
    """Calls `close_memory` in a process with a key, a passphrase or text, unless its user allows a debugger."""
    if os.environ.get(ALLOW_DEBUGGER_VARIABLE) != "1":
        close_memory()


def set_library_defaults() -> None:
    """Sets the variables of LIBRARY_DEFAULTS that the environment does not have. Call it before PyTorch is imported.

    Child processes inherit the variables.
    """
    for name, value in LIBRARY_DEFAULTS.items():
        os.environ.setdefault(name, value)


def release_memory() -> None:
    """Gives memory that is free in this process back to the system, where the C library can (glibc's malloc_trim).

    The C library by itself keeps freed memory for later. Long work after other long work then has the peaks of both.
    """
    gc.collect()
    trim_memory()


def trim_memory() -> None:
    """Gives free memory back to the system like `release_memory`, without a search for unreachable objects."""
    if sys.platform != "linux":
        return
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # another C library has none
        trim(0)


def close_memory() -> bool:
    """Turns off core dumps, and on Linux keeps other processes of this user from reading or tracing this one.

    A program that replaces this process, or that this process starts, is not protected. Neither is swap, and the owner
    of the machine can read all memory.

    Returns:
        Whether both protections hold.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return False
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit inside the block, so that every `with` is left and no child process stays behind.

    Outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
