"""Questions and their answers as scrambled ids, kept in memory for the page.

A conversation's next question repeats the ones before. A question that begins with an earlier exchange is a later turn,
and what both have in common is counted and not stored again.
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
EXCHANGES_COMPARED = 8  # the last exchanges that a question may repeat
MAX_TOKENS_KEPT = 200_000  # tokens of all exchanges together: the oldest are dropped first


@dataclass
class Exchange:
    """One question and its answer.

    Attributes:
        prompt: scrambled ids of all that was sent, the earlier turns included.
        repeated: how many ids at its beginning an earlier exchange has too.
        number: from 1, in the order of the questions.
        answer: scrambled ids of the answer so far.
        first, last: when the answer's first and newest ids came, in seconds of the clock; 0 before.
        changed: the log's version when it last changed.
    """

    number: int
    prompt: list[int]
    repeated: int
    changed: int
    answer: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0

    @property
    def question(self) -> list[int]:
        """Returns the prompt's ids after the repeated ones."""
        return self.prompt[self.repeated :]

    @property
    def speed(self) -> float:
        """Returns tokens a second after the first; 0 before there are two."""
        duration = self.last - self.first
        return (len(self.answer) - 1) / duration if duration > 0 else 0.0


class ExchangeLog:
    """An observer of exchanges, in one event loop.

    Attributes:
        version: changes with every token.
        exchanges: the oldest first.
        count: the number of all exchanges, also of those that were dropped.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.version, self.count, self.exchanges = 0, 0, deque[Exchange]()
        self._clock, self._change_event = clock, asyncio.Event()

    def begin_exchange(self, ids: Ids) -> Received:
        prompt = [int(token) for token in ids]
        self.count += 1
        exchange = Exchange(self.count, prompt, self._repeated_count(prompt), self.version)
        self.exchanges.append(exchange)
        self._drop_oldest()
        self.touch(exchange)

        def received(ids: Ids) -> None:
            now = self._clock()
            exchange.first, exchange.last = exchange.first or now, now
            exchange.answer += [int(token) for token in ids]
            self.touch(exchange)

        return received

    def touch(self, exchange: Exchange | None = None) -> None:
        """Marks one exchange, or all of them, as changed."""
        self.version += 1
        for touched in self.exchanges if exchange is None else (exchange,):
            touched.changed = self.version
        self._change_event.set()
        self._change_event = asyncio.Event()

    async def wait_for_change(self, version: int, seconds: float) -> None:
        """Returns when the version is another one, or after `seconds`."""
        if self.version == version:
            try:
                await asyncio.wait_for(self._change_event.wait(), seconds)
            except TimeoutError:
                return

    def kept_texts(self) -> list[list[int]]:
        """Returns the scrambled ids that are kept, each text once."""
        return [part for exchange in self.exchanges for part in (exchange.question, exchange.answer) if part]

    def _repeated_count(self, prompt: list[int]) -> int:
        newest = list(self.exchanges)[-EXCHANGES_COMPARED:]
        counts = [(common_prefix(prompt, [*exchange.prompt, *exchange.answer]), exchange) for exchange in newest]
        return max((count for count, exchange in counts if count >= len(exchange.prompt)), default=0)

    def _drop_oldest(self) -> None:
        id_count = sum(len(exchange.prompt) + len(exchange.answer) for exchange in self.exchanges)
        while len(self.exchanges) > EXCHANGES_KEPT or (id_count > MAX_TOKENS_KEPT and len(self.exchanges) > 1):
            oldest = self.exchanges.popleft()
            id_count -= len(oldest.prompt) + len(oldest.answer)
