"""Readers and senders that stop in the middle hold nothing that others need."""

from __future__ import annotations

import json
import select
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from milkglass.server.http.guard import Guard
from milkglass.server.settings import Limits
from tests.server.kit import TOKEN, announce, put, register, sha256, until
from tests.server.real import Server
from tests.server.test_connections import OPEN, connected
from tests.server.test_uploads import WEIGHTS

PATIENT = Limits(
    head_seconds=120, window_seconds=120, linger_seconds=120, body_grace_seconds=120
)  # what is released is not released by a deadline


def stream(one: socket.socket, model: str, rows: int, tokens: int) -> None:
    body = {"model": model, "prompt": [[5]] * rows, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
    one.sendall(head + OPEN + b"Content-Length: %d\r\n\r\n" % len(data) + data)


def test_a_stream_that_nobody_reads_does_not_keep_its_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """More is written than all buffers hold, so the stream itself cannot end."""
    with (
        Server(tmp_path / "home", in_thread=True, send_buffer=4096, connections=PATIENT) as server,
        server.client() as client,
        connected(server, small=True) as (one,),
    ):
        register(client, "llama", folders["llama-untied"])  # type: ignore[arg-type]
        stream(one, "llama", 16, 100)
        loader = server.app.state.context.model_cache
        until(lambda: loader._entries)
        (entry,) = loader._entries.values()
        until(entry.engine.done)  # it is loaded, for this stream
        until(lambda: not entry.user_count)
        assert server.app_tasks(), "the stream is still being written: otherwise this shows nothing"
        assert client.delete("/v1/models/llama").status_code == 200


def test_a_stream_that_nobody_reads_ends_and_frees_its_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    limits = Limits(window_seconds=0.5, min_body_rate=0, tick_seconds=0.1)
    with (
        Server(tmp_path / "home", in_thread=True, send_buffer=4096, connections=limits, max_batch=16) as server,
        server.client() as client,
        connected(server, small=True) as (one,),
    ):
        register(client, "llama", folders["llama-untied"])  # type: ignore[arg-type]
        client.post("/v1/completions", json={"model": "llama", "prompt": [5], "max_tokens": 1})
        (entry,) = server.app.state.context.model_cache._entries.values()
        engine = entry.engine.result()
        server.slow_down(engine)
        stream(one, "llama", 256, 127)  # 16 turns of 127 steps
        until(lambda: entry.user_count)
        until(lambda: not entry.user_count and not engine.is_active() and not server.app_tasks(), 60)
        assert server.steps < 16 * 127


@pytest.mark.parametrize(
    ("key", "offset", "length", "status"),
    [("upload-x", 0, 60 << 20, 404), (None, 5, 60 << 20, 409), (None, 0, 60 << 20, 400)],
    ids=["unknown", "offset", "too long"],
)
def test_a_chunk_that_cannot_be_taken_is_refused_unread(
    tmp_path: Path, key: str | None, offset: int, length: int, status: int
) -> None:
    with (
        Server(tmp_path / "home", in_thread=True, connections=PATIENT) as server,
        server.client() as client,
        connected(server) as (one,),
    ):
        key = key or announce(client, "m.safetensors", WEIGHTS, "model")  # type: ignore[arg-type]
        one.sendall(_put(key, offset, length) + b"x")
        assert one.recv(4096).startswith(b"HTTP/1.1 %d" % status)


def test_a_chunk_without_a_length_is_refused_unread(tmp_path: Path) -> None:
    """A transfer coding outdoes a Content-Length that is there as well."""
    with Server(tmp_path / "home", in_thread=True, connections=PATIENT) as server, server.client() as client:
        key = announce(client, "m.safetensors", WEIGHTS, "model")  # type: ignore[arg-type]
        coding = b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
        bare = _put(key, 0, 10).partition(b"Content-Length")[0]
        for head in (bare, bare + b"Content-Length: 10\r\n"):
            with connected(server) as (one,):
                one.sendall(head + coding)  # 64 MiB would follow
                answer = one.recv(4096)
                assert answer.startswith(b"HTTP/1.1 411")
        assert client.get(f"/v1/uploads/{key}").json()["received"] == 0


def _put(key: str, offset: int, length: int, checksum: str = "0" * 64) -> bytes:
    head = f"PUT /v1/uploads/{key} HTTP/1.1\r\nUpload-Offset: {offset}\r\nChunk-SHA256: {checksum}\r\n"
    return head.encode() + OPEN + b"Content-Length: %d\r\n\r\n" % length


def test_a_chunk_that_stops_coming_is_kept_out_of_memory_and_out_of_the_way(tmp_path: Path) -> None:
    """Another request may send the same chunk meanwhile: a client whose connection broke does."""
    data = bytes(8 << 20)
    with Server(tmp_path / "home", in_thread=True, connections=PATIENT) as server, server.client() as client:
        key = announce(client, "m.safetensors", data, "model")  # type: ignore[arg-type]
        work = server.app.state.context.home.work
        with connected(server) as (one,):
            one.sendall(_put(key, 0, len(data), sha256(data)) + data[:-1])
            until(server.app_tasks)
            assert put(client, key, 0, data[: 4 << 20]).json()["received"] == 4 << 20  # type: ignore[arg-type]
            one.sendall(data[-1:])
            assert one.recv(4096).startswith(b"HTTP/1.1 409")
        until(lambda: not server.app_tasks())
        assert client.get(f"/v1/uploads/{key}").json()["received"] == 4 << 20
        assert not list(work.iterdir())


def test_bodies_in_memory_share_a_budget(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "home", in_thread=True, connections=PATIENT, max_json=1000, max_held=1500) as server,
        server.client() as client,
    ):
        with connected(server, 2) as many:
            for one in many:
                one.sendall(_post(1000) + b" " * 700)
            until(lambda: memory_of(server.app).used_bytes == 1400)
            assert _busy(client).status_code == 404, "one of those that are still arriving makes room"
            (evicted,) = select.select(many, [], [], 30)[0]
            answer = evicted.recv(4096)
            assert answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer.lower() and b'"busy"' in answer
            until(lambda: memory_of(server.app).used_bytes == 700)
        until(lambda: memory_of(server.app).used_bytes == 0)


