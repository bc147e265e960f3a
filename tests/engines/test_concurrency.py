"""Who waits for whom, where an engine has fewer connections than are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

import pytest

from milkglass.engines.concurrency import REQUEST, CallLimit, StepTimeout
from milkglass.engines.upstream import Timeouts
from milkglass.errors import EngineBusy
from tests.engines.kit import ASKED, HEAD, event, sending, wire

SHORT = 0.05  # seconds


def of_a_request(work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
    context = copy_context()
    context.run(REQUEST.set, object())
    return asyncio.get_running_loop().create_task(work(), context=context)


def test_a_free_connection_is_waited_for_longer_than_a_connection_takes() -> None:
    """The tries to connect and their deadline are another thing: nothing is tried while it waits."""
    release = asyncio.Event()

    async def held(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + event([9]))
        await release.wait()
        writer.write(event([8], "length"))
        writer.close()

    async def run() -> None:
        async with wire(held) as server:
            upstream = server.upstream(timeouts=Timeouts(connect=SHORT, attempts=1, connections=1))
            first = upstream.generate("tiny", ASKED)
            assert (await anext(first)).ids == [9]
            second = asyncio.ensure_future(anext(upstream.generate("tiny", ASKED)))
            done, _ = await asyncio.wait({second}, timeout=10 * SHORT)
            assert not done and len(server.calls) == 1
            release.set()
            assert [one.ids async for one in first] == [[8]]
            assert (await second).ids == [9]
            await upstream.close()

    asyncio.run(run())


def test_the_answers_of_one_request_wait_for_each_other_and_do_not_fail() -> None:
    """Eight answers over two connections, each of which takes longer than a call waits for its turn."""

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3 * SHORT)
        await sending(HEAD, event([9], "length"))(reader, writer)

    async def run() -> None:
        async with wire(slow) as server:
            limit = CallLimit(2, SHORT)
            upstream = server.upstream(timeouts=Timeouts(connections=2))
            upstream._calls = limit

            async def one() -> list[int]:
                return [token async for chunk in upstream.generate("tiny", ASKED) for token in chunk.ids]

            async def many() -> list[list[int]]:
                return await asyncio.gather(*(one() for _ in range(8)))

            asked = of_a_request(many)
            while len(server.calls) < 2:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineBusy):  # of another request
                await of_a_request(one)
            assert await asked == [[9]] * 8
            await upstream.close()

    asyncio.run(run())


def test_who_goes_away_gives_the_turn_back() -> None:
    async def run() -> None:
        limit = CallLimit(1, 60.0)
        for after in (0, 1, 2, 3):  # steps of the event loop, around the moment in which the turn is handed on
            entered, leave = asyncio.Event(), asyncio.Event()

            async def hold() -> None:
                async with limit.call():
                    entered.set()  # noqa: B023
                    await leave.wait()  # noqa: B023

            async def pass_by() -> None:
                async with limit.call():
                    pass

            holder = asyncio.ensure_future(hold())
            await entered.wait()
            waiter = asyncio.ensure_future(pass_by())
            await asyncio.sleep(0)
            leave.set()
            for _ in range(after):
                await asyncio.sleep(0)
            waiter.cancel()
            await asyncio.gather(holder, waiter, return_exceptions=True)
            await asyncio.wait_for(pass_by(), 30)  # none was lost
        assert not limit._running_by_request

    asyncio.run(run())


# --- the time of a step -----------------------------------------------------------------------------------------------
def run_with(seconds: float, work: Callable[[StepTimeout], Coroutine[Any, Any, None]]) -> None:
    """Runs `work` with a timeout, in an event loop of its own."""

    async def run() -> None:
        timeout = StepTimeout(seconds)
        try:
            await work(timeout)
        finally:
            timeout.close()

    asyncio.run(run())


def test_a_step_that_is_over_time_ends_and_short_ones_do_not() -> None:
    """Together the short steps take longer than the limit of one."""

    async def work(timeout: StepTimeout) -> None:
        for _ in range(12):
            with timeout:
                await asyncio.sleep(0.2)
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError), timeout:
            await asyncio.sleep(60)
        with timeout:  # the next step has its own time
            await asyncio.sleep(0.01)
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    run_with(2.0, work)


def test_time_between_steps_does_not_count() -> None:
    async def work(timeout: StepTimeout) -> None:
        with timeout:
            await asyncio.sleep(0)
        await asyncio.sleep(1.5)
        with timeout:
            await asyncio.sleep(0)

    run_with(1.0, work)


def test_a_lowered_limit_holds_from_the_next_step() -> None:
    async def work(timeout: StepTimeout) -> None:
        with timeout:
            await asyncio.sleep(0)
        timeout.seconds = 0.1
        with pytest.raises(TimeoutError), timeout:
            await asyncio.sleep(60)

    run_with(60.0, work)


def test_a_step_that_is_cancelled_from_outside_stays_cancelled() -> None:
    async def work(timeout: StepTimeout) -> None:
        async def step() -> None:
            with timeout:
                await asyncio.sleep(60)

        task = asyncio.create_task(step())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_with(60.0, work)


def test_an_error_of_a_step_is_raised_as_it_is() -> None:
    async def work(timeout: StepTimeout) -> None:
        with pytest.raises(ValueError, match="broken"), timeout:
            raise ValueError("broken")

    run_with(60.0, work)
