"""The connections of an upstream: which are kept, TLS, and what is never remembered."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from pathlib import Path

import pytest

from milkglass.engines.llamacpp import LlamaCpp
from milkglass.engines.upstream import Upstream
from milkglass.engines.vllm import VLLM
from milkglass.errors import Unreachable
from tests.cli.test_processes import self_signed
from tests.engines.kit import ASKED, HASTY, event, sending, wire


def chunked(data: list[bytes], trailers: bytes = b"") -> bytes:
    """RFC 9112, section 7.1: size in hex, data, and a last chunk of size 0."""
    return b"".join(b"%X;a=b\r\n%s\r\n" % (len(one), one) for one in data) + b"0\r\n" + trailers + b"\r\n"


HEADS = {
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n",
    "another coding": b"Transfer-Encoding: gzip, chunked\r\n",
    "a length that is none": b"Content-Length: -2\r\n",
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
        other = Upstream(VLLM(), url, "token", timeouts=HASTY)
        with pytest.raises(Unreachable, match="not answer") as found:
            await anext(other.generate("tiny", ASKED))
        assert "certificate" in found.value.hint
        await other.close()
        server.close()

    asyncio.run(run())


def test_a_proxy_of_the_environment_is_used_for_other_machines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    def is_proxied(url: str) -> bool:
        return bool(Upstream(LlamaCpp(), url, allow_http=True)._client._mounts)

    assert is_proxied("http://gpu.example") and not is_proxied("http://127.0.0.1:1")
