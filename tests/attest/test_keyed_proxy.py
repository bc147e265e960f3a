"""`proxy --attested POLICY --key KEY`: scrambled ids inside the channel, and no text, by the programs as they are."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx2
import openai
import pytest
from openai import OpenAI

from milkglass.attest.passthrough import BY_POLICY, METHOD_BY_PATH, NOT_ATTESTED, OWN_ANSWER, STATE_HEADER
from milkglass.client.key.file import write_key
from milkglass.engines.catalogue import ENGINES
from milkglass.engines.engine import IdsRequest
from milkglass.proxy.guard import attestation_header
from tests import tiny
from tests.attest.programs import Program, command
from tests.attest.test_channel import Authority
from tests.cli.kit import PASSPHRASE
from tests.e2e.proxy import Tap
from tests.e2e.test_main_job import written_forms
from tests.proxy.kit import Scrambled
from tests.server.kit import TOKEN, register, until
from tests.server.real import Server


@dataclass
class Running:
    """The whole way: application, proxy, attested server, engine. `inside`: between the last two; `wire`: TLS."""

    model: Scrambled
    proxy: Program
    front: Program
    url: str
    inside: Tap
    wire: Tap

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("attested")
    model = Scrambled.of(folder / "model")
    write_key(folder / "my.mgkey", model.key, PASSPHRASE, scrypt_n=2)
    (folder / "token").write_text(TOKEN)
    authority = Authority(folder)
    certificate, key = authority.issued("server")
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder / "home"))
        with server.client() as client:
            register(client, "scrambled", model.folder)  # type: ignore[arg-type]
        inside = stack.enter_context(Tap(server.url))
        serve = ("serve", "--attested", "--software", "--cert", certificate, "--tls-key", key, "--port", 0)
        front = stack.enter_context(command(folder, "serve", *serve, "--in-front-of", inside.url))
        wire = stack.enter_context(Tap(front.listening()))
        policy = folder / "policy.toml"
        policy.write_text(
            f'version = 1\nserver = "https://localhost:{wire.url.rpartition(":")[2]}"\nkinds = ["software"]\n'
        )
        proxy = ("proxy", "--attested", policy, "--certificate", authority.file, "--open", "--port", 0)
        keyed = ("--key", folder / "my.mgkey", "--model", model.plain, "--token-file", folder / "token")
        started = stack.enter_context(command(folder, "proxy", *proxy, *keyed))
        yield Running(model, started, front, started.listening(), inside, wire)


def test_a_chat_and_a_stream_are_answered_and_the_verdict_says_not_attested(running: Running) -> None:
    with running.client() as client:
        for text in tiny.TEXTS:
            whole = client.chat.completions.create(
                model="scrambled", messages=[{"role": "user", "content": text}], max_tokens=6
            )
            assert whole.choices[0].message.content is not None
        parts = client.completions.create(model="scrambled", prompt=tiny.TEXTS[0], max_tokens=6, stream=True)
        assert [*parts]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="x", max_tokens=2)
    assert "NOT ATTESTED" in running.proxy.said and "NOT ATTESTED" in running.front.said
    answer = httpx2.get(f"{running.url}/v1/models", timeout=60)
    assert answer.status_code == 200 and answer.headers[STATE_HEADER] == "NOT ATTESTED"


def test_what_crosses_inside_the_channel_is_ids_and_no_text(running: Running) -> None:
    """The controls: the scrambled ids are found there, and TLS shows nothing of either."""
    with running.client() as client:
        for text in tiny.TEXTS:
            client.completions.create(model="scrambled", prompt=text, max_tokens=2)
    inside, wire = bytes(running.inside.heard), bytes(running.wire.heard)
    plain, scrambled = written_forms(tiny.TEXTS, running.model.key, running.model.plain)
    assert not [one for one in plain if one in inside]
    assert sum(one in inside for one in scrambled) >= 4
    for text in (*tiny.TEXTS, "assistant", str(running.model.plain)):
        assert text.encode() not in inside, text
    root = running.model.key.root
    assert root not in inside and root.hex().encode() not in inside
    assert wire and b"HTTP/1.1" in inside and b"HTTP/1.1" not in wire
    assert not [one for one in scrambled if one in wire]


def test_a_connection_that_was_not_admitted_is_no_news_and_a_failed_handshake_says_why(running: Running) -> None:
    """The proxy ended its first connection, whose key had no lease. A client that trusts nothing ends its own."""
    import socket

    port = int(running.front.listening().rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
    until(lambda: "a TLS handshake failed" in running.front.said)
    lines = [one for one in running.front.said.splitlines() if " INFO " in one or " WARNING " in one]
    assert len(lines) == 1 and "UNKNOWN_CA" in lines[0], lines


def test_the_proxy_starts_only_where_the_policy_holds(running: Running) -> None:
    """The same server, and a policy that does not take software: refused before anything is sent."""
    folder = running.proxy.log.parent
    heard = len(running.inside.heard)
    policy = folder / "strict.toml"
    policy.write_text((folder / "policy.toml").read_text().replace('kinds = ["software"]', "[tdx]"))
    words = ("proxy", "--attested", policy, "--certificate", folder / "authority.pem", "--open", "--port", 0)
    keyed = ("--key", folder / "my.mgkey", "--model", running.model.plain)
    with command(folder, "strict", *words, *keyed) as refused:
        assert refused.process.wait(120) == 8
        assert "no section for software" in refused.said and "nothing was sent" in refused.said
    assert len(running.inside.heard) == heard


@pytest.mark.parametrize("name", ENGINES)
def test_what_each_engine_is_asked_by_ids_is_handed_on(name: str) -> None:
    engine = ENGINES[name]
    call = engine.completion("m", IdsRequest([1, 2, 3], 4))
    assert METHOD_BY_PATH[call.path] == "POST" and METHOD_BY_PATH[engine.models.path] == "GET"


def test_what_the_proxy_answers_from_memory_is_not_said_to_be_the_servers() -> None:
    keyed, plain = attestation_header(BY_POLICY, ("/v1/models",)), attestation_header(BY_POLICY)
    said = [keyed(path, 200)[STATE_HEADER] for path in ("/v1/models", "/v1/models/a", "/health", "/v1/completions")]
    assert said == [OWN_ANSWER, OWN_ANSWER, OWN_ANSWER, BY_POLICY]
    assert plain("/v1/models", 200)[STATE_HEADER] == BY_POLICY and plain("/v1/models", 502)[STATE_HEADER] == OWN_ANSWER
    assert attestation_header(NOT_ATTESTED, ("/v1/models",))("/v1/models", 200)[STATE_HEADER] == NOT_ATTESTED
