"""Do something to each of a stream of blocks, in order, in this process or in others.

At most a few blocks are held at a time, however long the stream. Workers are spawned, never forked: a fork would copy
the random state of libraries, and locks. What is done must depend on the state and the block alone.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from milkglass.errors import MilkglassError

Block = TypeVar("Block")
Result = TypeVar("Result")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_STATE: list[Any] = []  # of a worker process, set once


def ordered(
    do: Callable[[Any, Block], Result], state: Any, blocks: Iterable[Block], workers: int
) -> Iterator[tuple[Block, Result]]:
    """do(state, block) for each block, with the block. `do` is a function of a module; `state` is copied to workers.

    workers: 0 works in this process. One worker is a process, too: all of them compute with as many threads, and the
    last bits of a matrix product depend on these.
    """
    if not workers:
        for block in blocks:
            yield block, do(state, block)
        return
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    waiting: deque[tuple[Block, Future[Result]]] = deque()
    with (
        _one_thread_each(),
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=(state,)) as pool,
    ):
        try:
            for block in blocks:
                waiting.append((block, pool.submit(_do, do, block)))
                if len(waiting) > 2 * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool:
            raise MilkglassError(
                "a worker process was ended", "it may have had too little memory: give fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(state: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that waits for us
    _STATE[:] = [state]


def _do(do: Callable[[Any, Block], Result], block: Block) -> Result:
    return do(_STATE[0], block)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started in here compute with one thread unless the user says otherwise."""
    added = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
