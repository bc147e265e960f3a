"""Several keys behind one proxy: each model is asked with its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from milkglass.client.key.file import write_key
from milkglass.engines.milkglass import MilkglassServer
from milkglass.engines.upstream import Upstream
from milkglass.engines.vllm import VLLM
from milkglass.errors import KeyForOtherModel, ModelNotFound, RemoteError, UsageError
from milkglass.proxy.backends import Backends, all_connected
from milkglass.proxy.observe import Quiet
from tests import tiny
from tests.cli.kit import PASSPHRASE, call, refused
from tests.engines.kit import HEAD, event, sending
from tests.proxy.kit import Scrambled, listing
from tests.server.kit import TOKEN, register
from tests.server.real import Server


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scrambled, Scrambled]:
    root = tmp_path_factory.mktemp("two")
    return Scrambled.of(root / "one"), Scrambled.of(root / "two", "llama-tied")


def opened(url: str, models: tuple[Scrambled, ...], requested: tuple[str, ...] = ()) -> tuple[Backends, list[str]]:
    async def run() -> tuple[Backends, list[str]]:
        upstream = Upstream(MilkglassServer(), url, TOKEN)
        try:
            backends, _ = await all_connected(upstream, [(one.codec, Quiet()) for one in models], requested)
            texts = []
            for name in [one.name for one in backends.models]:
                backend = backends.of(name)
                question = backend.completion(name, tiny.TEXTS[0], most=6, temperature=0)
                pieces = [piece.text async for piece in backend.replies(question)[0].pieces()]
                texts.append("".join(pieces))
            await backends.close()
            return backends, texts
        finally:
            await upstream.close()

    return asyncio.run(run())


def test_each_model_is_asked_with_its_own_key(two: tuple[Scrambled, Scrambled], tmp_path: Path) -> None:
    one, other = two
    with Server(tmp_path, in_thread=True) as server, server.client() as client:
        register(client, "first", one.folder)  # type: ignore[arg-type]
        register(client, "second", other.folder)  # type: ignore[arg-type]
        backends, texts = opened(server.url, two)
        names = [model.name for model in backends.models]
        assert sorted(names) == ["first", "second"] and backends.of("second").codec is other.codec
        for name, model in (("first", one), ("second", other)):
            alone, (text,) = opened(server.url, (model,), (name,))
            assert text == texts[names.index(name)] and alone.of("").codec is model.codec
        with pytest.raises(ModelNotFound, match="no such model here"):
            backends.of("third")
        with pytest.raises(ModelNotFound, match="no model third of these keys"):
            opened(server.url, two, ("first", "third"))
    with (
        Server(tmp_path / "empty", in_thread=True) as server,
        pytest.raises(KeyForOtherModel, match="with one of these keys"),
    ):
        opened(server.url, two)


def test_an_engine_that_does_not_say_whose_model_it_is_wants_one_key(two: tuple[Scrambled, Scrambled]) -> None:
    async def run() -> None:
        async with listing(sending(HEAD, event([5], "stop"))) as server:
            upstream = Upstream(VLLM(), server.url)
            try:
                await all_connected(upstream, [(one.codec, Quiet()) for one in two])
            finally:
                await upstream.close()

    with pytest.raises(UsageError, match="with which key tiny was scrambled, and there are 2"):
        asyncio.run(run())


def test_a_folder_of_keys_is_opened_by_one_passphrase(two: tuple[Scrambled, Scrambled], tmp_path: Path) -> None:
    run = ("proxy", "--key", tmp_path, "--server", "http://127.0.0.1:9")
    refused(call(*run), 2, "holds no key file")
    for number, one in enumerate(two):
        write_key(tmp_path / f"{number}.mgkey", one.key, PASSPHRASE, scrypt_n=2)
    refused(call(*run, "--model", "x"), 2, "a folder has several")
    refused(call(*run, passphrase="another long passphrase"), 4, "the passphrase is wrong")
    result = call(*run, "--port", 0)
    assert "does not answer" in result.stderr and result.exit_code == RemoteError.exit_code
