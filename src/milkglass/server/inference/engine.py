"""A thread that owns one model: work is handed in, done in batches, and handed back. It is independent of the web."""

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
    """The model failed: it ran out of memory, or returned numbers that are not finite."""

    status = 500


class Engine(abc.ABC, Generic[W]):
    """The base of all engines. Subclasses write `step`, `active` and `drop`.

    All methods but `submit` and `close` run in the thread.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[W] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abc.abstractmethod
    def step(self) -> None:
        """Takes waiting work and does the next piece of work."""

    @abc.abstractmethod
    def active(self) -> bool:
        """Returns whether there is unfinished work."""

    @abc.abstractmethod
    def drop(self) -> list[W]:
        """Removes and returns the unfinished work."""

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: list[W]) -> None:
        """Hands in work, all of it or none. Raises Busy if too many rows are waiting."""
        with self._changed:
            if self._closed or len(self._waiting) + len(work) > self._max_waiting:
                raise Busy(f"more than {self._max_waiting} rows are waiting for this model", "try again in a moment")
            self._waiting.extend(work)
            self._changed.notify()

    def close(self) -> None:
        """Stops the thread. Unfinished work fails."""
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
        """Puts work back to the front, in order."""
        with self._changed:
            self._waiting.extendleft(reversed(work))


def that_fit(lengths: Sequence[int], limit: int) -> int:
    """Returns how many of the first rows fit, padded, in one pass of `limit` tokens; at least one."""
    longest = 0
    for count, length in enumerate(lengths):
        longest = max(longest, length)
        if count and longest * (count + 1) > limit:
            return count
    return len(lengths)


def not_finite() -> ModelFailed:
    return ModelFailed("the model returns numbers that are not finite", "were its weights damaged or mixed up?")


def explain(error: Exception) -> MilkglassError:
    """Turns a failure into an error for the caller. Only its place is logged: its message may quote ids."""
    import torch

    log.error("model: %s", place_of(error))
    if isinstance(error, MilkglassError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ModelFailed("the model ran out of memory", "send fewer or shorter prompts")
    return ModelFailed("the model failed on this batch", "the server's log names the place")
