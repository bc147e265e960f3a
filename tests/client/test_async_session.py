"""The session for asyncio: the verbs of `Session`, at once and cancelled, before a real server on loopback."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milkglass import AsyncSession, Session
from milkglass.client import async_session, results
from milkglass.client.key import usage
from milkglass.client.key.file import write_key
from milkglass.client.remote.remote import Sampling
from milkglass.errors import MilkglassError, UnsupportedModel, UsageError
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny
from tests.client.stub import TOKEN as STUB_TOKEN
from tests.client.stub import Handler, Stub, running
from tests.e2e.proxy import Tap
from tests.proxy.kit import Scrambled
from tests.server.kit import TOKEN, register, until
from tests.server.real import Server
from tests.warm import warm_jobs

__all__ = ["warm_jobs"]

PASSPHRASE = "a passphrase"
PAIRS = (
    (Session, AsyncSession),
    *((getattr(results, name), getattr(async_session, f"Async{name}")) for name in ("Answer", "Job", "Conversation")),
)
AT_ONCE = {"follow", "say", "clear", "__aiter__"}  # iterated, or without a request


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server, Tap, Scrambled]]:
    root = tmp_path_factory.mktemp("async")
    model = Scrambled.of(root)
    write_key(root / "k.mgkey", model.key, PASSPHRASE, allows_weak=True, scrypt_n=2)
    with Server(root / "home", in_thread=True) as server, server.client() as client:
        register(client, "scrambled", model.folder)  # type: ignore[arg-type]
        with Tap(server.url) as tap:
            yield root / "k.mgkey", server, tap, model


def verbs(kind: type) -> set[str]:
    return {name for name, one in inspect.getmembers(kind) if not name.startswith("_") and callable(one)}


@pytest.mark.parametrize(("plain", "awaited"), PAIRS, ids=lambda one: one.__name__)
def test_every_verb_is_there_with_the_same_signature(plain: type, awaited: type) -> None:
    assert verbs(awaited) == verbs(plain)
    for name in verbs(plain):
        if name != "open":  # whose options are those of Session.open
            one, other = inspect.signature(getattr(plain, name)), inspect.signature(getattr(awaited, name))
            assert list(one.parameters.values()) == list(other.parameters.values()), name
        assert inspect.iscoroutinefunction(getattr(awaited, name)) == (name not in AT_ONCE), name


def test_answers_are_those_of_the_session(served: tuple[Path, Server, Tap, Scrambled]) -> None:
    key, server, tap, _ = served
    asked = Sampling(max_tokens=12)
    with Session.open(key, PASSPHRASE, server.url, TOKEN) as plain:
        expected = {text: plain.generate("scrambled", text, asked).whole() for text in tiny.TEXTS}
        turns = plain.chat("scrambled", sampling=asked)
        spoken = "".join(turns.say(tiny.TEXTS[0]))
    before = usage.read(key)

    async def run() -> None:
        async with await AsyncSession.open(key, PASSPHRASE, tap.url, TOKEN) as session:
            answers = await asyncio.gather(*(session.generate("scrambled", text, asked) for text in tiny.TEXTS * 3))
            texts = await asyncio.gather(*(one.whole() for one in answers))
            assert texts == [expected[text] for text in tiny.TEXTS * 3]
            assert all(0 < one.token_count <= 12 and one.prompt_tokens for one in answers)
            pieces = [piece async for piece in await session.generate("scrambled", tiny.TEXTS[0], asked)]
            assert len(pieces) > 2 and "".join(pieces) == expected[tiny.TEXTS[0]]
            conversation = await session.chat("scrambled", sampling=asked)
            assert "".join([piece async for piece in conversation.say(tiny.TEXTS[0])]) == spoken
            assert conversation.turns == turns.turns
            ids = await session.encode_prompt(tiny.TEXTS[1], chat=False)
            assert session.codec.decode(ids) == tiny.TEXTS[1]
            with pytest.raises(MilkglassError, match="404: there is no such model: other"):
                await session.describe("other")
        with pytest.raises(UsageError, match="the session is closed"):
            await session.describe("scrambled")

    asyncio.run(run())
    assert usage.read(key).texts == before.texts + 3 * len(tiny.TEXTS) + 2
    assert tiny.TEXTS[0].encode() not in bytes(tap.heard)


def test_a_cancelled_answer_ends_its_request(served: tuple[Path, Server, Tap, Scrambled]) -> None:
    """The others go on, and the session can be asked again."""
    key, server, _, _ = served
    long = Sampling(max_tokens=70, temperature=1.0, seed=5, stop_token_ids=(0,))

    async def read(session: AsyncSession, begun: asyncio.Event) -> None:
        async for _ in await session.generate("scrambled", tiny.TEXTS[0], long):
            begun.set()

    async def run() -> None:
        async with await AsyncSession.open(key, PASSPHRASE, server.url, TOKEN) as session:
            await (await session.generate("scrambled", tiny.TEXTS[0], Sampling(max_tokens=1))).whole()
            (entry,) = server.app.state.context.model_cache._entries.values()
            engine = entry.engine.result()
            server.slow_down(engine)
            begun = [asyncio.Event() for _ in range(3)]
            tasks = [asyncio.create_task(read(session, one)) for one in begun]
            for task, one in zip(tasks, begun, strict=True):
                await asyncio.wait_for(one.wait(), 120)
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in found), found
            await asyncio.to_thread(until, lambda: not server.app_tasks() and not engine.is_active())
            assert server.steps < 70, "an answer ran to its end"
            left = await session.generate("scrambled", tiny.TEXTS[0], long)
            async for _ in left:
                break
            await left.close()
            await asyncio.to_thread(until, lambda: not server.app_tasks())
            assert left.token_count < 70
            assert (await session.describe("scrambled"))["id"] == "scrambled"

    asyncio.run(run())


@pytest.fixture
def stub() -> Iterator[Stub]:
    with running() as server:
        yield server


def test_what_waits_is_cut_and_not_asked_again(served: tuple[Path, Server, Tap, Scrambled], stub: Stub) -> None:
    """A server that does not answer: the connection is closed, and a call that could be repeated is not."""
    key, _, _, model = served
    asked, cut = threading.Event(), threading.Event()

    def silent(handler: Handler) -> None:
        asked.set()
        if handler.connection.recv(1) == b"":
            cut.set()
        handler.close_connection = True

    stub.described = {"kind": "encoder", "vocab_size": tiny.VOCAB, "key_id": model.key.identifier}
    stub.replies["POST /classify"] = silent

    async def run() -> None:
        async with await AsyncSession.open(key, PASSPHRASE, stub.url, STUB_TOKEN) as session:
            task = asyncio.create_task(session.classify("m", ["is it open"]))
            await asyncio.to_thread(asked.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(cut.wait, 60)
            with pytest.raises(UnsupportedModel, match="is an encoder"):
                await session.chat("m")
            asked.clear()
            task = asyncio.create_task(session.classify("m", ["is it open"]))
            await asyncio.to_thread(asked.wait, 60)
            await session.close()  # ends what is under way
            with pytest.raises(MilkglassError, match="given up"):
                await task

    asyncio.run(run())
    assert stub.count("POST /classify") == 2


def test_a_fine_tune_is_awaited(tmp_path: Path) -> None:
    model = Scrambled.of(tmp_path, "bert", template="", scheme=ObfusLM(4, 0.1, 0.9))
    key = tmp_path / "k.mgkey"
    write_key(key, model.key, PASSPHRASE, allows_weak=True, scrypt_n=2)
    rows = [{"text": text, "label": label} for text, label in zip(tiny.TEXTS[:2], ("care", "time"), strict=True)] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    worker = (sys.executable, "-m", "milkglass.server.training")

    async def run(url: str) -> None:
        async with await AsyncSession.open(key, PASSPHRASE, url, TOKEN) as session:
            asked: dict[str, Any] = {"n_epochs": 1, "batch_size": 4}
            jobs = await asyncio.gather(*(session.finetune("m", tmp_path / "rows.jsonl", **asked) for _ in range(2)))
            names = [await job.wait() for job in jobs]
            assert len(set(names)) == 2
            events = [event async for event in jobs[0].follow()]
            assert any(event["data"].get("step") for event in events)
            found = await asyncio.gather(*(session.classify(name, tiny.TEXTS[:2]) for name in names))
            assert all({*one.probabilities} == {"care", "time"} for part in found for one in part)

    with Server(tmp_path / "home", in_thread=True, worker=worker, training_threads=1) as server:
        with server.client() as client:
            register(client, "m", model.folder)  # type: ignore[arg-type]
        asyncio.run(run(server.url))
