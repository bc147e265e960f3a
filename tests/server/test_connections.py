"""Connections that do nothing, stall or drip: closed in time, while everybody else is answered."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from milkglass.errors import UsageError
from milkglass.server.acceptor import Acceptor
from milkglass.server.limits import Limits
from milkglass.server.logs import BURST, RATE, Throttle
from tests.cli.test_processes import self_signed
from tests.server.kit import TOKEN, announce, put, until
from tests.server.real import Server

QUICK = Limits(head=0.5, window=0.5, linger=0.5, handshake=0.5, tick=0.1)
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
OPEN = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()


@contextmanager
def connected(server: Server, count: int = 1, small: bool = False) -> Iterator[list[socket.socket]]:
    """`small`: with a small buffer for what comes."""
    host, port = server.url.partition("://")[2].split(":")
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.settimeout(30)
            if small:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect((host, int(port)))
            made.append(one)
        yield made


def closed(one: socket.socket) -> bool:
    """Whether the peer closes it before the socket's own time is up. Reads what came before."""
    try:
        while one.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def drip(one: socket.socket, piece: bytes, seconds: float = 30.0) -> bool:
    """Send again and again. Whether the peer closes the connection meanwhile."""
    one.settimeout(0.05)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            one.sendall(piece)
            if one.recv(1 << 16) == b"":
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


def health(server: Server) -> int:
    with server.client() as client:
        return client.get("/health", timeout=20).status_code


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "home", in_thread=True, connections=QUICK) as server:
        yield server


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n" + HEAD], ids=["nothing", "half", "after an answer"])
def test_a_request_that_never_ends_is_cut(served: Server, sent: bytes) -> None:
    with connected(served) as (one,):
        one.sendall(sent)
        assert closed(one)


def test_a_connection_that_is_used_stays(tmp_path: Path) -> None:
    """Each request begins and ends between two checks of the deadlines."""
    limits = Limits(head=1.0, tick=0.1)
    with Server(tmp_path / "home", in_thread=True, connections=limits) as server, connected(server) as (one,):
        end = time.monotonic() + 3
        while time.monotonic() < end:
            one.sendall(HEAD + b"\r\n")
            answer = b""
            while b'"ok"}' not in answer:
                piece = one.recv(4096)
                assert piece, "it was closed"
                answer += piece
            time.sleep(0.02)


def test_a_byte_now_and_then_buys_no_time(served: Server) -> None:
    with connected(served) as (one,):
        one.sendall(HEAD)
        assert drip(one, b"X-A: b\r\n")


