"""Questions and their answers as scrambled ids, kept in memory for the page.

Each question of a conversation repeats the turns before it. If a question begins with an earlier one, the page counts
the ids that it shares with the earlier exchange, and shows only the others.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from milkglass.proxy.observe import Ids, ReceiveIds
from milkglass.sequences import common_prefix_length

MAX_EXCHANGES_KEPT = 100
MAX_EXCHANGES_COMPARED = 8  # a question is compared with so many exchanges before it
MAX_TOKENS_KEPT = 200_000  # the most tokens of all exchanges together; the oldest exchanges are dropped first


@dataclass
class Exchange:
    """Holds one question and its answer.

    Attributes:
        number: the question's number, from 1.
        prompt: scrambled ids of all that was sent, the earlier turns included.
        repeated_count: how many ids at the beginning of the prompt an earlier exchange has, too.
        changed_version: the log's version when the exchange last changed.
        answer: scrambled ids of the answer so far.
        first_time: when the first ids of the answer came, in seconds of the log's clock; 0 before.
        last_time: when the newest ids of the answer came; 0 before.
    """

    number: int
    prompt: list[int]
    repeated_count: int
    changed_version: int
    answer: list[int] = field(default_factory=list)
    first_time: float = 0.0
    last_time: float = 0.0

    @property
    def question(self) -> list[int]:
        """Returns the prompt's ids after the repeated ones."""
        return self.prompt[self.repeated_count :]

    @property
    def speed(self) -> float:
        """Returns the tokens a second from the first to the newest ids of the answer; 0 if these came at once."""
        duration = self.last_time - self.first_time
        return (len(self.answer) - 1) / duration if duration > 0 else 0.0


class ExchangeLog:
    """Keeps the newest exchanges of one proxy, in one event loop.

    Attributes:
        version: grows with every change.
        exchanges: the exchanges that are kept, the oldest first.
        total_count: the number of all exchanges, also of those that were dropped.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.version, self.total_count, self.exchanges = 0, 0, deque[Exchange]()
        self._clock, self._change_event = clock, asyncio.Event()

    def begin_exchange(self, ids: Ids) -> ReceiveIds:
        """Adds an exchange with the ids of a prompt, and returns the receiver of its answer's ids."""
        prompt = [int(token) for token in ids]
        self.total_count += 1
        exchange = Exchange(self.total_count, prompt, self._repeated_count(prompt), self.version)
        self.exchanges.append(exchange)
        self._drop_oldest()
        self.touch(exchange)

        def receive(ids: Ids) -> None:
            now = self._clock()
            exchange.first_time, exchange.last_time = exchange.first_time or now, now
            exchange.answer += [int(token) for token in ids]
            self.touch(exchange)

        return receive

    def touch(self, exchange: Exchange | None = None) -> None:
        """Marks one exchange, or all of them, as changed."""
        self.version += 1
        for touched in self.exchanges if exchange is None else (exchange,):
            touched.changed_version = self.version
        self._change_event.set()
        self._change_event = asyncio.Event()

    async def wait_for_change(self, version: int, seconds: float) -> None:
        """Returns once the version differs from `version`, or after `seconds`."""
        if self.version == version:
            try:
                await asyncio.wait_for(self._change_event.wait(), seconds)
            except TimeoutError:
                return

    def kept_id_lists(self) -> list[list[int]]:
        """Returns the scrambled ids of the questions and answers that are kept, without repeated ids."""
        return [part for exchange in self.exchanges for part in (exchange.question, exchange.answer) if part]

    def _repeated_count(self, prompt: list[int]) -> int:
        """Returns how many ids at its beginning a prompt shares with an exchange whose whole prompt it repeats."""
        newest = list(self.exchanges)[-MAX_EXCHANGES_COMPARED:]
        counts = [(common_prefix_length(prompt, [*exchange.prompt, *exchange.answer]), exchange) for exchange in newest]
        return max((count for count, exchange in counts if count >= len(exchange.prompt)), default=0)

    def _drop_oldest(self) -> None:
        """Drops the oldest exchanges above the limits. The newest one is always kept."""
        id_count = sum(len(exchange.prompt) + len(exchange.answer) for exchange in self.exchanges)
        while len(self.exchanges) > MAX_EXCHANGES_KEPT or (id_count > MAX_TOKENS_KEPT and len(self.exchanges) > 1):
            oldest = self.exchanges.popleft()
            id_count -= len(oldest.prompt) + len(oldest.answer)
