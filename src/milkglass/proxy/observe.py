"""Observers of the ids that the proxy sends and receives: one counts them, another shows them on a page.

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
ReceiveIds = Callable[[Ids], None]  # called with scrambled ids of an answer, a few at a time
WRITE_SECONDS = 1.0  # the time between two writes of the counts


def ignore_ids(ids: Ids) -> None:
    """Ignores the ids of an answer."""


class Observer(Protocol):
    """Receives ids in the event loop. It must not wait."""

    def begin_exchange(self, ids: Ids) -> ReceiveIds:
        """Takes the scrambled ids of a text that is about to be sent, and returns the receiver of its answer's ids."""


class NoObserver:
    """Ignores all ids."""

    def begin_exchange(self, ids: Ids) -> ReceiveIds:
        return ignore_ids


@dataclass(frozen=True)
class Observers:
    """Passes all ids to several observers, in order."""

    observers: Sequence[Observer]

    def begin_exchange(self, ids: Ids) -> ReceiveIds:
        receivers = [observer.begin_exchange(ids) for observer in self.observers]

        def receive(ids: Ids) -> None:
            for receive_ids in receivers:
                receive_ids(ids)

        return receive


@dataclass
class UsageCount:
    """Counts the texts and tokens of exchanges, and writes the counts beside the key.

    Attributes:
        unlocked: the key, beside which the counts are written.
        notice: receives warnings.
        text_count: texts whose count is not yet written.
        token_count: tokens whose count is not yet written.
    """

    unlocked: UnlockedKey
    notice: Log = no_log
    text_count: int = 0
    token_count: int = 0
    _has_failed: bool = False

    def begin_exchange(self, ids: Ids) -> ReceiveIds:
        self.text_count += 1
        self.token_count += len(ids)
        return self._on_received

    def _on_received(self, ids: Ids) -> None:
        self.token_count += len(ids)  # the answer is text under this key, too

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Writes the counts while the block runs, and at its end."""
        task = asyncio.create_task(self._write_repeatedly())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._write()
            if self.text_count or self.token_count:
                self.notice(
                    f"warning: {self.token_count:,} tokens in {self.text_count:,} texts stay uncounted under this key"
                )

    async def _write_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await _shield(self._write())

    async def _write(self) -> None:
        """Writes the counts in a thread. If that fails, they stay and are written again: rather twice than never."""
        texts, tokens = self.text_count, self.token_count
        if not (texts or tokens):
            return
        try:
            await asyncio.to_thread(self.unlocked.count, texts, tokens, self.notice)
        except (OSError, MilkglassError) as error:
            if not self._has_failed:
                self.notice(
                    f"warning: what crosses cannot be counted under this key ({_reason(error)}); it is tried again"
                )
            self._has_failed = True
            return
        self._has_failed = False
        self.text_count -= texts
        self.token_count -= tokens


def _reason(error: OSError | MilkglassError) -> str:
    """Returns the reason of an error in a few words, without a path."""
    if isinstance(error, MilkglassError):
        return error.message
    return (error.strerror or type(error).__name__).lower()


async def _shield(work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end even if the caller is cancelled, so that two runs never overlap."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
