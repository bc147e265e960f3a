"""A server that never falls silent and never comes to an end: every exchange has a deadline of its own."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from milkglass.client.remote import connection, remote, transfer
from milkglass.client.remote.connection import RetryPolicy
from milkglass.client.remote.remote import Remote, Sampling
from milkglass.errors import RemoteError, Unreachable
from tests.cli.test_processes import self_signed
from tests.client.stub import TOKEN, Handler, Stub
from tests.client.test_remote import chunk, told

SHORT = 0.3  # seconds; a deadline that is met late only makes a test slower
ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture
def stub(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.0)
    return stub


@pytest.fixture
def quick(stub: Stub) -> Iterator[Remote]:
    with Remote(stub.url, TOKEN, timeout=SHORT, retry=ONCE) as made:
        yield made


def dripping(piece: bytes, head: bytes = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n") -> Callable[[Handler], None]:
    """Sends `piece` again and again, until the client hangs up; then `server.left` is set."""

    def reply(handler: Handler) -> None:
        handler.close_connection = True
        gone = handler.server.left = threading.Event()  # type: ignore[attr-defined]
        try:
            handler.wfile.write(head)
            while not gone.wait(0.02):
                handler.wfile.write(piece)
        except OSError:
            gone.set()

    return reply


def left(stub: Stub) -> bool:
    """Whether the client has hung up, and not only gone on."""
    return bool(stub.left.wait(30))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 400 Bad\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;",  # then the header of a chunk, without end
        b"HTTP/1.1 200 OK\r\nX-Long: ",  # then a header without end
        b"HTTP/1.1 200 ",
    ],
)
def test_an_answer_that_drips_is_cut_off(stub: Stub, quick: Remote, head: bytes) -> None:
    stub.replies["GET /v1/models"] = dripping(b" ", head)
    with pytest.raises(RemoteError, match="cut off: what was waited for did not come within"):
        quick.models()
    assert left(stub)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 "])
def test_an_answer_over_tls_is_cut_off_too(stub: Stub, tmp_path: Path, head: bytes) -> None:
    certificate, secret = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, secret)
    stub.socket = context.wrap_socket(stub.socket, server_side=True)
    stub.replies["GET /v1/models"] = dripping(b" ", head)
    url = stub.url.replace("http:", "https:")
    with Remote(url, TOKEN, authority=certificate, timeout=SHORT, retry=ONCE) as remote:
        with pytest.raises(RemoteError, match="cut off"):
            remote.models()
        assert left(stub)


def test_what_was_cut_off_is_not_taken_for_whole(stub: Stub, quick: Remote) -> None:
    head = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": []}'
    stub.replies["GET /v1/models"] = dripping(b" ", head)
    with pytest.raises(RemoteError, match="cut off"):
        quick.models()


def test_a_request_is_given_the_time_that_its_size_takes(
    stub: Stub, quick: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    cut_after = connection.cut_after
    monkeypatch.setattr(
        connection, "cut_after", lambda sockets, seconds: (seen.append(seconds), cut_after(sockets, 60))[1]
    )
    stub.replies["PUT /x"] = lambda h: h.answer(200, {})
    quick.connection.json("PUT", "/x", content=bytes(8 << 20))
    assert seen == [SHORT + 512.0]


@pytest.mark.parametrize("piece", [b": still here\n\n", b"data: x", b"event: x\n\n"])
def test_comments_are_no_events(stub: Stub, quick: Remote, piece: bytes) -> None:
    stub.replies["POST /v1/completions"] = dripping(piece)
    with pytest.raises(Unreachable, match="did not come within"):
        list(quick.generate("m", [1]))
    assert left(stub)


def test_a_flood_of_comments_ends_at_once(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_COMMENT_BYTES", 20_000)
    stub.replies["POST /v1/completions"] = dripping(b": x\n\n" * 10_000)
    with Remote(stub.url, TOKEN, retry=ONCE) as patient, pytest.raises(RemoteError, match="20000 bytes of comments"):
        list(patient.generate("m", [1]))
    assert left(stub)


def test_a_job_that_tells_nothing_is_given_up(stub: Stub, quick: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "JOB_SILENCE_SECONDS", SHORT)
    first = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + told(1).encode()
    stub.replies["GET /v1/fine_tuning/jobs/j/events"] = dripping(b": still here\n\n", first)
    heard: list[str] = []
    with pytest.raises(Unreachable, match="did not come within"):
        heard += (event["message"] for event in quick.follow("j", restart_seconds=0.0))
    assert left(stub)


def test_the_time_that_a_reader_takes_is_not_the_servers(stub: Stub, quick: Remote) -> None:
    """One who reads the answer in a pager must not lose it."""
    read = threading.Event()

    def reply(handler: Handler) -> None:
        handler.events([chunk(5), chunk(6), "data: [DONE]\n\n"])
        read.set()

    stub.replies["POST /v1/completions"] = reply
    answer = quick.generate("m", [1])
    assert next(answer) == [5]
    assert read.wait(30) and not threading.Event().wait(3 * SHORT)
    assert list(answer) == [[6]]


def test_generation_ends_at_its_own_limit(stub: Stub, quick: Remote) -> None:
    stub.replies["POST /v1/completions"] = dripping(chunk(5, 6, 7).encode())
    assert list(quick.generate("m", [1], Sampling(max_tokens=4))) == [[5, 6, 7], [5]]
    assert left(stub), "the connection is closed, and the server is not read any further"
    row = {"index": 0, "token_ids": list(range(1000))}
    stub.replies["POST /v1/completions"] = lambda h: h.answer(200, {"choices": [row]})
    assert quick.complete("m", [[1]], Sampling(max_tokens=4)) == [[0, 1, 2, 3]]


def test_events_without_a_token_end_too(stub: Stub, quick: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_EMPTY_EVENTS", 10)
    stub.replies["POST /v1/completions"] = dripping(b'data: {"choices": []}\n\n')
    with pytest.raises(RemoteError, match="more than 10 events without a token"):
        list(quick.generate("m", [1]))
    assert left(stub)


def test_the_messages_of_a_job_are_counted(stub: Stub, quick: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_MESSAGES", 10)
    steps = [told(n, step=n, loss=0.5) for n in range(50)]
    stub.replies["GET /v1/fine_tuning/jobs/j/events"] = lambda h: h.events([*steps, *map(told, range(50, 61))])
    heard = []
    with pytest.raises(RemoteError, match="more than 10 messages"):
        for event in quick.follow("j"):
            heard.append(event)
    assert len(heard) == 60


def test_an_upload_gets_on_by_whole_chunks(stub: Stub, quick: Remote, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(5000))
    received = iter(range(1, 5000))
    stub.chunk_bytes = 1000
    stub.faults["PUT"] = [lambda h: h.answer(200, {"received": next(received)}) is None] * 4999
    with pytest.raises(RemoteError, match="the upload stays at 4 of 5000 bytes"):
        transfer.upload_file(quick.connection, tmp_path / "file", "0" * 64, "model", "a.safetensors")
    stub.chunk_bytes = 1
    with pytest.raises(RemoteError, match="asks for chunks of 1 bytes, 512 is the least"):
        transfer.upload_file(quick.connection, tmp_path / "file", "1" * 64, "model", "a.safetensors")


def test_a_download_has_to_get_on(stub: Stub, quick: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "RECEIVE_SECONDS", SHORT)
    stub.replies["GET /file"] = dripping(b"x")
    with pytest.raises(Unreachable, match="did not come within"):
        transfer.download_file(quick.connection, "/file", tmp_path / "file", 1 << 20)
    assert left(stub)


def test_an_empty_file_arrives(quick: Remote, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"what an earlier download left")
    transfer.download_file(quick.connection, "/file", tmp_path / "file", 0)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("number", ["1\x00", "é", "a b", "x" * 200])
def test_an_event_id_goes_back_in_a_header_and_is_checked(stub: Stub, quick: Remote, number: str) -> None:
    lines = [f"id: {number}\ndata: {{}}\n\n"]
    stub.replies["GET /v1/fine_tuning/jobs/j/events"] = lambda h: h.events(lines)
    with pytest.raises(RemoteError, match="no proper id"):
        list(quick.follow("j"))


def test_no_watch_is_left_behind(stub: Stub, quick: Remote) -> None:
    stub.replies["GET /v1/models"] = lambda h: h.answer(200, {"data": []})
    for _ in range(5):
        assert quick.models() == []
    watches: list[Any] = [one for one in threading.enumerate() if one.name == "milkglass-deadline"]
    for watch in watches:
        watch.join(30)
        assert not watch.is_alive()
