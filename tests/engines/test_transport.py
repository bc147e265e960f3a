"""The transport under an upstream: bodies in chunks, connections that are kept, TLS, and what is never remembered."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from milkglass.engines import upstream as module
from milkglass.engines.chunks import MAX_LINE, ChunkReader
from milkglass.engines.llamacpp import LlamaCpp
from milkglass.engines.transport import StreamTransport
from milkglass.engines.upstream import Upstream
from milkglass.engines.vllm import VLLM
from milkglass.errors import Unreachable
from tests.cli.test_processes import self_signed
from tests.engines.kit import ASKED, HASTY, event, sending, wire


def chunked(data: list[bytes], trailers: bytes = b"") -> bytes:
    """RFC 9112, section 7.1: size in hex, data, and a last chunk of size 0."""
    return b"".join(b"%X;a=b\r\n%s\r\n" % (len(one), one) for one in data) + b"0\r\n" + trailers + b"\r\n"


@pytest.mark.parametrize("seed", range(30))
def test_a_chunked_body_is_its_data_however_it_arrives(seed: int) -> None:
    draws = random.Random(seed)
    data = [draws.randbytes(draws.choice([1, 2, 3, 20, 700])) for _ in range(draws.randrange(1, 12))]
    raw, reader, found = chunked(data, draws.choice([b"", b"A: b\r\n"])), ChunkReader(), b""
    while raw:
        assert not reader.over
        cut = draws.choice([1, 2, 5, 64, 5000])
        found, raw = found + reader.take(raw[:cut]), raw[cut:]
    assert found == b"".join(data) and reader.over


@pytest.mark.parametrize(
    "raw",
    [b"x\r\n", b"-1\r\n", b"0x5\r\nabcde\r\n", b" \r\n", b"\r\n", b"1" * 16 + b"\r\n", b"0\r\n\r\nHTTP/1.1 200 OK\r\n",
     b"1" * (MAX_LINE + 1), b"0\r\n" + b"A: b\r\n" * MAX_LINE],
)  # fmt: skip
def test_a_body_that_is_not_chunked_as_it_says(raw: bytes) -> None:
    with pytest.raises(httpx2.RemoteProtocolError):
        ChunkReader().take(raw)


HEADS = {
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n",
    "a length and chunks": b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
    "another coding": b"Transfer-Encoding: gzip, chunked\r\n",
    "a length that is none": b"Content-Length: -2\r\n",
    "a folded line": b"A: b\r\n c\r\n",
    "a space before the colon": b"A : b\r\n",
}


@pytest.mark.parametrize("what", HEADS)
def test_heads_that_could_be_read_in_two_ways(what: str) -> None:
    async def run() -> None:
        async with wire(sending(b"HTTP/1.1 200 OK\r\n" + HEADS[what] + b"\r\n{}", close=False)) as server:
            found = server.upstream()
            with pytest.raises(Unreachable, match="RemoteProtocolError"):
                await found.models()
            await found.close()

    asyncio.run(run())


def test_notices_before_an_answer_are_passed_over() -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    body = b'{"data": []}'
    raw += b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def run() -> None:
        async with wire(sending(raw, close=False)) as server:
            found = server.upstream()
            assert await found.models() == []
            assert await found.models() == [] and server.connections == 1
            await found.close()

    asyncio.run(run())


def test_a_connection_that_the_engine_closed_is_not_used_again() -> None:
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n" + b'{"data": []}'

    async def closing_later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(body)  # and says nothing of closing
        await writer.drain()
        writer.close()

    async def run() -> None:
        async with wire(closing_later) as server:
            found = server.upstream()
            for _ in range(5):
                assert await found.models() == []
                await asyncio.sleep(0.05)  # the end arrives
            assert server.connections == 5
            await found.close()

    asyncio.run(run())


def test_what_is_left_of_an_answer_never_reaches_the_next_one() -> None:
    """A connection whose answer was not read to its end is closed, not kept: the rest is another conversation's."""
    raw = chunked([event([9]), event([8], "length")])
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def run() -> None:
        async with wire(sending(head + raw, close=False)) as server:
            found = server.upstream()
            for connections in (1, 2, 3):
                answer = found.generate("tiny", ASKED)
                assert (await anext(answer)).ids == [9]
                await answer.aclose()
                assert server.connections == connections
            whole = [one async for one in found.generate("tiny", ASKED)]
            assert [one for chunk in whole for one in chunk.ids] == [9, 8] and server.connections == 4
            await found.close()

    asyncio.run(run())


