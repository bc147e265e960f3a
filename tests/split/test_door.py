"""Frames at the door: what is not this half's is refused, in the one shape of errors, and nothing of it is logged."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import save
from starlette.testclient import TestClient

from milkglass.errors import CorruptCheckpoint
from milkglass.hidden_states import frames
from milkglass.server.process import WebServer
from milkglass.server.settings import Limits, ServerSettings
from milkglass.split import server as apps
from milkglass.split.server import ServerHalf, create_app
from milkglass.threat.observations import Activations
from tests.server.kit import TOKEN, error, until
from tests.server.test_stalled import memory_of
from tests.split.kit import Made
from tests.tiny import TEXTS

WIDTH = 32


@pytest.fixture(scope="module")
def served(noisy: Made) -> Iterator[TestClient]:
    with TestClient(create_app(noisy.other(), TOKEN), headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client
        assert client.get("/health").json() == {"status": "ok"}


def states(rows: int = 4, width: int = WIDTH, layer: int = 1, value: float = 0.5, pooled: int = 0) -> bytes:
    hidden = torch.full((rows, width), value)
    return raw(hidden=hidden, lengths=torch.tensor([rows]), about=torch.tensor([layer, pooled]))


def raw(**parts: torch.Tensor) -> bytes:
    """As anybody could write it, unchecked."""
    return save(parts)


def post(served: TestClient, body: bytes, **headers: str) -> Any:
    return served.post("/v1/split", content=body, headers=headers)


def test_a_frame_is_answered_with_numbers(served: TestClient, noisy: Made) -> None:
    frame = noisy.half().client.frame(TEXTS)
    answer = post(served, frame)
    assert answer.status_code == 200
    assert answer.json().keys() == {"object", "logits"}
    assert np.array_equal(np.asarray(answer.json()["logits"], np.float32), noisy.other().answer(frame))
    report = served.get("/v1/split").json()
    assert (report["method"], report["layer"], report["width"], report["classes"]) == ("dp-forward", 1, WIDTH, 2)


def test_only_the_token_opens(served: TestClient) -> None:
    bare = TestClient(served.app)
    for given in (None, "Bearer wrong", "Bearer"):
        headers = {} if given is None else {"Authorization": given}
        for answer in (bare.get("/v1/split", headers=headers), bare.post("/v1/split", content=b"x", headers=headers)):
            assert answer.status_code == 401
            assert error(answer)["code"] == "unauthorized"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "safetensors"),
        (b"\x80\x04K\x01.", "safetensors"),  # a pickle
        (b"the private diagnosis", "safetensors"),
        (states()[:-8], "safetensors"),
        (states(width=16), "16 wide, 32 "),
        (states(layer=0), "layer 0"),
        (states(rows=1, pooled=1), "pooled True"),
        (states(value=float("nan")), "not finite"),
        (states(value=float("inf")), "not finite"),
        (states(rows=200), "200 tokens long, at most 130 "),
        (raw(hidden=torch.zeros(4, WIDTH), lengths=torch.tensor([3]), about=torch.tensor([1, 0])), "the 4 rows"),
        (raw(hidden=torch.zeros(4, WIDTH), lengths=torch.tensor([5, -1]), about=torch.tensor([1, 0])), "the 4 rows"),
        (raw(hidden=torch.zeros(4, WIDTH), lengths=torch.tensor([4])), "2 tensors"),
        (
            raw(hidden=torch.zeros(4, WIDTH).double(), lengths=torch.tensor([4]), about=torch.tensor([1, 0])),
            "hidden is torch.float64",
        ),
        (
            raw(hidden=torch.zeros(0, WIDTH), lengths=torch.zeros(0, dtype=torch.int64), about=torch.tensor([1, 0])),
            "0 texts, 1 to 256 ",
        ),
        (
            raw(hidden=torch.zeros(300, WIDTH), lengths=torch.ones(300, dtype=torch.int64), about=torch.tensor([1, 0])),
            "300 texts, 1 to 256 ",
        ),
    ],
)  # fmt: skip
def test_frames_that_are_refused(served: TestClient, body: bytes, message: str) -> None:
    answer = post(served, body)
    assert answer.status_code == 400
    assert message in error(answer)["message"]
    assert "private diagnosis" not in answer.text


def test_a_body_that_is_too_large_is_not_read(noisy: Made) -> None:
    half = noisy.other()
    small = replace(half, info=replace(half.info, max_body=1000))
    with TestClient(create_app(small, TOKEN), headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        answer = post(client, states(rows=40))
        assert (answer.status_code, error(answer)["code"]) == (413, "too_large")
        assert client.request("GET", "/v1/split", content=b"x" * 100).status_code == 413


def test_states_that_no_number_answers(served: TestClient) -> None:
    answer = post(served, states(value=3e38))
    assert answer.status_code == 400 and "too large" in error(answer)["message"]


def test_too_many_at_a_time_are_sent_away(served: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps, "MAX_WAITING_FRAMES", 0)
    answer = post(served, states())
    assert (answer.status_code, error(answer)["code"]) == (503, "busy")
    assert answer.headers["Retry-After"]


def test_bodies_that_stop_coming_take_nobodys_place(noisy: Made, tmp_path: Path) -> None:
    """As many as may wait, and more, each with the first bytes of its body."""
    app = create_app(noisy.other(), TOKEN)
    settings = ServerSettings(tmp_path, token=TOKEN)
    with listening(app, settings, Limits(head_seconds=60, window_seconds=60)) as (host, port), ExitStack() as stack:
        head = f"POST /v1/split HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 60000\r\n\r\n0"
        for _ in range(apps.MAX_WAITING_FRAMES + 4):
            stack.enter_context(socket.create_connection((host, port))).sendall(head.encode())
        with httpx2.Client(base_url=f"http://{host}:{port}", headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            for _ in range(3):
                assert client.post("/v1/split", content=noisy.half().client.frame(TEXTS)).status_code == 200


def test_frames_that_drip_keep_nobody_out(noisy: Made, tmp_path: Path) -> None:
    """As many as the server keeps in memory, of 90 % each, faster than the least rate."""
    frame = noisy.half().client.frame(TEXTS)
    half = noisy.other()
    app = create_app(replace(half, info=replace(half.info, max_body=len(frame))), TOKEN)
    part = len(frame) * 9 // 10
    with (
        listening(
            app, ServerSettings(tmp_path, token=TOKEN), Limits(head_seconds=60, window_seconds=60, linger_seconds=60)
        ) as (host, port),
        ExitStack() as stack,
    ):
        head = f"POST /v1/split HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += f"Content-Length: {len(frame)}\r\n\r\n"
        many = [stack.enter_context(socket.create_connection((host, port))) for _ in range(apps.MAX_HELD_BODIES)]
        for one in many:
            one.sendall(head.encode() + frame[:part])
        until(lambda: memory_of(app).used_bytes == apps.MAX_HELD_BODIES * part)
        with httpx2.Client(base_url=f"http://{host}:{port}", headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            for _ in range(3):
                for one in many:
                    one.sendall(b"0")
                assert client.post("/v1/split", content=frame).status_code == 200


def test_a_body_that_stops_coming_is_cut(noisy: Made, tmp_path: Path) -> None:
    app = create_app(noisy.other(), TOKEN)
    limits = Limits(window_seconds=0.5, tick_seconds=0.1)
    with (
        listening(app, ServerSettings(tmp_path, token=TOKEN), limits) as address,
        socket.create_connection(address) as one,
    ):
        one.settimeout(30)
        head = f"POST /v1/split HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 60000\r\n\r\n0"
        one.sendall(head.encode())
        assert one.recv(1) == b""


@contextmanager
def listening(app: FastAPI, settings: ServerSettings, limits: Limits) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = WebServer(app, settings, limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started)
            yield listener.getsockname()[:2]
        finally:
            server.should_exit = True
            thread.join(20)


def test_nothing_of_a_frame_is_logged(served: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "milkglass.server"):
        post(served, states(), **{"X-Note": "zanzibar"})
        post(served, b"zanzibar")
        served.get("/v1/zanzibar")
    lines = [record.getMessage() for record in caplog.records if record.name == "milkglass.server"]
    assert len(lines) == 3 and lines[0].startswith("POST /v1/split 200")
    assert "zanzibar" not in " ".join(lines)


def test_a_server_half_that_is_damaged(fresh: Made) -> None:
    weights = fresh.server / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpoint, match="this half's"):
        ServerHalf.open(fresh.server)
    (fresh.server / "config.json").write_text("{}", "utf-8")
    with pytest.raises(CorruptCheckpoint, match=r"config\.json .*entry"):
        ServerHalf.open(fresh.server)


def test_a_frame_of_the_client_decodes_to_itself(noisy: Made) -> None:
    sent = frames.decode(noisy.half().client.frame(TEXTS))
    assert isinstance(sent, Activations) and (sent.layer, sent.pooled) == (1, False)


def test_the_token_lies_in_the_home(noisy: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(apps, "run", lambda app, settings, command: started.append((app, settings, command)))
    monkeypatch.delenv("MILKGLASS_PASSPHRASE", raising=False)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
    apps.serve(apps.open_half(noisy.server), tmp_path / "home", 0, None)
    (app, settings, command) = started[0]
    token = (tmp_path / "home" / "token").read_text("ascii").strip()
    assert (settings.host, settings.port, command) == ("127.0.0.1", 0, "milkglass split serve")
    assert TestClient(app).get("/v1/split", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    apps.serve(apps.open_half(noisy.server), tmp_path / "none", 0, "a token of the owner".replace(" ", "-"))
    assert not (tmp_path / "none").exists(), "a token that is given needs no home"
