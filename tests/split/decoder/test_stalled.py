"""A client that reads nothing, and asks for more with pings, holds its rows no longer than `idle`, and no memory."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from milkglass.server.settings import Limits
from milkglass.split.decoder.server import SplitGenerator, SplitSession, running_sequences
from milkglass.split.spec import STREAM_PATH
from tests.server.kit import until
from tests.split.decoder.kit import PROMPT, TOKEN, Served, serving
from tests.split.decoder.test_faults import first

TEXT, BINARY, PING = 1, 2, 9
FULL = 64 << 10  # bytes that asyncio keeps for a peer before it says that writing must pause
PATIENT = Limits(window_seconds=120)  # what ends here is not ended by the connection's own deadline


@contextmanager
def opened(served: Served, max_tokens: int) -> Iterator[socket.socket]:
    """A session's connection, of a client that will read nothing."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(60)
        one.connect(("127.0.0.1", served.port))
        head = f"GET {STREAM_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nConnection: Upgrade\r\n"
        head += "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        one.sendall(f"{head}Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode())
        hear(one, b"\r\n\r\n")
        send(one, TEXT, json.dumps({"dtype": "float32", "max_tokens": max_tokens}).encode())
        until(lambda: len(served.sessions))
        yield one


def hear(one: socket.socket, words: bytes) -> None:
    """Read to the end of these words, and no further."""
    came = b""
    while not came.endswith(words):
        came += (byte := one.recv(1))
        assert byte, came


def send(one: socket.socket, kind: int, data: bytes) -> None:
    """One frame, with a mask of zeros."""
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    one.sendall(bytes([0x80 | kind]) + size + bytes(4) + data)


def connection(served: Served) -> Any:
    """uvicorn's side of the only connection."""
    (only,) = served.web.server_state.connections
    return only


def session(served: Served) -> SplitSession:
    (only,) = served.sessions._open
    return only


def rows(served: Served) -> int:
    engine = served.sessions.engine
    assert isinstance(engine, SplitGenerator)
    return len(engine._waiting) + sum(len(running_sequences(group)) for group in engine._groups())


def gone(served: Served) -> bool:
    state = served.web.server_state
    return not (len(served.sessions) or rows(served) or state.tasks or state.connections)


def flood(one: socket.socket, served: Served, count: int = 2000) -> None:
    """Pings, all of which the server has handled."""
    server, handled = connection(served), 0
    inner = server.handle_ping

    def handle_ping() -> None:
        nonlocal handled
        handled += 1
        inner()

    server.handle_ping = handle_ping
    one.sendall((bytes([0x80 | PING, 0x80 | 125]) + bytes(4 + 125)) * count)
    until(lambda: handled == count)


def test_a_client_that_never_reads_loses_its_session(folder: Path, tmp_path: Path) -> None:
    with (
        serving(folder, tmp_path, idle=3, limits=PATIENT, send_buffer=4096) as served,
        opened(served, 8) as one,
    ):
        stalled = session(served)
        flood(one, served)
        assert not connection(served).writable.is_set()
        send(one, BINARY, first(served))
        until(lambda: stalled._next.done() is True)  # of the message: made, and not read
        assert len(served.answer(PROMPT, 12)) == 12, "others go on"
        assert served.settled()
        assert stalled not in served.sessions._open
        until(lambda: not rows(served))
        until(lambda: not served.web.server_state.tasks)
        assert one.recv(10), "the connection itself was there: so nothing but the deadline ended the session"


def test_a_client_that_does_not_read_the_end_loses_its_session(folder: Path, tmp_path: Path) -> None:
    """Its answer fits, and fills what is kept for it, so that only the close waits."""
    with (
        serving(folder, tmp_path, idle=3, limits=PATIENT, send_buffer=4096) as served,
        opened(served, 1) as one,
    ):
        server = connection(served)
        send_binary = server.conn.send_binary

        def fills(data: bytes) -> None:
            server.transport.set_write_buffer_limits(high=server.transport.get_write_buffer_size())
            send_binary(data)

        server.transport.set_write_buffer_limits(high=1 << 30)
        server.conn.send_binary = fills
        flood(one, served)
        assert server.writable.is_set()
        send(one, BINARY, first(served))
        until(lambda: not server.writable.is_set())
        assert session(served).is_over, "it was sent, and the table holds it while the close waits"
        assert served.settled()
        until(lambda: not rows(served) and not served.web.server_state.tasks)


def test_a_client_that_never_reads_leaves_no_connection(folder: Path, tmp_path: Path) -> None:
    limits = Limits(window_seconds=5, tick_seconds=0.1)
    with (
        serving(folder, tmp_path, idle=3, limits=limits, send_buffer=4096) as served,
        opened(served, 8) as one,
    ):
        flood(one, served)
        send(one, BINARY, first(served))
        until(lambda: gone(served), 60)
        assert len(served.answer(PROMPT, 12)) == 12


def test_pings_that_are_not_read_fill_no_memory(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, limits=PATIENT, send_buffer=4096) as served, opened(served, 8) as one:
        flood(one, served, 40_000)  # 5 MB
        assert FULL // 4 < connection(served).transport.get_write_buffer_size() < FULL + (1 << 18)  # and one read's


def test_pings_that_are_read_are_answered(served: Served) -> None:
    with opened(served, 8) as one:
        for _ in range(20):
            words = os.urandom(8)
            send(one, PING, words)
            hear(one, words)