def test_bodies_that_drip_keep_nobody_out(tmp_path: Path) -> None:
    """Five of 90 % each, that no deadline ends: a request that needs their memory is answered."""
    with (
        Server(tmp_path / "home", in_thread=True, connections=PATIENT, max_json=100_000, max_held=500_000) as server,
        server.client() as client,
        connected(server, 5) as many,
    ):
        for one in many:
            one.sendall(_post(100_000) + b" " * 90_000)
        until(lambda: memory_of(server.app).used_bytes == 450_000)
        for _ in range(3):
            for one in many:
                one.sendall(b" " * 500)
            assert _busy(client, 90_000).status_code == 404
            assert memory_of(server.app).used_bytes <= 500_000


def test_a_body_that_drips_has_a_last_moment(tmp_path: Path) -> None:
    """However fast it is: `PATIENT` lets it go on for two minutes."""
    limits = replace(PATIENT, body_grace_seconds=0.5, expected_body_rate=1e6)
    with Server(tmp_path / "home", in_thread=True, connections=limits) as server, connected(server) as (one,):
        one.sendall(_post(1_000_000))
        until(lambda: one.send(b" " * 100) and select.select([one], [], [], 0.02)[0])
        assert one.recv(4096).startswith(b"HTTP/1.1 408")
        until(lambda: memory_of(server.app).used_bytes == 0)


def memory_of(app: Any) -> Any:
    """What the guard counts."""
    layer = app.middleware_stack
    while not isinstance(layer, Guard):
        layer = layer.app
    return layer._memory


def _post(length: int) -> bytes:
    head = b"POST /classify HTTP/1.1\r\nContent-Type: application/json\r\n"
    return head + OPEN + b"Content-Length: %d\r\n\r\n" % length


def _busy(client: Any, size: int = 200) -> Any:
    body = json.dumps({"model": "nobody", "input": [1]}).ljust(size)
    return client.post("/classify", content=body, headers={"Content-Type": "application/json"})


def test_the_token_is_asked_for_before_a_body_counts(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "home", in_thread=True, connections=PATIENT, max_json=1000, max_held=1000) as server,
        server.client() as client,
        connected(server, 3) as many,
    ):
        for one in many:
            one.sendall(b"POST /classify HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + b" " * 700)
            assert one.recv(4096).startswith(b"HTTP/1.1 401")
        assert TOKEN and _busy(client).status_code == 404
