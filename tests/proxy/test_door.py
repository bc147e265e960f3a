"""The proxy's front: bodies that grow, readers that do not read, and a count that cannot be written."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from milkglass.client.key import usage
from milkglass.client.key.file import UnlockedKey, write_key
from milkglass.engines.upstream import Upstream
from milkglass.engines.vllm import VLLM
from milkglass.proxy import guard as door
from milkglass.proxy import observe
from milkglass.proxy.app import create_app
from milkglass.proxy.backend import Backends, connect_backend
from milkglass.proxy.observe import UsageCount
from milkglass.server.settings import Limits
from tests.engines.kit import HEAD, Wire, event
from tests.proxy.kit import Scrambled, behind_our_server, listing
from tests.proxy.test_hostile import asked, writing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Scrambled:
    return Scrambled.of(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/nothing"])
def test_a_body_without_a_length_is_counted_as_it_comes(
    model: Scrambled, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(door, "MAX_BODY_BYTES", 100_000)
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'{"model": "'
        for _ in range(1000):
            sent += 1000
            yield b"x" * 1000
        yield b'"}'

    async def work(client: httpx2.AsyncClient, server: Wire) -> httpx2.Response:
        answer = await client.post(path, content=body(), headers={"Content-Type": "application/json"})
        assert len(server.calls) == 1  # of the list of models alone
        return answer

    answer = asked(model, writing(model, "never"), work)
    if path == "/v1/nothing":
        assert answer.status_code == 404  # and nothing of it was read
        return
    assert answer.status_code == 413 and "is larger than 100000 bytes" in answer.json()["error"]["message"]
    assert sent < 110_000


def test_the_bodies_of_all_requests_have_one_bound(model: Scrambled, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room is told to wait, and is answered when it is sent again."""
    monkeypatch.setattr(door, "MAX_HELD_BYTES", 100_000)
    go = asyncio.Event()
    arrived: set[int] = set()

    async def body(number: int) -> AsyncIterator[bytes]:
        yield b'{"model": "' + b"x" * 60_000
        arrived.add(number)
        await go.wait()
        yield b'"}'

    async def work(client: httpx2.AsyncClient, server: Wire) -> list[httpx2.Response]:
        headers = {"Content-Type": "application/json"}
        calls = [
            asyncio.create_task(client.post("/v1/chat/completions", content=body(number), headers=headers))
            for number in range(6)
        ]
        while len(arrived) < 6:
            await asyncio.sleep(0.01)
        go.set()
        answers = await asyncio.gather(*calls)
        return [*answers, await client.post("/v1/chat/completions", content=body(7), headers=headers)]

    *at_once, alone = asked(model, writing(model, "never"), work)
    refused = [one for one in at_once if one.status_code == 503]
    assert len(refused) == 5 and [one.status_code for one in at_once if one not in refused] == [400]
    for one in refused:
        assert one.headers["retry-after"] and "memory" in one.json()["error"]["message"]
    assert alone.status_code == 400, "it has room, and no messages"


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{",
    ],
    ids=["head", "body"],
)
def test_half_a_request_is_cut(model: Scrambled, tmp_path: Path, sent: bytes) -> None:
    limits = Limits(head_seconds=0.5, window_seconds=0.5, tick_seconds=0.1)
    with (
        behind_our_server(model, tmp_path / "home", limits=limits) as endpoint,
        socket.create_connection(("127.0.0.1", int(endpoint.url.rpartition(":")[2])), 60) as one,
    ):
        one.sendall(sent)
        assert one.recv(1) == b""


def test_an_answer_that_no_one_reads_ends_at_the_engine(model: Scrambled, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ASGI server waits in `send` while its client takes nothing."""
    monkeypatch.setattr(door, "MAX_UNREAD_SECONDS", 0.2)
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": true, "max_tokens": 60}'
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
    }  # fmt: skip

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ids = model.codec.sigma[model.codec.tokenizer("one two three", add_special_tokens=False)["input_ids"]].tolist()
        writer.write(HEAD + b"".join(event([one]) for one in ids))
        await reader.read()  # until it is closed

    async def run() -> None:
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])
        parts = 0

        async def receive() -> dict[str, Any]:
            for one in messages:
                return one
            return await asyncio.Future()

        async def send(message: dict[str, Any]) -> None:
            nonlocal parts
            parts += message["type"] == "http.response.body"
            if parts > 1:
                await asyncio.Future()

        async with listing(endless) as server:
            upstream = Upstream(VLLM(), server.url)
            backend, _ = await connect_backend(model.codec, upstream)
            await asyncio.wait_for(create_app(Backends([backend]))(scope, receive, send), 60)  # type: ignore[arg-type]
            while upstream._calls._running_by_request:  # the engine's connection is free again
                await asyncio.sleep(0.01)
            await upstream.close()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_count_that_cannot_be_written_is_kept_told_once_and_written_later(
    tmp_path: Path, model: Scrambled, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_key(tmp_path / "k.mgkey", model.key, "a passphrase", scrypt_n=2, allows_weak=True)
    reported: list[str] = []
    counter = UsageCount(UnlockedKey.open(tmp_path / "k.mgkey", "a passphrase"), reported.append)
    real, tries = UnlockedKey.count, 0

    def full(*given: Any) -> None:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))
        real(*given)

    monkeypatch.setattr(UnlockedKey, "count", full)
    monkeypatch.setattr(observe, "WRITE_SECONDS", 0.01)

    async def run() -> None:
        async with counter.running():
            counter.begin_exchange([1, 2, 3])([4])
            while tries < 2:
                await asyncio.sleep(0.01)
            counter.begin_exchange([5, 6])
            while counter.token_count:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 60))
    written = usage.read(tmp_path / "k.mgkey")
    assert (written.texts, written.tokens) == (2, 6)
    (warning,) = reported
    assert "cannot be counted under this key (no space left on device)" in warning and str(tmp_path) not in warning


def test_what_stays_uncounted_is_said_at_the_end(
    tmp_path: Path, model: Scrambled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UnlockedKey, "count", full)
    reported: list[str] = []
    write_key(tmp_path / "k.mgkey", model.key, "a passphrase", scrypt_n=2, allows_weak=True)
    counter = UsageCount(UnlockedKey.open(tmp_path / "k.mgkey", "a passphrase"), reported.append)

    async def run() -> None:
        async with counter.running():
            counter.begin_exchange([1, 2, 3])([4])

    asyncio.run(run())
    assert "4 tokens in 1 texts stay uncounted" in reported[-1]
