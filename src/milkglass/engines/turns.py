"""Who may speak to an engine: so many calls at a time, and the others wait in the order in which they came.

An application's request can ask for more answers than there are connections. They wait for each other, however long
that takes: what each of them may take at the engine is bounded elsewhere. Someone else's request waits no longer than
for an answer's beginning, and is then told that the engine is busy.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import final

from milkglass.errors import EngineBusy

REQUEST: ContextVar[object | None] = ContextVar("request", default=None)  # of an application, whose answers are one's


@final
class Turns:
    """Attributes:
    most: calls at a time.
    patience: seconds that a call waits for its turn, while none of its own request's has one.
    """

    def __init__(self, most: int, patience: float) -> None:
        self.most, self.patience = most, patience
        self._free, self._held = asyncio.Semaphore(most), Counter[object]()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """While the block runs. Raises EngineBusy."""
        request = REQUEST.get()
        await self._acquire(request)
        self._held[request] += 1
        try:
            yield
        finally:
            self._held[request] -= 1
            if not self._held[request]:
                del self._held[request]
            self._free.release()

    async def _acquire(self, request: object | None) -> None:
        waiting = asyncio.ensure_future(self._free.acquire())  # one all the while: it keeps its place
        try:
            while not (await asyncio.wait({waiting}, timeout=self.patience))[0]:
                if request is None or not self._held[request]:
                    raise EngineBusy(
                        f"all {self.most} connections to the engine were in use for {self.patience:g} s",
                        "try again later, or ask for fewer answers at a time",
                    )
        except BaseException:  # cancelled, too
            if not waiting.cancel() and not waiting.cancelled():
                self._free.release()
            raise
