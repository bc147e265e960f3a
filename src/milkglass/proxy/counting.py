"""What is encoded under a key is counted: what crosses is gathered here, and written beside the key now and then.

A proxy that is killed leaves the last `EVERY` seconds uncounted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from milkglass.client.key.file import UnlockedKey, count
from milkglass.progress import Log, no_log
from milkglass.proxy.observe import Ids, Received

EVERY = 1.0  # seconds


@dataclass
class UsageCount:
    """An observer. Attributes: texts, tokens: not yet written."""

    unlocked: UnlockedKey
    notice: Log = no_log
    texts: int = 0
    tokens: int = 0

    def sent(self, ids: Ids) -> Received:
        self.texts += 1
        self.tokens += len(ids)
        return self._received

    def _received(self, ids: Ids) -> None:
        self.tokens += len(ids)  # the answer is text under this key, too

    def write(self) -> None:
        """Called in one thread at a time."""
        texts, tokens = self.texts, self.tokens
        if texts or tokens:
            self.texts, self.tokens = self.texts - texts, self.tokens - tokens
            count(self.unlocked, texts, tokens, self.notice)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Writes while the block runs, and at its end."""
        task = asyncio.create_task(self._repeat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.write()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            await _shielded(self.write)


async def _shielded(work: Callable[[], None]) -> None:
    """In a thread; a cancelled caller waits for its end, so that nothing runs twice at a time."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
