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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from milkglass.errors import UsageError
from milkglass.server.connections import MAX_BUFFERED_BYTES, Acceptor, BufferedTransport
from milkglass.server.logs import BURST_LINES, LINES_PER_SECOND, Throttle
from milkglass.server.process import listen
from milkglass.server.settings import Limits
from milkglass.server.storage.store import FileRecord
from tests.cli.test_processes import self_signed
from tests.server.kit import TOKEN, settings, until
from tests.server.real import Server

QUICK = Limits(head_seconds=1.0, window_seconds=0.5, linger_seconds=0.5, handshake_seconds=0.5, tick_seconds=0.1)
BY_HAND = Limits(head_seconds=10, window_seconds=10, linger_seconds=10, tick_seconds=10_000)  # for `Clock`
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
        return client.get("/health", timeout=300).status_code


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "home", in_thread=True, connections=QUICK) as server:
        yield server


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("patient") / "home", in_thread=True) as server:
        yield server


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n" + HEAD], ids=["nothing", "half", "after an answer"])
def test_a_request_that_never_ends_is_cut(served: Server, sent: bytes) -> None:
    with connected(served) as (one,):
        one.sendall(sent)
        assert closed(one)


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


class Clock:
    """Asks a server's one connection about its deadlines, at times that the test makes up."""

    def __init__(self, server: Server) -> None:
        (accepted,) = until(lambda: list(server.acceptor._connections))
        self.session = until(lambda: accepted.protocol)
        self.now = self.session.loop.time()

    def late(self, seconds: float) -> str | None:
        """What has been late for too long, so many seconds after the last question."""
        self.now += seconds
        return self.session._missed_deadline(self.now)


def test_a_connection_that_is_used_stays(tmp_path: Path) -> None:
    """Each request begins and ends between two looks at the deadlines."""
    with Server(tmp_path / "home", in_thread=True, connections=BY_HAND) as server, connected(server) as (one,):
        clock = Clock(server)
        for number in range(4):
            assert clock.late(9) is None
            one.sendall(HEAD + b"\r\n")
            until(lambda n=number: server.answered() > n)
        assert clock.late(9) is None and clock.late(9) is None
        assert clock.late(2) == "no request came"


def test_an_event_does_not_wait_for_an_acknowledgement(tmp_path: Path) -> None:
    with Server(tmp_path / "home", in_thread=True, connections=BY_HAND) as server, connected(server):
        accepted = Clock(server).session.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "home", port=0)
    with listen(chosen, chosen.connections) as taken, pytest.raises(UsageError, match="cannot listen on 127.0.0.1"):
        listen(replace(chosen, port=taken.getsockname()[1]), chosen.connections)


def test_a_slow_body_is_taken(tmp_path: Path) -> None:
    with Server(tmp_path / "home", in_thread=True, connections=BY_HAND) as server, connected(server) as (one,):
        body = b'{"model": "nobody", "input": [1]}'.ljust(50_000)
        one.sendall(b"POST /classify HTTP/1.1\r\n" + OPEN + b"Content-Type: application/json\r\n")
        one.sendall(b"Content-Length: %d\r\n\r\n" % len(body))
        until(server.app_tasks)
        clock = Clock(server)
        assert clock.late(0) is None
        for at in (0, 12_000, 24_000):
            before = clock.session._received_bytes
            one.sendall(body[at : at + 12_000])
            until(lambda n=before: clock.session._received_bytes == n + 12_000)
            assert clock.late(11) is None
        one.sendall(body[36_000:37_000])
        assert clock.late(11) == "a request's body stopped coming"
        one.sendall(body[37_000:])
        assert one.recv(4096).startswith(b"HTTP/1.1 404")


def test_an_answer_that_nobody_reads_is_late_and_one_that_is_read_is_not(tmp_path: Path) -> None:
    size = 64 << 20  # more than the kernel keeps
    with Server(tmp_path / "home", in_thread=True, send_buffer=1 << 16, connections=BY_HAND) as server:
        context = server.app.state.context
        (context.home.files / "file-a").write_bytes(b"\0" * size)
        context.store.files.add(FileRecord(id="file-a", filename="t", bytes=size, sha256="0" * 64, purpose="model"))
        with connected(server, small=True) as (one,):
            one.sendall(b"GET /v1/files/file-a/content HTTP/1.1\r\n" + OPEN + b"\r\n")
            clock = Clock(server)
            until(lambda: clock.session.flow.write_paused)
            for _ in range(3):
                assert clock.late(9) is None
                _read(one, 8 << 20)
                until(lambda: clock.session.flow.write_paused)
            assert clock.late(9) is None and clock.late(9) is None
            # The kernel may still have carried a little, and with it a new window began.
            until(lambda: clock.late(9) == "an answer was not read")


