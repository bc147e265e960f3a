"""Readers and senders that stop in the middle hold nothing that others need."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from milkglass.server.limits import Limits
from tests.server.kit import TOKEN, announce, error, put, register, sha256, until
from tests.server.real import Server
from tests.server.test_connections import OPEN, connected
from tests.server.test_uploads import WEIGHTS

PATIENT = Limits(head=120, window=120, linger=120)  # what is released is not released by a deadline


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
        loader = server.app.state.context.loader
        until(lambda: loader._entries)
        (entry,) = loader._entries.values()
        until(entry.engine.done)  # it is loaded, for this stream
        until(lambda: not entry.users)
        assert server.app_tasks(), "the stream is still being written: otherwise this shows nothing"
        assert client.delete("/v1/models/llama").status_code == 200


def test_a_stream_that_nobody_reads_ends_and_frees_its_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    limits = Limits(window=0.5, body_rate=0, tick=0.1)
    with (
        Server(tmp_path / "home", in_thread=True, send_buffer=4096, connections=limits, max_batch=16) as server,
        server.client() as client,
        connected(server, small=True) as (one,),
    ):
        register(client, "llama", folders["llama-untied"])  # type: ignore[arg-type]
        client.post("/v1/completions", json={"model": "llama", "prompt": [5], "max_tokens": 1})
        (entry,) = server.app.state.context.loader._entries.values()
        engine = entry.engine.result()
        server.slow_down(engine)
        stream(one, "llama", 256, 127)  # 16 turns of 127 steps
        until(lambda: entry.users)
        until(lambda: not entry.users and not engine.active() and not server.app_tasks(), 60)
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
                one.sendall(b"POST /classify HTTP/1.1\r\nContent-Type: application/json\r\n" + OPEN)
                one.sendall(b"Content-Length: 1000\r\n\r\n" + b" " * 700)
            until(lambda: _busy(client).status_code == 503)
            assert error(_busy(client))["code"] == "busy" and _busy(client).headers["Retry-After"]
        until(lambda: _busy(client).status_code == 404)


def _busy(client: Any) -> Any:
    body = json.dumps({"model": "nobody", "input": [1]}).ljust(200)
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
