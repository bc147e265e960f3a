"""Several keys behind one proxy: each model is asked with its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from milkglass.cli.proxy import parse_serves
from milkglass.client.key.file import UnlockedKey, read_key, write_key
from milkglass.engines.engine import ServedModel
from milkglass.engines.milkglass import MilkglassServer
from milkglass.engines.upstream import Upstream
from milkglass.engines.vllm import VLLM
from milkglass.errors import KeyFileError, KeyForOtherModel, ModelNotFound, RemoteError, Unreachable, UsageError
from milkglass.proxy import backend as backend_module
from milkglass.proxy.backend import Backends, ServedKey, connect_backends
from milkglass.proxy.observe import NoObserver
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


def served(models: tuple[Scrambled, ...], names: tuple[str, ...] = ()) -> list[ServedKey]:
    """Keys of these models, each of which notes one of the names."""
    known = [one.key.info.with_upload(name) for one, name in zip(models, names, strict=False)]
    infos = known + [one.key.info for one in models[len(known) :]]
    pairs = enumerate(zip(models, infos, strict=True))
    return [ServedKey(f"{number}.mgkey", one.codec, info, NoObserver()) for number, (one, info) in pairs]


def opened(
    url: str, models: tuple[Scrambled, ...], requested: tuple[str, ...] = (), noted: tuple[str, ...] = ()
) -> tuple[Backends, list[str]]:
    async def run() -> tuple[Backends, list[str]]:
        upstream = Upstream(MilkglassServer(), url, TOKEN)
        try:
            backends, _ = await connect_backends(upstream, served(models, noted), requested)
            texts = []
            for name in [one.name for one in backends.models]:
                backend = backends.of(name)
                question = backend.completion_request(name, tiny.TEXTS[0], max_tokens=6, temperature=0)
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
        backends, texts = opened(server.url, two, (), ("first", "second"))
        names = [model.name for model in backends.models]
        assert sorted(names) == ["first", "second"] and backends.of("second").codec is other.codec
        for name, model in (("first", one), ("second", other)):
            alone, (text,) = opened(server.url, (model,), (name,))
            assert text == texts[names.index(name)] and alone.of("").codec is model.codec
        with pytest.raises(ModelNotFound, match="no model 'third' here"):
            backends.of("third")
        with pytest.raises(ModelNotFound, match="names no model, and several keys are served"):
            backends.of("")
        for requested in (("first", "third"), ("third",)):
            with pytest.raises(ModelNotFound, match="the engine serves no model third") as caught:
                opened(server.url, two, requested, ("first", "second"))
            assert caught.value.hint == "it serves: first, second"
    with (
        Server(tmp_path / "empty", in_thread=True) as server,
        pytest.raises(KeyForOtherModel, match="serves no model, so nothing was sent"),
    ):
        opened(server.url, two)


def connecting(
    keys: list[ServedKey], requested: tuple[str, ...] = (), **paired: ServedKey
) -> tuple[Backends, list[str]]:
    """To an engine of vLLM's kind, which does not say which key its model `tiny` is of."""

    async def run() -> tuple[Backends, list[str]]:
        async with listing(sending(HEAD, event([5], "stop"))) as server:
            upstream = Upstream(VLLM(), server.url)
            try:
                return await connect_backends(upstream, keys, requested, paired)
            finally:
                await upstream.close()

    return asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_that_does_not_say_what_it_serves_is_given_up(
    two: tuple[Scrambled, Scrambled], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(upstream: Upstream) -> list[ServedModel]:
        await asyncio.sleep(600)
        raise AssertionError

    monkeypatch.setattr(Upstream, "models", silent)
    monkeypatch.setattr(backend_module, "MAX_START_SECONDS", 0.05)
    with pytest.raises(Unreachable, match="did not say which models it serves within 0.05 s"):
        connecting(served(two[:count]))


def test_a_key_that_notes_the_name_serves_it_at_an_engine_that_names_no_key(two: tuple[Scrambled, Scrambled]) -> None:
    for names, owner in ((("tiny",), 0), (("other", "tiny"), 1)):
        backends, _ = connecting(served(two, names))
        assert backends.of("tiny").codec is two[owner].codec
    unsure = served(two, ("tiny", "tiny"))
    with pytest.raises(KeyForOtherModel, match="0.mgkey and 1.mgkey both know the model tiny"):
        connecting(unsure)
    assert connecting(unsure, tiny=unsure[1])[0].of("tiny").codec is two[1].codec
    nothing = served(two)
    with pytest.raises(KeyForOtherModel, match="none of the keys knows the model tiny") as caught:
        connecting(nothing, ("tiny",))
    assert "--serves tiny=KEYFILE" in caught.value.hint
    assert connecting(nothing, tiny=nothing[0])[0].of("tiny").codec is two[0].codec


def test_an_engine_does_not_choose_the_key(two: tuple[Scrambled, Scrambled], tmp_path: Path) -> None:
    """It says of a model under the new key that it was made with the old one, whose ids it has read."""
    old, _ = two
    with Server(tmp_path, in_thread=True) as server, server.client() as client:
        register(client, "clinic-new", old.folder)  # type: ignore[arg-type]  (the engine names the old key for it)
        with pytest.raises(KeyForOtherModel, match="the keys knows the model clinic-new, and the engine's word"):
            opened(server.url, two)
        with pytest.raises(KeyForOtherModel, match="says that clinic-new was scrambled with another key than 1.mgkey"):
            opened(server.url, two, (), ("clinic-old", "clinic-new"))
        register(client, "more", old.folder)  # type: ignore[arg-type]  (what no key knows is not offered, and said)
        backends, _ = opened(server.url, two, (), ("more", "x"))
        assert [one.name for one in backends.models] == ["more"]


def test_a_request_without_a_name_is_not_the_engines_to_give_a_key(two: tuple[Scrambled, Scrambled]) -> None:
    """Two keys are given, and the engine lists the model of the old one alone."""
    for names in (("tiny", "clinic-new"), ("clinic-new", "tiny")):
        backends, _ = connecting(served(two, names))
        with pytest.raises(ModelNotFound, match="several keys are served"):
            backends.of("")
    assert connecting(served(two[:1], ("tiny",)))[0].of("").codec is two[0].codec


def test_a_key_notes_its_models_names(two: tuple[Scrambled, Scrambled], tmp_path: Path) -> None:
    info = two[0].key.info
    number = "0123456789abcdef01234567"
    tuned = info.with_upload("clinic", f"ftjob-{number}")
    assert tuned.knows("clinic") and tuned.knows(f"ft-clinic-{number}") and not tuned.knows("clinic-new")
    assert tuned.with_upload("clinic", f"ftjob-{number}").document == tuned.document
    assert not info.with_upload("clinic", "ftjob-c").knows("clinic-new")  # a server's short name of a job names nothing
    assert not info.knows("clinic") and info.with_labels({"a": 0}, f"ftjob-{number}").knows(f"x-{number}")
    assert two[0].key.codec_alone().info.uploads == []
    write_key(tmp_path / "k.mgkey", two[0].key, PASSPHRASE, scrypt_n=2)
    UnlockedKey.open(tmp_path / "k.mgkey", PASSPHRASE).remember(None, model="clinic")
    again = UnlockedKey.open(tmp_path / "k.mgkey", PASSPHRASE)
    assert again.key.info.uploads == ["clinic"] and again.key.codec_alone().info.knows("clinic")


def test_upload_notes_the_name_in_the_key(
    two: tuple[Scrambled, Scrambled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILKGLASS_TOKEN", TOKEN)
    for number, one in enumerate(two):
        write_key(tmp_path / f"{number}.mgkey", one.key, PASSPHRASE, scrypt_n=2)
    with Server(tmp_path / "home", in_thread=True) as server:
        to = ("--server", server.url, "--name", "clinic")
        refused(call("upload", two[0].folder, *to, "--key", tmp_path / "1.mgkey"), 4, "with another key than")
        result = call("upload", two[0].folder, *to, "--key", tmp_path / "0.mgkey")
        assert result.exit_code == 0, result.output
    assert "uploads: clinic" in call("key", "show", tmp_path / "0.mgkey").stdout
    assert read_key(tmp_path / "0.mgkey", PASSPHRASE).info.uploads == ["clinic"]


def test_serves_names_a_key(tmp_path: Path) -> None:
    assert parse_serves(["clinic", "x=y"]) == (["clinic", "x=y"], {})
    (tmp_path / "k.mgkey").touch()
    assert parse_serves([f"a=b={tmp_path / 'k.mgkey'}"]) == (["a=b"], {"a=b": tmp_path / "k.mgkey"})
    with pytest.raises(KeyFileError, match="no key file at"):
        parse_serves([f"clinic={tmp_path / 'none.mgkey'}"])
    with pytest.raises(UsageError, match="clinic twice"):
        parse_serves(["clinic", f"clinic={tmp_path / 'k.mgkey'}"])


def test_a_folder_of_keys_is_opened_by_one_passphrase(two: tuple[Scrambled, Scrambled], tmp_path: Path) -> None:
    run = ("proxy", "--key", tmp_path, "--server", "http://127.0.0.1:9")
    refused(call(*run), 2, "holds no key file")
    for number, one in enumerate(two):
        write_key(tmp_path / f"{number}.mgkey", one.key, PASSPHRASE, scrypt_n=2)
    refused(call(*run, "--model", "x"), 2, "there are several")
    refused(call(*run, passphrase="another long passphrase"), 4, "the passphrase is wrong")
    result = call(*run, "--port", 0)
    assert "does not answer" in result.stderr and result.exit_code == RemoteError.exit_code
