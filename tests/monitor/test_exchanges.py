"""What is kept of what crossed: versions, repetitions, and an end to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from milkglass.monitor import exchanges
from milkglass.monitor.exchanges import ExchangeLog


@pytest.fixture
def log() -> Iterator[ExchangeLog]:
    ticks = iter(range(1, 10_000))
    yield ExchangeLog(lambda: float(next(ticks)))


def test_an_answer_belongs_to_its_question(log: ExchangeLog) -> None:
    first, second = log.begin_exchange([1, 2, 3]), log.begin_exchange([7, 8])
    second([9])
    first([4, 5])
    second([9, 9])
    one, other = log.exchanges
    assert (one.question, one.answer, other.question, other.answer) == ([1, 2, 3], [4, 5], [7, 8], [9, 9, 9])
    assert other.speed == 2 / (other.last_time - other.first_time) and one.speed == 0.0
    assert one.changed_version < other.changed_version == log.version


def test_what_a_conversation_repeats_is_counted_and_not_kept_twice(log: ExchangeLog) -> None:
    log.begin_exchange([1, 2, 3])([4, 5])
    log.begin_exchange([50, 2, 3])
    log.begin_exchange([1, 2, 3, 4, 5, 6, 7])
    again = log.exchanges[-1]
    assert (again.repeated_count, again.question) == (5, [6, 7])
    assert log.kept_id_lists() == [[1, 2, 3], [4, 5], [50, 2, 3], [6, 7]]
    log.begin_exchange([1, 2, 3])
    assert log.exchanges[-1].question == [] and log.total_count == 4


def test_the_oldest_go_first(log: ExchangeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(exchanges.MAX_EXCHANGES_KEPT + 5):
        log.begin_exchange([number, number])
    assert len(log.exchanges) == exchanges.MAX_EXCHANGES_KEPT and log.exchanges[0].number == 6
    monkeypatch.setattr(exchanges, "MAX_TOKENS_KEPT", 100)
    log.begin_exchange(list(range(1000, 1090)))
    assert [one.number for one in log.exchanges] == [*range(101, 107)]
    log.begin_exchange(list(range(2000, 2500)))
    assert [one.number for one in log.exchanges] == [107]  # the newest stays, however long it is


def test_who_waits_is_called(log: ExchangeLog) -> None:
    async def run() -> int:
        waiting = asyncio.create_task(log.wait_for_change(log.version, 60))
        await asyncio.sleep(0)
        assert not waiting.done()
        log.begin_exchange([1])
        await asyncio.wait_for(waiting, 60)
        await log.wait_for_change(log.version - 1, 60)  # there is something newer already
        await log.wait_for_change(log.version + 5, 60)  # of another run: this one's version is news
        await log.wait_for_change(log.version, 0.01)
        return log.version

    assert asyncio.run(run()) == 1
