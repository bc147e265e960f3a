"""How many threads of torch a worker may use that begins meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits


@contextmanager
def threads_each(count: int) -> Iterator[None]:
    """While this lasts, each thread that begins has so many of its own for products, by torch, and one by NumPy: more
    only wait for one another."""
    import torch  # not for the commands that only ask what methods there are

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