def test_a_refused_body_that_goes_on_is_cut(served: Server) -> None:
    with connected(served) as (one,):
        one.sendall(b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        assert one.recv(4096).startswith(b"HTTP/1.1 401")
        assert drip(one, b"x")


@pytest.mark.parametrize("sent", [b"", b"half"])
def test_a_body_that_stops_coming_is_cut(served: Server, sent: bytes) -> None:
    with connected(served) as (one,):
        one.sendall(b"POST /classify HTTP/1.1\r\n" + OPEN + b"Content-Length: 1000\r\n\r\n" + sent)
        assert closed(one)


def test_a_slow_body_is_taken(tmp_path: Path) -> None:
    """For three windows, at more than the least rate."""
    limits = Limits(head=30, window=0.5, body_rate=0.001, tick=0.1)
    with Server(tmp_path / "home", in_thread=True, connections=limits) as server, connected(server) as (one,):
        body = b'{"model": "nobody", "input": [1]}'
        one.sendall(b"POST /classify HTTP/1.1\r\n" + OPEN + b"Content-Type: application/json\r\n")
        one.sendall(b"Content-Length: %d\r\n\r\n" % len(body))
        for at in range(len(body)):
            one.sendall(body[at : at + 1])
            time.sleep(0.05)
        assert one.recv(4096).startswith(b"HTTP/1.1 404")


def test_an_answer_that_nobody_reads_is_cut(served: Server) -> None:
    data = b"\0" * (32 << 20)
    with served.client() as client:
        key = announce(client, "t.parquet", data, "fine-tune")  # type: ignore[arg-type]
        put(client, key, 0, data)  # type: ignore[arg-type]
        context = served.app.state.context
        (context.home.uploads / key).rename(context.home.files / key)
        context.store.files.add(_file(key, len(data)))
    with connected(served, small=True) as (one,):
        one.sendall(b"GET /v1/files/" + key.encode() + b"/content HTTP/1.1\r\n" + OPEN + b"\r\n")
        until(served.app_tasks)
        until(lambda: not served.app_tasks())
        read = 0
        while piece := _rest(one):
            read += len(piece)
        assert read < len(data), "it was sent whole: the test needs more than the kernel's buffers hold"


def _rest(one: socket.socket) -> bytes:
    try:
        return one.recv(1 << 20)
    except ConnectionError:
        return b""


def _file(key: str, size: int) -> Any:
    from milkglass.server.store import File

    return File(id=key, filename="t.parquet", bytes=size, sha256="0" * 64, purpose="fine-tune")


def test_a_download_that_is_read_slowly_goes_through(tmp_path: Path) -> None:
    limits = Limits(head=30, window=0.4, send_rate=1.0, tick=0.1)
    with Server(tmp_path / "home", in_thread=True, connections=limits) as server:
        context = server.app.state.context
        size = 24 << 20
        (context.home.files / "file-a").write_bytes(b"\0" * size)
        context.store.files.add(_file("file-a", size))
        with connected(server, small=True) as (one,):
            one.sendall(b"GET /v1/files/file-a/content HTTP/1.1\r\nConnection: close\r\n" + OPEN + b"\r\n")
            read, pause = 0, time.monotonic() + 1.5
            while piece := one.recv(1 << 16):
                read += len(piece)
                if time.monotonic() < pause:
                    time.sleep(0.02)
            assert read > size


def test_many_idle_connections_lock_nobody_out(tmp_path: Path) -> None:
    """The oldest idle ones go; one that is at work stays."""
    limits = Limits(total=24, per_address=12, reserved=2, head=60)
    with (
        Server(tmp_path / "home", in_thread=True, connections=limits) as server,
        connected(server) as (busy,),
    ):
        busy.sendall(b"POST /classify HTTP/1.1\r\n" + OPEN + b"Content-Length: 100\r\n\r\n{")
        with connected(server, 100) as many:
            for one in many:
                one.sendall(HEAD)
            assert [health(server) for _ in range(20)] == [200] * 20
            assert closed(many[0]) and closed(many[50])
            many[-1].settimeout(0.2)
            assert not closed(many[-1])
        busy.sendall(b" " * 99)
        assert busy.recv(4096).startswith(b"HTTP/1.1 400")


def test_busy_connections_are_not_closed_for_others(tmp_path: Path) -> None:
    limits = Limits(total=8, per_address=4, reserved=0, head=60, window=60)
    with Server(tmp_path / "home", in_thread=True, connections=limits) as server, connected(server, 4) as busy:
        for one in busy:
            one.sendall(b"POST /classify HTTP/1.1\r\n" + OPEN + b"Content-Length: 100\r\n\r\n{")
        until(lambda: len(server.app_tasks()) == 4)
        with connected(server) as (late,):
            assert closed(late)
        busy[0].sendall(b" " * 99)
        assert busy[0].recv(4096).startswith(b"HTTP/1.1 400")
        assert health(server) == 200, "its place is free, as it waits for nothing"


def test_tls_connections_have_deadlines_too(tmp_path: Path) -> None:
    certificate, secret = self_signed(tmp_path)
    more: dict[str, Any] = {"tls_certificate": certificate, "tls_key": secret}
    with Server(tmp_path / "home", in_thread=True, connections=QUICK, **more) as server:
        with connected(server, 2) as (silent, idle):
            context = ssl.create_default_context(cafile=str(certificate))
            with context.wrap_socket(idle, server_hostname="127.0.0.1") as wrapped:
                assert closed(wrapped)
            assert closed(silent)
        with connected(server) as (one,), context.wrap_socket(one, server_hostname="127.0.0.1") as wrapped:
            wrapped.sendall(HEAD + b"Connection: close\r\n\r\n")
            assert wrapped.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "bad",
    [
        b"HEAD /v1/files HTTP/1.1\r\n" + OPEN + b"Transfer-Encoding: chunked\r\n\r\n--x\r\n",
        b"POST /v1/files HTTP/1.1\r\n" + OPEN + b"Transfer-Encoding: chunked\r\n\r\n--x\r\n",
        b"\0" * 100,
        b"GET \xff\xfe HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"X" * 100_000,
        HEAD + b"Content-Length: -1\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_leave_no_traceback(
    served: Server, caplog: pytest.LogCaptureFixture, bad: bytes
) -> None:
    with caplog.at_level(logging.INFO), connected(served) as (one,):
        one.sendall(bad)
        assert closed(one)
        assert health(served) == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_a_method_that_nobody_knows_is_not_logged(served: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), connected(served) as (one,):
        one.sendall(b"PRIVATENAME /health HTTP/1.1\r\nConnection: close\r\n" + OPEN + b"\r\n")
        assert closed(one)
    assert "PRIVATENAME" not in caplog.text


def test_an_accept_that_fails_is_logged_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    async def go() -> None:
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        acceptor = Acceptor(listener, lambda lost: pytest.fail("nobody came"), Limits(tick=0.05))

        async def full(_: socket.socket) -> Any:
            tries.append(1)
            raise OSError(errno.EMFILE, "too many open files")

        monkeypatch.setattr(loop, "sock_accept", full, raising=False)
        acceptor.start()
        while len(tries) < 3:
            await asyncio.sleep(0.01)
        acceptor.close()
        await acceptor.wait_closed()

    asyncio.run(go())
    lines = [record for record in caplog.records if "EMFILE" in record.getMessage()]
    assert 3 <= len(lines) == len(tries) and not any(line.exc_info for line in lines)


def test_limits_fit_the_files_that_may_be_open() -> None:
    assert Limits().within(65_536) == Limits()
    small = Limits().within(1024)
    assert small.total + small.reserved == (1024 - 128) // 2 and small.per_address == small.total // 2
    assert Limits().within(10).total == 1
    with pytest.raises(UsageError, match="do not fit"):
        Limits(total=4, per_address=5)


def test_the_limit_of_open_files_is_raised() -> None:
    program = (
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "from milkglass.server.limits import raise_open_files\n"
        "print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    assert answer.stdout.split() == [str(wanted)] * 2


def lines(count: int, make: Callable[[int], logging.LogRecord], now: list[float]) -> list[str]:
    throttle = Throttle(lambda: now[0])
    return [record.getMessage() for record in map(make, range(count)) if throttle.filter(record)]


def test_lines_of_one_kind_are_limited() -> None:
    now = [0.0]

    def make(number: int) -> logging.LogRecord:
        now[0] += 1.0 if number == 99_999 else 0.0
        return logging.LogRecord("a", logging.INFO, "", 0, "line %d", (number,), None)

    kept = lines(100_000, make, now)
    assert len(kept) == BURST + 1 and RATE >= 1
    assert kept[-1] == f"line 99999 ({99_999 - BURST} more lines of this kind were left out)"


def test_kinds_made_up_on_the_way_are_limited_too() -> None:
    kept = lines(50_000, lambda n: logging.LogRecord("a", logging.INFO, "", 0, f"kind {n}", (), None), [0.0])
    assert len(kept) == 1000 + BURST


def test_an_exception_is_logged_by_its_place_and_a_long_line_is_cut() -> None:
    try:
        raise ValueError("the private text")
    except ValueError:
        found = sys.exc_info()
    record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "it failed\nprivate detail", (), found)
    assert Throttle().filter(record)
    text = logging.Formatter("%(message)s").format(record)
    assert text.startswith("it failed ValueError at test_connections.py:") and "private" not in text
    (line,) = lines(1, lambda n: logging.LogRecord("a", logging.INFO, "", 0, "x" * 10_000, (), None), [0.0])
    assert len(line) < 2100


@pytest.mark.slow
def test_health_answers_throughout_1100_idle_connections(tmp_path: Path) -> None:
    """For 70 seconds, from the address that holds them. The log stays small."""
    with Server(tmp_path / "home") as server, connected(server, 1100) as many:
        for one in many:
            one.sendall(HEAD)
        end = time.monotonic() + 70
        slowest = 0.0
        while time.monotonic() < end:
            began = time.monotonic()
            assert health(server) == 200
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.5)
        assert slowest < 2
        assert all(closed(one) for one in many)
    assert (tmp_path / "server.log").stat().st_size < 1 << 20
