"""Limits the calls that an engine answers at a time, and the time of each step of an answer.

Calls beyond the limit wait in order. An application's request may ask for more answers than there are connections.
While one of its answers is running, the others wait without a time limit, because the time of each at the engine is
limited elsewhere. A request without a running answer waits as long as for an answer's beginning, and then gets
EngineBusy.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, final

from milkglass.errors import EngineBusy

REQUEST: ContextVar[object | None] = ContextVar("request", default=None)  # the application's request that is answered


@final
class CallLimit:
    """Admits at most `max_calls` calls at a time.

    Attributes:
        timeout: seconds that a call waits while no other call of its request is running.
    """

    def __init__(self, max_calls: int, timeout: float) -> None:
        self.max_calls, self.timeout = max_calls, timeout
        self._free_slots, self._running_by_request = asyncio.Semaphore(max_calls), Counter[object]()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Counts a call while the block runs. Raises EngineBusy if the limit was reached for too long."""
        request = REQUEST.get()
        await self._acquire(request)
        self._running_by_request[request] += 1
        try:
            yield
        finally:
            self._running_by_request[request] -= 1
            if not self._running_by_request[request]:
                del self._running_by_request[request]
            self._free_slots.release()

    async def _acquire(self, request: object | None) -> None:
        # One acquisition for the whole wait, so that it keeps its place in the queue
        acquisition = asyncio.ensure_future(self._free_slots.acquire())
        try:
            while not (await asyncio.wait({acquisition}, timeout=self.timeout))[0]:
                if request is None or not self._running_by_request[request]:
                    raise EngineBusy(
                        f"all {self.max_calls} connections to the engine were in use for {self.timeout:g} s",
                        "try again later, or ask for fewer answers at a time",
                    )
        except BaseException:  # cancelled, too
            if not acquisition.cancel() and not acquisition.cancelled():
                self._free_slots.release()
            raise


@final
class StepTimeout:
    """Limits the time of each step of a long work, as `asyncio.timeout` does for one, with one timer for all of them.

    A block `with timeout:` is a step. It raises TimeoutError once it has taken `seconds`. Call `close` after the last.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None  # the task that is in a step
        self._deadline, self._cancelling, self._is_over = 0.0, 0, False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._deadline = self._loop.time() + self.seconds
        self._cancelling, self._is_over = 0 if self._task is None else self._task.cancelling(), False
        if self._timer is None or self._timer.when() > self._deadline:
            self.close()
            self._timer = self._loop.call_at(self._deadline, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check)
            return
        self._is_over = True
        self._task.cancel()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        task, self._task = self._task, None
        if not self._is_over or task is None:
            return
        self._is_over = False
        if task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error

    def close(self) -> None:
        """Cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
