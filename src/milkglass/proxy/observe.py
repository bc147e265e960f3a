"""Observers receive the ids that the proxy sends and receives. One counts them, another shows them on a page.

Counts are summed here, and written beside the key at intervals. A proxy that is killed leaves the last WRITE_SECONDS
uncounted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from milkglass.client.key.file import UnlockedKey
from milkglass.errors import MilkglassError
from milkglass.progress import Log, no_log

Ids = Sequence[int] | NDArray[Any]
Received = Callable[[Ids], None]  # called with scrambled ids of an answer, a few at a time
WRITE_SECONDS = 1.0  # seconds


def ignore_ids(ids: Ids) -> None:
    """Ignores the ids of an answer."""


class Observer(Protocol):
    """Receives ids in the event loop. It must not wait."""

    def begin_exchange(self, ids: Ids) -> Received:
        """Takes the scrambled ids of a text that is about to be sent, and returns the receiver of its answer's ids."""


class NoObserver:
    """Ignores all ids."""

    def begin_exchange(self, ids: Ids) -> Received:
        return ignore_ids


@dataclass(frozen=True)
class Observers:
    """Several observers, which are called in order."""

    observers: Sequence[Observer]

    def begin_exchange(self, ids: Ids) -> Received:
        exchanges = [observer.begin_exchange(ids) for observer in self.observers]

        def received(ids: Ids) -> None:
            for exchange in exchanges:
                exchange(ids)

        return received


@dataclass
class UsageCount:
    """An observer that counts. `texts` and `tokens` are not yet written."""

    unlocked: UnlockedKey
    notice: Log = no_log
    texts: int = 0
    tokens: int = 0
    _failing: bool = False

    def begin_exchange(self, ids: Ids) -> Received:
        self.texts += 1
        self.tokens += len(ids)
        return self._on_received

    def _on_received(self, ids: Ids) -> None:
        self.tokens += len(ids)  # the answer is text under this key, too

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Writes the counts while the block runs, and at its end."""
        task = asyncio.create_task(self._repeat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._write()
            if self.texts or self.tokens:
                self.notice(f"warning: {self.tokens:,} tokens in {self.texts:,} texts stay uncounted under this key")

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await _shield(self._write())

    async def _write(self) -> None:
        """Writes the counts in a thread. If that fails they stay and are written again: rather twice than never."""
        texts, tokens = self.texts, self.tokens
        if not (texts or tokens):
            return
        try:
            await asyncio.to_thread(self.unlocked.count, texts, tokens, self.notice)
        except (OSError, MilkglassError) as error:
            if not self._failing:
                self.notice(
                    f"warning: what crosses cannot be counted under this key ({_why(error)}); it is tried again"
                )
            self._failing = True
            return
        self._failing = False
        self.texts -= texts
        self.tokens -= tokens


def _why(error: OSError | MilkglassError) -> str:
    if isinstance(error, MilkglassError):
        return error.message
    return (error.strerror or type(error).__name__).lower()


async def _shield(work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end even if the caller is cancelled, so that nothing runs twice at a time."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
