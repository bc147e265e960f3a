"""How many threads of torch a worker may use that begins meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from threadpoolctl import threadpool_limits

_LOCK = threading.Lock()
_INSIDE = 0  # how many are in `threads_each` now, in all threads
_RESTORED = ExitStack()  # by the last one that leaves


@contextmanager
def threads_each(count: int) -> Iterator[None]:
    """While this lasts, each thread that begins has so many of its own for products, by torch, and one by NumPy: more
    only wait for one another. Where several are inside at once, the first one's count holds for all."""
    global _INSIDE
    import torch  # not for the commands that only ask what methods there are

    with _LOCK:
        _INSIDE += 1
        if _INSIDE == 1:
            _RESTORED.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(count)
            _RESTORED.enter_context(threadpool_limits(1, user_api="blas"))
    try:
        yield
    finally:
        with _LOCK:
            _INSIDE -= 1
            if not _INSIDE:
                _RESTORED.close()
