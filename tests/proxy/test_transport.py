"""OpenAI's client without a proxy process: the same answers, streamed as they come, counted under the key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

import milkglass
from milkglass.client.key import usage
from milkglass.client.key.file import read_key, write_key
from tests import tiny
from tests.e2e.proxy import Tap
from tests.proxy.kit import Scrambled
from tests.server.kit import TOKEN, register
from tests.server.real import Server

QUESTION = [{"role": "user", "content": tiny.TEXTS[0]}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Tap]]:
    """The key's file, and a tap before the engine."""
    root = tmp_path_factory.mktemp("transport")
    model = Scrambled.of(root)
    write_key(root / "k.mgkey", model.key, "a passphrase", weak=True)
    with Server(root / "home", in_thread=True) as server, server.client() as client:
        register(client, "scrambled", model.folder)  # type: ignore[arg-type]
        with Tap(server.url) as tap:
            yield root / "k.mgkey", tap


def test_the_official_client_in_one_process(served: tuple[Path, Tap]) -> None:
    key, tap = served
    before = usage.read(key).tokens
    with openai.OpenAI(
        http_client=milkglass.transport(key, "a passphrase", tap.url, TOKEN), api_key="any", max_retries=0
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
    write_key(tmp_path / "worker.mgkey", read_key(key, "a passphrase").codec_alone(), "another", weak=True, scrypt_n=2)
    asked = {"model": "scrambled", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    texts = []
    for file, passphrase in ((key, "a passphrase"), (tmp_path / "worker.mgkey", "another")):
        http = milkglass.transport(file, passphrase, tap.url, TOKEN)
        with openai.OpenAI(http_client=http, api_key="any", max_retries=0) as client:
            texts.append(client.chat.completions.create(**asked).choices[0].message.content)
    assert texts[0] == texts[1] != ""


def test_the_asynchronous_client(served: tuple[Path, Tap]) -> None:
    key, tap = served

    async def run() -> list[str]:
        http = milkglass.async_transport(key, "a passphrase", tap.url, TOKEN)
        async with openai.AsyncOpenAI(http_client=http, api_key="any", max_retries=0) as client:
            asked = {"model": "scrambled", "prompt": tiny.TEXTS[1], "max_tokens": 6, "temperature": 0}
            answers = await asyncio.gather(*(client.completions.create(**asked) for _ in range(4)))
            stream = await client.completions.create(**asked, stream=True)
            return [*{one.choices[0].text for one in answers}, "".join([c.choices[0].text async for c in stream])]

    found = asyncio.run(run())
    assert len(found) == 2 and found[0] == found[1]


def test_an_engine_that_is_not_there_is_an_error_of_ours(served: tuple[Path, Tap]) -> None:
    key, _ = served
    http = milkglass.transport(key, "a passphrase", "http://127.0.0.1:9")
    with (
        openai.OpenAI(http_client=http, api_key="any", max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match="does not answer"),
    ):
        client.models.list()
