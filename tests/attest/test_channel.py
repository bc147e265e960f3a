"""Nothing of a request reaches a key whose evidence was not verified on the connection that carries it."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from milkglass.attest import channel, connections
from milkglass.attest.aci import canonical_json, signed_report_data
from milkglass.attest.channel import AttestedChannel, Leases, make_verifier
from milkglass.attest.claims import Verdict
from milkglass.attest.evidence import HardwareEvidence
from milkglass.attest.front import spki_digest_of_file
from milkglass.attest.policy import Policy, parse_policy
from milkglass.attest.providers import EVIDENCE_PATH
from milkglass.attest.sources import EvidenceSource, Software
from milkglass.engines.catalogue import ENGINES
from milkglass.engines.engine import Call
from milkglass.engines.upstream import Upstream
from milkglass.errors import AttestationError, Busy, Unreachable, UsageError
from milkglass.proxy.attested import AttestedProxy
from milkglass.server.settings import Limits
from tests.attest import intel_forger
from tests.attest.programs import leave, serving

SILENCE = connections.SILENCE_SECONDS
SECRET = b"the patient's name is Keller"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": SECRET.decode()}]}).encode()


# --- certificates of one authority, and servers that count ------------------------------------------------------------
@dataclass(frozen=True)
class Authority:
    """An authority that the client trusts, and certificates of it for localhost."""

    folder: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def file(self) -> Path:
        path = self.folder / "authority.pem"
        if not path.is_file():
            path.write_bytes(self._certificate("authority", self.key, True).public_bytes(Encoding.PEM))
        return path

    def issued(self, name: str) -> tuple[Path, Path]:
        """A certificate and its key, as files."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, file = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(self._certificate("localhost", key, False).public_bytes(Encoding.PEM))
        file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return certificate, file

    def _certificate(self, name: str, key: ec.EllipticCurvePrivateKey, authority: bool) -> x509.Certificate:
        now = datetime.now(UTC).replace(tzinfo=None)
        names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)]) for one in (name, "authority")]
        builder = (
            x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(authority, None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )  # fmt: skip
        if authority:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        else:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        return builder.sign(self.key, SHA256())


class CountingReader(asyncio.StreamReader):
    """Keeps every byte that came after the handshake, whether or not it makes a request."""

    def __init__(self) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.seen = bytearray()

    def feed_data(self, data: Any) -> None:
        self.seen += data
        super().feed_data(data)


Answer = Callable[[bytes, bytes], bytes]  # evidence for the SPKI of the certificate and a nonce


@dataclass
class Server:
    """A TLS server that keeps what it received besides requests for evidence.

    Attributes:
        pairs: certificates and keys; each connection takes the next one, and once none is left the last.
        in_turn: whether they begin again instead, as servers behind one address do.
        silent: whether nothing but evidence is answered.
        forever: whether each other request is answered with "continue", again and again.
        evidence: what it answers to a nonce.
        of_key: the bytes that each key received.
        readers: of each connection that was made, also if it sent nothing.
    """

    pairs: list[tuple[Path, Path]]
    evidence: Answer
    in_turn: bool = False
    silent: bool = False
    forever: bool = False
    received: bytearray = field(default_factory=bytearray)
    of_key: dict[bytes, int] = field(default_factory=dict)
    readers: list[CountingReader] = field(default_factory=list)
    asked: int = 0
    port: int = 0
    _connections: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.pairs[0])
        contexts = []
        for pair in self.pairs:
            one = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            one.load_cert_chain(*pair)
            contexts.append(one)

        def chosen(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            last = len(contexts) - 1
            number = self._connections % len(contexts) if self.in_turn else min(self._connections, last)
            self._connections += 1
            connection.context = contexts[number]
            self._keys[id(connection)] = spki_digest_of_file(self.pairs[number][0])

        self._keys: dict[int, bytes] = {}
        context.sni_callback = chosen  # type: ignore[assignment]

        def protocol() -> asyncio.StreamReaderProtocol:
            self.readers.append(CountingReader())
            return asyncio.StreamReaderProtocol(self.readers[-1], self._serve)

        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", self.port, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in [*self._tasks]:
                task.cancel()

    def __post_init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            spki = self._keys.get(id(writer.get_extra_info("ssl_object")), spki_digest_of_file(self.pairs[0][0]))
            while head := await reader.readuntil(b"\r\n\r\n"):
                line = head.split(b"\r\n", 1)[0].decode()
                if EVIDENCE_PATH in line:
                    self.asked += 1
                    nonce = bytes.fromhex(line.split("nonce=")[1].split(" ")[0])
                    answer = self.evidence(spki, nonce)
                else:
                    lengths = [
                        one.split(b":")[1] for one in head.lower().split(b"\r\n") if one.startswith(b"content-l")
                    ]
                    self.received += head + await reader.readexactly(int(lengths[0]) if lengths else 0)
                    self.of_key[spki] = self.of_key.get(spki, 0) + len(head)
                    answer = b'{"ok": true}'
                    if self.silent:
                        await asyncio.Event().wait()
                    while self.forever:
                        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                        await writer.drain()
                        await asyncio.sleep(0.1)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


SOURCE = EvidenceSource(Software())


def honest(spki: bytes, nonce: bytes) -> bytes:
    return SOURCE.evidence(spki, nonce).document()


def policy_for(port: int, lease: str = "15m") -> Policy:
    text = f'version = 1\nserver = "https://localhost:{port}"\nlease = "{lease}"\nkinds = ["software"]\n'
    return parse_policy(text.encode(), "p.toml", Policy)


@dataclass
class Client:
    """A channel whose verdicts are kept, with clocks that a test moves."""

    channel: AttestedChannel
    verdicts: list[Verdict]
    now: list[float]
    wall: list[float]

    async def ask(self) -> bytes:
        answer = await self.channel.send("POST", "/v1/chat/completions", {"content-type": "application/json"}, BODY)
        try:
            return await answer.aread()
        finally:
            await answer.aclose()


@asynccontextmanager
async def client(
    authority: Authority, port: int, lease: str = "15m", silence: float = SILENCE
) -> AsyncIterator[Client]:
    policy, verdicts, now, wall = policy_for(port, lease), list[Verdict](), [0.0], [1_000.0]
    leases = Leases(policy.lease_seconds, lambda: now[0], lambda: wall[0] + now[0])
    channel = AttestedChannel(policy, make_verifier(policy, {}), authority.file, verdicts.append, leases, silence)
    try:
        yield Client(channel, verdicts, now, wall)
    finally:
        await channel.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def play(
    authority: Authority, scene: Callable[[Server, Client], Awaitable[None]], *, silence: float = SILENCE, **kinds: bool
) -> None:
    """Plays a scene of one honest server and a client of it. kinds: of the server, such as silent=True."""

    async def work() -> None:
        async with (
            Server([authority.issued("a")], honest, **kinds).running() as server,
            client(authority, server.port, silence=silence) as one,
        ):
            await scene(server, one)

    asyncio.run(work())


# --- the scenes -------------------------------------------------------------------------------------------------------
def test_evidence_is_asked_for_before_the_first_byte_and_once_a_lease(authority: Authority) -> None:
    async def work() -> None:
        async with Server([authority.issued("a")], honest).running() as server, client(authority, server.port) as one:
            for _ in range(5):
                assert await one.ask() == b'{"ok": true}'
            assert server.asked == 1 and server.received.count(SECRET) == 5
            assert [verdict.holds for verdict in one.verdicts] == [True]

    asyncio.run(work())


REFUSALS = {
    "evidence relayed from the honest server": ("binding", lambda other: lambda spki, nonce: honest(other, nonce)),
    "an old nonce replayed": ("binding", lambda other: lambda spki, nonce: honest(spki, bytes(32))),
    "no evidence": ("evidence", lambda other: lambda spki, nonce: b"{}"),
    "evidence that is no JSON": ("evidence", lambda other: lambda spki, nonce: b"\xff" * 100),
    "too much evidence": ("size", lambda other: lambda spki, nonce: b" " * (11 << 20)),
    "report data of zeros": (
        "binding", lambda other: lambda spki, nonce: HardwareEvidence(
            "software", b"milkglass software evidence 1" + bytes(64), {}, "milkglass", spki, nonce
        ).document(),
    ),
    "evidence of software that nothing binds": (
        "form", lambda other: lambda spki, nonce: HardwareEvidence(
            "software", b"milkglass software evidence 1" + bytes(64)
        ).document(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("scene", REFUSALS)
def test_a_man_in_the_middle_with_a_valid_certificate_gets_no_byte(scene: str, authority: Authority) -> None:
    reason, answer = REFUSALS[scene]
    other = spki_digest_of_file(authority.issued("honest")[0])

    async def work() -> None:
        async with (
            Server([authority.issued("mitm")], answer(other)).running() as server,
            client(authority, server.port) as one,
        ):
            for _ in range(3):
                with pytest.raises(AttestationError) as refused:
                    await one.ask()
                assert refused.value.reason == reason
            assert server.asked == 1, "a refusal holds for some seconds"
            questions = [reader.seen for reader in server.readers if reader.seen]
            assert len(server.readers) > 3 and len(questions) == 1, "the other connections got no byte at all"
            assert questions[0].startswith(b"GET ") and EVIDENCE_PATH.encode() in questions[0]
            assert questions[0].count(b"\r\n\r\n") == 1 and questions[0].endswith(b"\r\n\r\n")

    asyncio.run(work())


def test_a_certificate_that_the_client_does_not_trust_is_not_asked(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other")

    async def work() -> None:
        async with Server([stranger.issued("a")], honest).running() as server, client(authority, server.port) as one:
            with pytest.raises(Unreachable, match="not trusted") as refused:
                await one.ask()
            assert "--certificate" in refused.value.hint
            assert not server.received and not server.asked

    asyncio.run(work())


def test_a_key_that_rotates_is_verified_anew_and_an_impostor_is_not_sent_to(authority: Authority) -> None:
    first, second, third = (authority.issued(name) for name in "abc")

    async def rotated() -> None:
        async with client(authority, await free_port()) as one:
            port = int(one.channel.policy.server.rsplit(":", 1)[1])
            for pair, answer, allowed in (
                (first, honest, True), (second, honest, True), (third, lambda spki, nonce: b"{}", False)
            ):  # fmt: skip
                async with Server([pair], answer, port=port).running() as server:
                    if allowed:
                        assert await one.ask() == b'{"ok": true}' and server.asked == 1
                        assert SECRET in server.received
                    else:
                        with pytest.raises(AttestationError):
                            await one.ask()
                        assert not server.received
                await asyncio.sleep(0.05)

    asyncio.run(rotated())


async def free_port() -> int:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = int(server.sockets[0].getsockname()[1])
    server.close()
    await server.wait_closed()
    return port


def test_a_lease_ends_also_on_a_connection_that_is_open(authority: Authority) -> None:
    async def work() -> None:
        async with (
            Server([authority.issued("a")], honest).running() as server,
            client(authority, server.port, "60s") as one,
        ):
            await one.ask()
            one.now[0] += 59
            await one.ask()
            assert server.asked == 1
            one.now[0] += 2
            assert await one.ask() == b'{"ok": true}'
            assert server.asked == 2, "on a new connection, or the old one: with new evidence"
            server.evidence = lambda spki, nonce: b"{}"
            one.now[0] += 61
            before = len(server.received)
            with pytest.raises(AttestationError):
                await one.ask()
            assert len(server.received) == before

    asyncio.run(work())


@pytest.mark.parametrize("is_honest", [True, False])
def test_where_a_lease_ends_inside_a_body_the_rest_is_not_sent(
    is_honest: bool, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request begins anew once the key has a lease again, and never if it gets none."""
    body = SECRET + b"x" * (10 * channel.PIECE_BYTES)
    pieces, sent = AttestedChannel.pieces, 3

    async def work() -> None:
        async def slow_pieces(self: AttestedChannel, body: bytes) -> AsyncIterator[bytes]:
            number = 0
            async for piece in pieces(self, body):
                number += 1
                if number == sent + 1 and server.asked == 1:
                    one.now[0] += 61
                    if not is_honest:
                        server.evidence = lambda spki, nonce: b"{}"
                yield piece

        monkeypatch.setattr(AttestedChannel, "pieces", slow_pieces)
        async with (
            Server([authority.issued("a")], honest).running() as server,
            client(authority, server.port, "60s") as one,
        ):
            if is_honest:
                answer = await one.channel.send("POST", "/v1/embeddings", {}, body)
                assert await answer.aread() == b'{"ok": true}'
                assert server.received.count(SECRET) == 1 and server.received.endswith(body)
            else:
                with pytest.raises(AttestationError):
                    await one.channel.send("POST", "/v1/embeddings", {}, body)
                assert not server.received
            assert server.asked == 2
            parts = [reader.seen.partition(b"\r\n\r\n")[2] for reader in server.readers]
            assert sorted(len(part) for part in parts if part) == [
                sent * channel.PIECE_BYTES, *([len(body)] if is_honest else [])
            ]  # fmt: skip

    asyncio.run(work())


def test_the_body_of_a_proxy_with_a_key_crosses_in_pieces_too(authority: Authority) -> None:
    body = "x" * (3 * channel.PIECE_BYTES)

    async def work() -> None:
        async with (
            Server([authority.issued("a")], honest).running() as server,
            client(authority, server.port) as one,
        ):
            writes = list[int]()

            async def counted(body: bytes) -> AsyncIterator[bytes]:
                async for piece in AttestedChannel.pieces(one.channel, body):
                    writes.append(len(piece))
                    yield piece

            one.channel.pieces = counted  # type: ignore[method-assign]
            upstream = Upstream(
                ENGINES["vllm"], f"https://localhost:{server.port}", authority=authority.file, admission=one.channel
            )
            answer = await upstream._send(Call("/v1/embeddings", {"a": body}))
            assert answer.status_code == 200 and server.received.endswith(body.encode() + b'"}')
            assert len(writes) == 4 and max(writes) == channel.PIECE_BYTES
            await answer.aclose()
            await upstream.close()

    asyncio.run(work())


def test_a_server_that_only_says_continue_holds_a_request_for_no_longer_than_a_limit(authority: Authority) -> None:
    async def scene(_: Server, one: Client) -> None:
        with pytest.raises(Unreachable, match=r"began no answer within 0\.6 s"):
            async with asyncio.timeout(20):
                await one.ask()

    play(authority, scene, silence=0.3, forever=True)


def test_leases_that_end_under_load_lose_nothing(authority: Authority) -> None:
    async def work() -> None:
        async with (
            Server([authority.issued("a")], honest).running() as server,
            client(authority, server.port, "60s") as one,
        ):

            async def many() -> None:
                for _ in range(10):
                    assert await one.ask() == b'{"ok": true}'
                    one.now[0] += 5

            await asyncio.gather(*(many() for _ in range(8)))
            assert server.received.count(SECRET) == 80 and server.asked >= 5

    asyncio.run(work())


def test_a_wall_clock_that_is_set_ends_every_lease(authority: Authority) -> None:
    async def work() -> None:
        async with Server([authority.issued("a")], honest).running() as server, client(authority, server.port) as one:
            await one.ask()
            for jump in (86_400.0, -200_000.0):
                one.wall[0] += jump
                await one.ask()
            assert server.asked == 3

    asyncio.run(work())


def test_a_proxy_of_the_environment_sees_nothing(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        connections = list[bytes]()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(await reader.read(100))
            writer.close()

        proxy = await asyncio.start_server(listen, "127.0.0.1", 0)
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        async with Server([authority.issued("a")], honest).running() as server, client(authority, server.port) as one:
            await one.ask()
        proxy.close()
        assert not connections

    asyncio.run(work())


@pytest.mark.parametrize("count", [2, 3])
def test_of_several_servers_behind_one_address_each_is_verified(
    count: int, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_IDLE_CONNECTIONS", 0)  # so that each request has a connection of its own
    pairs = [authority.issued(name) for name in "abc"[:count]]
    bad = spki_digest_of_file(pairs[1][0])

    def some(spki: bytes, nonce: bytes) -> bytes:
        return b"{}" if spki == bad else honest(spki, nonce)

    async def work() -> None:
        async with Server(pairs, honest, True).running() as server, client(authority, server.port) as one:
            for _ in range(6):
                assert await one.ask() == b'{"ok": true}'
            assert server.asked <= 2 * count
        async with Server(pairs, some, True).running() as server, client(authority, server.port) as one:
            accepted = 0
            for _ in range(12):
                with suppress(AttestationError):
                    accepted += await one.ask() == b'{"ok": true}'
            assert {*server.of_key} == {spki_digest_of_file(pair[0]) for pair in pairs} - {bad}
            assert 0 < accepted < 12, "a good one was accepted, a bad one refused"

    asyncio.run(work())


def test_a_connection_is_used_again_and_only_as_many_are_kept_as_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests one after the other share a connection; of many at a time some connections are kept."""
    monkeypatch.setattr(connections, "MAX_IDLE_CONNECTIONS", 3)
    seen, writers = list[int](), list[asyncio.StreamWriter]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                seen.append(writer.get_extra_info("peername")[1])
                await asyncio.sleep(0.05)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await writer.drain()

    async def work() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        transport = connections.SeparateConnectionsTransport(5, None, 30.0)
        async with server:
            client = httpx2.AsyncClient(transport=transport, timeout=30)
            for _ in range(3):
                assert (await client.get(url)).text == "ok"
            assert len({*seen}) == 1
            seen.clear()
            answers = await asyncio.gather(*(client.get(url) for _ in range(10)))
            assert [one.text for one in answers] == ["ok"] * 10
            assert len({*seen[:5]}) == 5, "no more than five at a time"
            seen.clear()
            await asyncio.gather(*(client.get(url) for _ in range(3)))
            assert len(transport._idle) == 3
            await client.aclose()
            assert not transport._idle
            for writer in writers:
                writer.close()
                await writer.wait_closed()

    asyncio.run(work())


def test_a_silent_server_holds_no_connection_for_longer_than_a_limit(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_CONNECTIONS", 1)

    async def scene(server: Server, one: Client) -> None:
        for _ in range(2):
            with pytest.raises(Unreachable, match=r"silent for 0\.2 s"):
                await asyncio.wait_for(one.ask(), 5)
        server.silent = False
        assert await asyncio.wait_for(one.ask(), 5) == b'{"ok": true}'

    play(authority, scene, silence=0.2, silent=True)


def test_a_caller_that_leaves_a_silent_server_gives_its_connection_back_at_once(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_CONNECTIONS", 1)

    async def scene(server: Server, one: Client) -> None:
        app = AttestedProxy(one.channel, None, None, None, "by policy", Limits()).app()
        await leave(app, "/v1/chat/completions", lambda: bool(server.received))
        server.silent = False
        assert await asyncio.wait_for(one.ask(), 5) == b'{"ok": true}'

    play(authority, scene, silent=True)


def test_a_header_that_is_not_ascii_is_sent_byte_for_byte(authority: Authority) -> None:
    async def work() -> None:
        async with Server([authority.issued("a")], honest).running() as server, client(authority, server.port) as one:
            app = AttestedProxy(one.channel, None, None, None, "by policy", Limits()).app()
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as local:
                headers = {b"accept": b"\xff\xe9"}
                assert (await local.post("/v1/embeddings", content=b"{}", headers=headers)).status_code == 200
            assert b"\xff\xe9" in server.received
            with pytest.raises(UsageError, match="ASCII"):
                AttestedProxy(one.channel, None, "t\u00f6ken", None, "by policy", Limits())

    asyncio.run(work())


def test_who_waits_for_a_free_connection_is_refused_after_a_limit() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        transport = connections.SeparateConnectionsTransport(1, None, 0.1)
        async with server, httpx2.AsyncClient(transport=transport, timeout=None) as client:
            first = asyncio.create_task(client.get(url))
            await asyncio.sleep(0.05)
            with pytest.raises(Busy, match=r"all 1 connections to 127\.0\.0\.1 were in use for 0\.1 s"):
                await asyncio.wait_for(client.get(url), 5)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    asyncio.run(work())


def test_a_connection_is_not_used_again_at_the_moment_at_which_its_server_closes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever sends on a connection forgets it well before the server's time for idle ones has passed."""
    assert uvicorn.Config(Starlette()).timeout_keep_alive > 2 * connections.IDLE_SECONDS
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.5)
    ports = list[int]()

    async def peer(request: Request) -> Response:
        assert request.client is not None
        ports.append(request.client.port)
        return Response()

    async def work(port: int) -> None:
        async with connections.make_client(f"http://127.0.0.1:{port}", 1) as client:
            for pause in (0.0, 0.8, 0.0):
                await client.get("/")
                await asyncio.sleep(pause)

    with serving(Starlette(routes=[Route("/", peer)])) as port:
        asyncio.run(work(port))
    assert ports[0] == ports[1] != ports[2]


def test_a_document_that_names_another_form_than_the_policys_binds_no_key(authority: Authority) -> None:
    """An image that signs keysets of ACI: its quote is relayed under our own form's name, for another key."""

    def relayed(spki: bytes, nonce: bytes) -> bytes:
        keyset = canonical_json({"not_after": int(intel_forger.NOW.timestamp()) + 86_400, "tls_public_keys": []})
        quote = intel_forger.Quote(enclave=intel_forger.report(data=signed_report_data(keyset, nonce))).bytes()
        collateral = {"intel": intel_forger.Collateral().content()}
        return HardwareEvidence(
            "sgx", quote, collateral, "aci", spki, nonce, keyset=keyset, host="localhost"
        ).document()

    async def work(provider: str) -> None:
        async with Server([authority.issued(f"between-{provider}")], relayed).running() as server:
            text = f'version = 1\nserver = "https://localhost:{server.port}"\nevidence = "{provider}"\n'
            text += f'[sgx]\nimage = [{{mrenclave = "{intel_forger.MEASUREMENT.hex()}", name = "x", origin = "x"}}]\n'
            policy = parse_policy(text.encode(), "policy", Policy)
            channel = AttestedChannel(policy, make_verifier(policy, {}, None, lambda: intel_forger.NOW), authority.file)
            with pytest.raises(AttestationError) as refused:
                await channel.send("POST", "/v1/chat/completions", {}, BODY)
            assert refused.value.reason == ("form" if provider == "milkglass" else "version")
            assert not server.received.count(SECRET)
            await channel.close()

    for provider in ("milkglass", "aci"):
        asyncio.run(work(provider))


def test_those_who_wait_for_a_lease_share_a_failure_and_no_request_waits_longer_than_a_limit(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(answer: Answer, kind: type[Exception]) -> int:
        async with (
            Server([authority.issued("slow")], answer).running() as server,
            client(authority, server.port) as one,
        ):
            results = await asyncio.gather(*(one.ask() for _ in range(8)), return_exceptions=True)
            assert {type(result) for result in results} == {kind}
            return server.asked

    assert asyncio.run(work(lambda spki, nonce: b"{}", AttestationError)) == 1
    monkeypatch.setattr(channel, "ADMISSION_SECONDS", 0.2)

    def slow(spki: bytes, nonce: bytes) -> bytes:
        time.sleep(1)
        return b"{}"

    assert asyncio.run(work(slow, Unreachable)) <= 8


def test_one_at_a_time_asks_for_a_lease_of_a_key_also_when_the_first_has_failed(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes after the first has let go, and before the second has begun, waits for the second."""
    at_once, most, begun = 0, 0, 0

    async def admit(self: AttestedChannel, spki: bytes) -> None:
        nonlocal at_once, most, begun
        at_once, begun = at_once + 1, begun + 1
        most = max(most, at_once)
        try:
            await asyncio.sleep(0.05)
            if begun == 1:
                raise ConnectionError  # no failure that is kept for those who wait
        finally:
            at_once -= 1

    async def work() -> None:
        monkeypatch.setattr(AttestedChannel, "_admit", admit)
        async with client(authority, 1) as one:
            first, second = (asyncio.create_task(one.channel.admit(b"key")) for _ in range(2))
            third = list[asyncio.Task[None]]()
            first.add_done_callback(lambda _: third.append(asyncio.create_task(one.channel.admit(b"key"))))
            results = await asyncio.gather(first, second, return_exceptions=True)
            assert isinstance(results[0], ConnectionError) and results[1] is None
            await third[0]
            assert begun == 3 and most == 1

    asyncio.run(work())


def test_evidence_that_nothing_binds_gives_no_lease_also_where_recordings_of_it_are_accepted(
    authority: Authority,
) -> None:
    """Whoever has a certificate for the name could show anybody's recording."""
    recorded = HardwareEvidence("software", b"milkglass software evidence 1" + bytes(64)).document()

    async def work() -> None:
        async with (
            Server([authority.issued("a")], lambda spki, nonce: recorded).running() as server,
            client(authority, server.port) as one,
        ):
            accepting = one.channel.policy.model_copy(update={"accept": {"unbound": "a trial", "not-fresh": "a trial"}})
            channel_of = AttestedChannel(accepting, make_verifier(accepting, {}), authority.file)
            with pytest.raises(AttestationError) as refused:
                await channel_of.send("POST", "/v1/embeddings", {}, BODY)
            assert refused.value.reason == "form" and not server.received
            await channel_of.close()

    asyncio.run(work())


def test_evidence_that_was_judged_by_another_clock_gives_no_lease(authority: Authority) -> None:
    wall = [-1e8]

    async def work() -> None:
        async with Server([authority.issued("a")], honest).running() as server:
            policy = policy_for(server.port)
            judged_by_policy, leases = make_verifier(policy, {}), Leases(60.0, lambda: 0.0, lambda: 1e9 + wall[0])

            def judge(document: bytes, spki: bytes, nonce: bytes) -> Verdict:
                verdict = judged_by_policy(document, spki, nonce)
                wall[0] = 0.0  # the time is set right after the judgement
                return verdict

            one = AttestedChannel(policy, judge, authority.file, leases=leases)
            with pytest.raises(AttestationError) as refused:
                await one.send("POST", "/v1/embeddings", {}, BODY)
            assert refused.value.reason == "clock" and not server.received
            one._failures.clear()
            answer = await one.send("POST", "/v1/embeddings", {}, BODY)
            assert await answer.aread() == b'{"ok": true}'
            await one.close()

    asyncio.run(work())


@pytest.mark.parametrize("scene", REFUSALS)
def test_a_proxy_with_a_key_sends_a_man_in_the_middle_nothing(scene: str, authority: Authority) -> None:
    reason, answer = REFUSALS[scene]
    other = spki_digest_of_file(authority.issued("honest")[0])

    async def work() -> None:
        async with (
            Server([authority.issued("mitm")], answer(other)).running() as server,
            client(authority, server.port) as one,
        ):
            upstream = Upstream(
                ENGINES["vllm"], f"https://localhost:{server.port}", "secret", authority=authority.file,
                admission=one.channel,
            )  # fmt: skip
            with pytest.raises(AttestationError) as refused:
                await upstream.models()
            assert refused.value.reason == reason and not server.received
            await upstream.close()

    asyncio.run(work())


def test_a_server_has_a_connection_left_for_evidence() -> None:
    assert Limits().per_address > channel.MAX_CONNECTIONS


def test_the_environment_gets_no_secrets_of_a_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys.txt"))
    assert ssl.create_default_context().keylog_filename is not None, "the library would write them"
    assert channel.admission_context(lambda spki: True, None).keylog_filename is None