def test_an_end_that_the_event_loop_has_not_seen_is_noticed() -> None:
    closed, served = threading.Event(), []

    def answer(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                served.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n" + b'{"data": []}')
                connection.close()
                closed.set()

    async def run(port: int) -> None:
        found = Upstream(LlamaCpp(), f"http://127.0.0.1:{port}")
        for _ in range(4):
            assert await found.models() == []
            assert closed.wait(10)  # the event loop stands still meanwhile
            closed.clear()
        await found.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        asyncio.run(run(listener.getsockname()[1]))
    assert len(served) == 4


def test_what_an_engine_sets_is_never_sent_back() -> None:
    head = b"HTTP/1.1 200 OK\r\nSet-Cookie: who=4711; Path=/\r\nETag: x\r\nContent-Length: 12\r\n\r\n"

    async def run() -> None:
        async with wire(sending(head + b'{"data": []}', close=False)) as server:
            found = server.upstream()
            await found.models()
            await found.models()
            await found.close()
            assert len(server.calls) == 2 and server.calls[0][0] == server.calls[1][0]
            assert "4711" not in server.calls[1][0] and "cookie" not in server.calls[1][0].lower()

    asyncio.run(run())


def test_tls_with_the_engines_own_certificate(tmp_path: Path) -> None:
    certificate, secret = self_signed(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, secret)
    chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked([event([9]), event([8], "length")])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
                writer.write(chunks)
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        trusting = Upstream(VLLM(), url, "token", authority=certificate)
        for _ in range(2):
            chunks = [one async for one in trusting.generate("tiny", ASKED)]
            assert [one for chunk in chunks for one in chunk.ids] == [9, 8]
        await trusting.close()
        other = Upstream(VLLM(), url, "token", patience=HASTY)
        with pytest.raises(Unreachable, match="does not answer") as found:
            await anext(other.generate("tiny", ASKED))
        assert "certificate is not trusted" in found.value.hint
        await other.close()
        server.close()

    asyncio.run(run())


def test_a_proxy_of_the_environment_is_used_for_other_machines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    def transports(url: str) -> list[Any]:
        client = Upstream(LlamaCpp(), url, allow_http=True)._client
        return [client._transport, *client._mounts.values()]

    assert [type(one) for one in transports("http://gpu.example")] == [StreamTransport]
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert (
        StreamTransport not in map(type, transports("http://gpu.example")) and len(transports("http://a.example")) > 1
    )
    assert [type(one) for one in transports("http://127.0.0.1:1")] == [StreamTransport]
    monkeypatch.setenv("no_proxy", "gpu.example")
    assert not module._is_proxied("http://gpu.example:1") and module._is_proxied("http://a.example")


def test_both_transports_stream_alike() -> None:
    """What goes through a proxy takes httpx2's own transport."""
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked([event([9]), event([8], "length")])

    async def run(own: bool) -> list[int]:
        async with wire(sending(raw, close=False)) as server:
            found = server.upstream()
            if not own:
                await found._client.aclose()
                found._client = httpx2.AsyncClient(base_url=server.url, trust_env=False)
            result = [one async for chunk in found.generate("tiny", ASKED) for one in chunk.ids]
            await found.close()
            return result

    assert asyncio.run(run(True)) == asyncio.run(run(False)) == [9, 8]