def _read(one: socket.socket, size: int) -> None:
    while size > 0:
        size -= len(one.recv(1 << 20))


def test_many_idle_connections_lock_nobody_out(tmp_path: Path) -> None:
    """The oldest idle ones go; one that is at work stays."""
    limits = Limits(total=24, per_address=12, reserved=2, head_seconds=60)
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
    limits = Limits(total=8, per_address=4, reserved=0, head_seconds=60, window_seconds=60)
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
    context = ssl.create_default_context(cafile=str(certificate))
    with (
        Server(tmp_path / "home", in_thread=True, connections=replace(QUICK, handshake_seconds=5), **more) as server,
        connected(server, 2) as (silent, idle),
    ):
        with context.wrap_socket(idle, server_hostname="127.0.0.1") as wrapped:
            assert closed(wrapped)
        assert closed(silent)
    with (
        Server(tmp_path / "home", in_thread=True, **more) as server,
        connected(server) as (one,),
        context.wrap_socket(one, server_hostname="127.0.0.1") as wrapped,
    ):
        wrapped.sendall(HEAD + b"Connection: close\r\n\r\n")
        assert wrapped.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "bad",
    [
        b"HEAD /v1/files HTTP/1.1\r\n" + OPEN + b"Transfer-Encoding: chunked\r\n\r\n--x\r\n",
        b"POST /v1/files HTTP/1.1\r\n" + OPEN + b"Transfer-Encoding: chunked\r\n\r\n--x\r\n",
        b"\0" * 100,
        b"GET \xff\xfe HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"X" * 100_000,
        HEAD + b"Content-Length: -1\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_leave_no_traceback(
    patient: Server, caplog: pytest.LogCaptureFixture, bad: bytes
) -> None:
    with caplog.at_level(logging.INFO), connected(patient) as (one,):
        one.sendall(bad)
        assert closed(one)
        assert health(patient) == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_a_method_that_nobody_knows_is_not_logged(patient: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), connected(patient) as (one,):
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
        acceptor = Acceptor(listener, lambda lost: pytest.fail("nobody came"), Limits(tick_seconds=0.05))

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
    assert Limits().within_open_files(65_536) == Limits()
    small = Limits().within_open_files(1024)
    assert small.total + small.reserved == (1024 - 128) // 2 and small.per_address == small.total // 2
    assert Limits().within_open_files(10).total == 1
    with pytest.raises(UsageError, match="do not fit"):
        Limits(total=4, per_address=5)


def test_the_limit_of_open_files_is_raised() -> None:
    program = (
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "from milkglass.server.process import raise_open_files\n"
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
    assert len(kept) == BURST_LINES + 1 and LINES_PER_SECOND >= 1
    assert kept[-1] == f"line 99999 ({99_999 - BURST_LINES} more lines of this kind were left out)"


def test_kinds_made_up_on_the_way_are_limited_too() -> None:
    kept = lines(50_000, lambda n: logging.LogRecord("a", logging.INFO, "", 0, f"kind {n}", (), None), [0.0])
    assert len(kept) == 1000 + BURST_LINES


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


def test_a_line_whose_template_does_not_fit_its_values_is_no_error_of_the_caller() -> None:
    record = logging.LogRecord("library", logging.WARNING, "", 1, "a message", (FutureWarning,), None)
    assert Throttle().filter(record)
    assert record.getMessage() == "a message"


class Noted(asyncio.Transport):
    """Notes what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.ended = ""

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


def test_what_is_written_in_one_turn_of_the_loop_goes_out_at_once() -> None:
    async def work() -> None:
        below = Noted()
        above = BufferedTransport(below, asyncio.get_running_loop())
        above.write(b"head ")
        above.write(b"body")
        assert below.written == [] and above.get_write_buffer_size() == 9
        await asyncio.sleep(0)
        assert below.written == [b"head body"] and above.get_write_buffer_size() == 0
        above.write(b"more")
        above.write(bytes(MAX_BUFFERED_BYTES))
        assert below.written[1:] == [b"more" + bytes(MAX_BUFFERED_BYTES)], "much does not wait"
        above.write(b"end")
        above.close()
        assert below.written[2:] == [b"end"] and below.ended == "closed"
        await asyncio.sleep(0)
        assert len(below.written) == 3

    asyncio.run(work())


def test_what_waits_is_dropped_when_a_connection_is_aborted() -> None:
    async def work() -> None:
        below = Noted()
        above = BufferedTransport(below, asyncio.get_running_loop())
        above.write(b"secret")
        above.abort()
        await asyncio.sleep(0)
        assert below.written == [] and below.ended == "aborted"

    asyncio.run(work())
