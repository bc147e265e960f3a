"""Request bodies in memory: who makes room for whom, and when a body's time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from milkglass.errors import Busy, MilkglassError, TooSlow
from milkglass.server.http import guard
from milkglass.server.http.errors import RefusedRequest
from milkglass.server.http.guard import BodyMemory, BodyRule, CountedBody
from milkglass.server.settings import Limits


class Scene:
    """Bodies that share one memory, and a clock that the test moves."""

    def __init__(self, limit: int, **limits: Any) -> None:
        self.now, self.memory, self.limits = 0.0, BodyMemory(limit), Limits(**limits)

    def body(self, claimed: int = 0) -> tuple[CountedBody, asyncio.Queue[Message]]:
        queue: asyncio.Queue[Message] = asyncio.Queue()
        return CountedBody(queue.get, BodyRule(1 << 20), self.memory, self.limits, claimed), queue

    async def arrives(self, one: tuple[CountedBody, asyncio.Queue[Message]], size: int, whole: bool = False) -> None:
        one[1].put_nowait({"type": "http.request", "body": bytes(size), "more_body": not whole})
        await one[0]()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    def make(limit: int = 1000, **limits: Any) -> Scene:
        made = Scene(limit, **limits)
        monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: made.now))
        return made

    return make


async def refusal(body: CountedBody) -> MilkglassError:
    with pytest.raises(RefusedRequest) as caught:
        await asyncio.wait_for(body(), 30)
    return caught.value.error


def test_the_slowest_makes_room_and_is_told_so(scene: Callable[..., Scene]) -> None:
    async def play() -> None:
        it = scene()
        slow, fast, whole = it.body(), it.body(), it.body()
        for one in (slow, fast):
            await it.arrives(one, 450)
        waiting = [asyncio.create_task(refusal(slow[0])), asyncio.create_task(fast[0]())]
        it.now = 10.0
        fast[1].put_nowait({"type": "http.request", "body": bytes(50), "more_body": True})
        await waiting[1]
        await it.arrives(whole, 400, whole=True)
        assert isinstance(await waiting[0], Busy)
        assert (slow[0].held_bytes, fast[0].held_bytes, whole[0].held_bytes, it.memory.used_bytes) == (0, 500, 400, 900)
        whole[0].release()
        slow[0].release()  # as the guard does: nothing is given back twice
        assert it.memory.used_bytes == 500

    asyncio.run(play())


def test_one_evicted_between_two_of_its_pieces_is_refused_at_the_next(scene: Callable[..., Scene]) -> None:
    async def play() -> None:
        it = scene()
        slow, whole = it.body(), it.body()
        await it.arrives(slow, 900)
        await it.arrives(whole, 900, whole=True)
        slow[1].put_nowait({"type": "http.request", "body": bytes(50), "more_body": True})
        assert isinstance(await refusal(slow[0]), Busy)
        assert it.memory.used_bytes == 900

    asyncio.run(play())


def test_a_long_body_gets_past_those_that_sent_much_at_once_and_drip(scene: Callable[..., Scene]) -> None:
    """They have more bytes and a better rate since their start than it; of late they are slower."""

    async def play() -> None:
        it = scene(400_000)
        drips, honest = [it.body() for _ in range(4)], it.body()
        for one in drips:
            await it.arrives(one, 90_000)
        for second in range(1, 31):
            it.now = float(second)
            for one in drips:
                await it.arrives(one, 100)
        for piece in range(9):
            await it.arrives(honest, 10_000, whole=piece == 8)
            it.now += 4.0
        assert honest[0].held_bytes == 90_000
        assert sorted(one[0].held_bytes for one in drips)[:2] == [0, 93_000]

    asyncio.run(play())


def test_a_drip_pushes_nobody_out(scene: Callable[..., Scene]) -> None:
    async def play() -> None:
        it = scene()
        drip, honest = it.body(), it.body()
        await it.arrives(drip, 500)
        it.now = 20.0
        await it.arrives(honest, 490)
        drip[1].put_nowait({"type": "http.request", "body": bytes(20), "more_body": True})
        assert isinstance(await refusal(drip[0]), Busy)
        await it.arrives(honest, 1)
        assert honest[0].held_bytes == 491

    asyncio.run(play())


def test_whole_bodies_stay_and_nobody_is_evicted_in_vain(scene: Callable[..., Scene]) -> None:
    async def play() -> None:
        it = scene()
        whole, slow, third = it.body(), it.body(), it.body()
        await it.arrives(whole, 800, whole=True)
        await it.arrives(slow, 100)
        third[1].put_nowait({"type": "http.request", "body": bytes(300), "more_body": False})
        assert isinstance(await refusal(third[0]), Busy)
        assert (whole[0].held_bytes, slow[0].held_bytes, it.memory.used_bytes) == (800, 100, 900)
        await it.arrives(slow, 10, whole=True)

    asyncio.run(play())


@pytest.mark.parametrize(("claimed", "sent"), [(500, 1), (0, 500)], ids=["stated", "chunked"])
def test_a_longer_body_may_take_longer(scene: Callable[..., Scene], claimed: int, sent: int) -> None:
    async def play() -> None:
        it = scene(body_grace_seconds=10.0, expected_body_rate=100.0)
        one = it.body(claimed)
        await it.arrives(one, sent)
        it.now = 14.0
        await it.arrives(one, 1)
        it.now = 15.5
        assert isinstance(await refusal(one[0]), TooSlow)

    asyncio.run(play())


def test_a_whole_body_has_no_deadline(scene: Callable[..., Scene]) -> None:
    """The application waits for the end of the connection meanwhile."""

    async def play() -> None:
        it = scene(body_grace_seconds=0.5)
        one = it.body()
        await it.arrives(one, 10, whole=True)
        it.now = 1000.0
        one[1].put_nowait({"type": "http.disconnect"})
        assert (await one[0]())["type"] == "http.disconnect"

    asyncio.run(play())
