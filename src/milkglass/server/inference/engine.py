"""A thread that owns one model: work is handed in, done in batches, handed back. Knows nothing of the web."""

from __future__ import annotations

import abc
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from milkglass.errors import Busy, MilkglassError, ServerError
from milkglass.server.connections.logs import place_of

log = logging.getLogger("milkglass.server")


class WorkItem(Protocol):
    def fail(self, error: MilkglassError) -> None: ...


W = TypeVar("W", bound=WorkItem)


class ModelFailed(ServerError):
    """The model itself failed: out of memory, or numbers that are not finite."""

    status = 500


class Engine(abc.ABC, Generic[W]):
    """Subclasses write `step`, `active` and `drop`. Everything but `submit` and `close` runs in the thread."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[W] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abc.abstractmethod
    def step(self) -> None:
        """Take what is waiting and do the next piece of work."""

    @abc.abstractmethod
    def active(self) -> bool:
        """Whether there is work that was begun."""

    @abc.abstractmethod
    def drop(self) -> list[W]:
        """Forget the work that was begun, and return it."""

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: list[W]) -> None:
        """Hand in work, all of it or none. Raises Busy."""
        with self._changed:
            if self._closed or len(self._waiting) + len(work) > self._max_waiting:
                raise Busy(f"more than {self._max_waiting} rows are waiting for this model", "try again in a moment")
            self._waiting.extend(work)
            self._changed.notify()

    def close(self) -> None:
        """Work that is not done fails."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        import torch

        with torch.inference_mode():
            while self._wait():
                try:
                    self.step()
                except Exception as error:  # noqa: BLE001  (one bad batch must not end the model's thread)
                    self.fail_all(self.drop(), explain(error))
        with self._changed:
            left = [*self.drop(), *self._waiting]
            self._waiting.clear()
        self.fail_all(left, Busy("the server is stopping", "try again when it is back"))

    def _wait(self) -> bool:
        with self._changed:
            while not (self._closed or self._waiting or self.active()):
                self._changed.wait()
            return not self._closed

    @staticmethod
    def fail_all(work: list[W], error: MilkglassError) -> None:
        for item in work:
            item.fail(error)

    def take(self, most: int) -> list[W]:
        with self._changed:
            return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def put_back(self, work: list[W]) -> None:
        """To the front, in order."""
        with self._changed:
            self._waiting.extendleft(reversed(work))


def that_fit(lengths: Sequence[int], limit: int) -> int:
    """How many of the first rows fit, padded, in one pass of `limit` tokens; one always does."""
    longest = 0
    for count, length in enumerate(lengths):
        longest = max(longest, length)
        if count and longest * (count + 1) > limit:
            return count
    return len(lengths)


def not_finite() -> ModelFailed:
    return ModelFailed("the model returns numbers that are not finite", "were its weights damaged or mixed up?")


def explain(error: Exception) -> MilkglassError:
    """Turn a failure into an error for the caller. Its place goes to the log, its message nowhere: it may quote ids."""
    import torch

    log.error("model: %s", place_of(error))
    if isinstance(error, MilkglassError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ModelFailed("the model ran out of memory", "send fewer or shorter prompts")
    return ModelFailed("the model failed on this batch", "the server's log names the place")
