"""How many threads of torch each worker uses, where several make products side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial

import torch
from threadpoolctl import ThreadpoolController

_LOCK = threading.Lock()
_INSIDE = 0  # how many are in `threads_each` now, in all threads
_COUNT = 1  # threads of each, as the first of them wants it
_RESTORED = ExitStack()  # by the last one that leaves


@cache
def _libraries() -> ThreadpoolController:
    """Those that bring threads of their own; to look for them takes a hundredth of a second."""
    return ThreadpoolController()


@contextmanager
def threads_each(count: int) -> Iterator[Callable[[], None]]:
    """While this lasts, each thread that begins with what is given here has so many of its own for products, by torch,
    and one by NumPy: more only wait for one another. (oneDNN's operator takes all cores in a thread where torch has
    done nothing before.) Where several are inside at once, the first one's count holds for all."""
    global _INSIDE, _COUNT
    with _LOCK:
        _INSIDE += 1
        if _INSIDE == 1:
            _COUNT = count
            _RESTORED.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(count)
            _RESTORED.enter_context(_libraries().limit(limits=1, user_api="blas"))
        begun = partial(torch.set_num_threads, _COUNT)
    try:
        yield begun
    finally:
        with _LOCK:
            _INSIDE -= 1
            if not _INSIDE:
                _RESTORED.close()
