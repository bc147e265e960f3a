"""What crossed, kept for the page: questions and their answers as scrambled ids, in memory alone.

A conversation's next question repeats the ones before: a question that an earlier one begins is a later turn, and what
both have in common is counted, not kept again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from milkglass.proxy.observe import Ids, Received
from milkglass.sequences import common_prefix

EXCHANGES_KEPT = 100  # exchanges
COMPARED = 8  # of the last ones, in search of what a question repeats
MAX_TOKENS_KEPT = 200_000  # of all exchanges together: the oldest go first


@dataclass
class Exchange:
    """One question and its answer.

    Attributes:
        number: from 1 on.
        whole: scrambled ids of the question.
        repeated: how many of them, from the first on, an earlier exchange had.
        answer: scrambled ids, as far as they came.
        first, last: when the first and the last came, in seconds of the clock; 0 before.
        changed: the log's version when it last changed.
    """

    number: int
    whole: list[int]
    repeated: int
    changed: int
    answer: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0

    @property
    def question(self) -> list[int]:
        """The ids of the question that earlier turns do not have."""
        return self.whole[self.repeated :]

    @property
    def speed(self) -> float:
        """Tokens a second after the first; 0 before there are two."""
        lasted = self.last - self.first
        return (len(self.answer) - 1) / lasted if lasted > 0 else 0.0


class ExchangeLog:
    """An observer. Everything happens in one event loop.

    Attributes:
        version: changes with every token.
        exchanges: the oldest first.
        count: of all exchanges, kept or not.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.version, self.count, self.exchanges = 0, 0, deque[Exchange]()
        self._clock, self._waiting = clock, asyncio.Event()

    def sent(self, ids: Ids) -> Received:
        whole = [int(one) for one in ids]
        self.count += 1
        one = Exchange(self.count, whole, self._repeated(whole), self.version)
        self.exchanges.append(one)
        self._forget()
        self.touch(one)

        def received(ids: Ids) -> None:
            now = self._clock()
            one.first, one.last = one.first or now, now
            one.answer += [int(token) for token in ids]
            self.touch(one)

        return received

    def touch(self, one: Exchange | None = None) -> None:
        """Something changed: one exchange, or what the page says of all of them."""
        self.version += 1
        for changed in self.exchanges if one is None else (one,):
            changed.changed = self.version
        self._waiting.set()
        self._waiting = asyncio.Event()

    async def after(self, version: int, seconds: float) -> None:
        """Returns when there is something else than this version, or after `seconds`."""
        if self.version == version:
            try:
                await asyncio.wait_for(self._waiting.wait(), seconds)
            except TimeoutError:
                return

    def crossed(self) -> list[list[int]]:
        """Scrambled ids of what is kept, each text once."""
        return [part for one in self.exchanges for part in (one.question, one.answer) if part]

    def _repeated(self, whole: list[int]) -> int:
        before = list(self.exchanges)[-COMPARED:]
        shared = [(one, common_prefix(whole, [*one.whole, *one.answer])) for one in before]
        return max((count for one, count in shared if count >= len(one.whole)), default=0)

    def _forget(self) -> None:
        held = sum(len(one.whole) + len(one.answer) for one in self.exchanges)
        while len(self.exchanges) > EXCHANGES_KEPT or (held > MAX_TOKENS_KEPT and len(self.exchanges) > 1):
            gone = self.exchanges.popleft()
            held -= len(gone.whole) + len(gone.answer)
