"""Work in a process of its own: a fresh interpreter, whose memory and threads are its own."""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")
STATUS = Path("/proc/self/status")
TICK = 0.02  # seconds between two looks at the memory


def in_child(work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """What `work`, a function of a module, returns or raises in a new process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *args, **kwargs).result()


def memory_used(work: Callable[[], Result]) -> tuple[Result, float, float]:
    """What the work returns, its seconds, and by how many bytes this process' memory rose above what it was, at most.

    Pages of mapped files are not counted: the system takes them back when it needs them. A thread looks every TICK
    seconds, since Linux keeps a peak of all pages only; blocks that live shorter may be missed.
    """
    before = _anonymous()
    peak, over = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(TICK):
            peak = max(peak, _anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.perf_counter()
    result = work()
    spent = time.perf_counter() - began
    over.set()
    watcher.join()
    return result, spent, float(max(peak, _anonymous()) - before)


def _anonymous() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text("ascii"))
    if found is None:
        raise RuntimeError("this system does not report a process' anonymous memory: run it on Linux")
    return 1024 * int(found[1])
