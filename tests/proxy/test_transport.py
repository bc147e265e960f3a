"""OpenAI's client without a proxy process: the same answers, streamed as they come, counted under the key."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import openai
import pytest

import milkglass
from milkglass.client.key import usage
from milkglass.client.key.file import read_key, write_key
from tests import tiny
from tests.e2e.proxy import Tap
from tests.engines.kit import HEAD, Script, event, sending
from tests.proxy.kit import Scrambled, listing, written
from tests.server.kit import TOKEN, register
from tests.server.real import Server

QUESTION = [{"role": "user", "content": tiny.TEXTS[0]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Scrambled:
    return Scrambled.of(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model: Scrambled, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Tap]]:
    """The key's file, and a tap before the engine."""
    root = tmp_path_factory.mktemp("transport")
    write_key(root / "k.mgkey", model.key, "a passphrase", allows_weak=True)
    with Server(root / "home", in_thread=True) as server, server.client() as client:
        register(client, "scrambled", model.folder)  # type: ignore[arg-type]
        with Tap(server.url) as tap:
            yield root / "k.mgkey", tap


def test_the_official_client_in_one_process(served: tuple[Path, Tap]) -> None:
    key, tap = served
    before = usage.read(key).tokens
    with openai.OpenAI(
        http_client=milkglass.http_client(key, "a passphrase", tap.url, TOKEN), api_key="any", max_retries=0
    ) as client:
        asked = {"model": "scrambled", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        text = whole.choices[0].message.content
        chunks = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == text and len(chunks) > 4
        with pytest.raises(openai.BadRequestError, match="constrained decoding"):
            client.chat.completions.create(**asked, response_format={"type": "json_object"})
        stream = client.chat.completions.create(**{**asked, "max_tokens": 60}, stream=True)
        next(iter(stream))
        stream.close()  # an answer that is left ends its request
    assert usage.read(key).tokens >= before + 3 * whole.usage.prompt_tokens + 16
    assert tiny.TEXTS[0].encode() not in bytes(tap.heard) and b"api.openai.com" not in bytes(tap.heard)


def test_a_codec_alone_is_enough(served: tuple[Path, Tap], tmp_path: Path) -> None:
    key, tap = served
    write_key(
        tmp_path / "worker.mgkey", read_key(key, "a passphrase").codec_alone(), "another", allows_weak=True, scrypt_n=2
    )
    asked = {"model": "scrambled", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    texts = []
    for file, passphrase in ((key, "a passphrase"), (tmp_path / "worker.mgkey", "another")):
        http = milkglass.http_client(file, passphrase, tap.url, TOKEN)
        with openai.OpenAI(http_client=http, api_key="any", max_retries=0) as client:
            texts.append(client.chat.completions.create(**asked).choices[0].message.content)
    assert texts[0] == texts[1] != ""


def test_the_asynchronous_client(served: tuple[Path, Tap]) -> None:
    key, tap = served

    async def run() -> list[str]:
        http = milkglass.async_http_client(key, "a passphrase", tap.url, TOKEN)
        async with openai.AsyncOpenAI(http_client=http, api_key="any", max_retries=0) as client:
            asked = {"model": "scrambled", "prompt": tiny.TEXTS[1], "max_tokens": 6, "temperature": 0}
            answers = await asyncio.gather(*(client.completions.create(**asked) for _ in range(4)))
            stream = await client.completions.create(**asked, stream=True)
            return [*{one.choices[0].text for one in answers}, "".join([c.choices[0].text async for c in stream])]

    found = asyncio.run(run())
    assert len(found) == 2 and found[0] == found[1]


def test_an_engine_that_is_not_there_is_an_error_of_ours(served: tuple[Path, Tap]) -> None:
    key, _ = served
    http = milkglass.http_client(key, "a passphrase", "http://127.0.0.1:9")
    with (
        openai.OpenAI(http_client=http, api_key="any", max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match="does not answer"),
    ):
        client.models.list()


def test_an_engine_that_was_down_is_asked_again(served: tuple[Path, Tap], tmp_path: Path) -> None:
    key, tap = served
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    http = milkglass.http_client(key, "a passphrase", f"http://127.0.0.1:{port}", TOKEN)
    with openai.OpenAI(http_client=http, base_url=milkglass.NOWHERE, api_key="any", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            client.models.list()
        with Tap(tap.url, port=port):
            assert [one.id for one in client.models.list()] == ["scrambled"]


def answering(script: Script, work: Callable[[str], None]) -> None:
    """Work in a thread before an engine that lists a model and then follows the script."""

    async def run() -> None:
        async with listing(script) as server:
            await asyncio.to_thread(work, server.url)

    asyncio.run(run())


def test_the_clients_own_timeout_holds(served: tuple[Path, Tap]) -> None:
    key, _ = served

    def work(url: str) -> None:
        http = milkglass.http_client(key, "a passphrase", url, engine="vllm")
        with openai.OpenAI(http_client=http, base_url=milkglass.NOWHERE, api_key="any", max_retries=0) as client:
            client.models.list()
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.5).completions.create(model="tiny", prompt="hello", max_tokens=4)

    answering(sending(HEAD, event([5]), close=False), work)


def test_a_fault_of_ours_in_the_middle_of_a_stream_is_not_its_end(
    served: tuple[Path, Tap], model: Scrambled, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = served

    async def broken(*_: object) -> AsyncIterator[str]:
        yield 'data: {"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": []}\n\n'
        raise ValueError("a text")

    monkeypatch.setattr("milkglass.proxy.app._stream", broken)

    def work(url: str) -> None:
        http = milkglass.http_client(key, "a passphrase", url, engine="vllm")
        with (
            openai.OpenAI(http_client=http, base_url=milkglass.NOWHERE, api_key="any", max_retries=0) as client,
            pytest.raises(openai.APIConnectionError),
        ):
            list(client.completions.create(model="tiny", prompt="hello", max_tokens=40, stream=True))

    answering(sending(HEAD, written(model, 20), close=False), work)


def test_calls_over_web_sockets_reach_no_one(served: tuple[Path, Tap]) -> None:
    """They use no HTTP client: with the address that the documentation gives, nothing can be sent."""
    key, tap = served
    before = len(tap.heard)
    http = milkglass.http_client(key, "a passphrase", tap.url, TOKEN)
    with (
        openai.OpenAI(http_client=http, base_url=milkglass.NOWHERE, api_key="any", max_retries=0) as client,
        pytest.raises((OSError, openai.OpenAIError)),
        client.responses.connect() as connection,
    ):
        connection.response.create(model="scrambled", input=tiny.TEXTS[0])
    assert tiny.TEXTS[0].encode() not in bytes(tap.heard[before:])
