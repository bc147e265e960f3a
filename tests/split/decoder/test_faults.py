"""A client that lies, sends NaN, falls silent or vanishes harms itself alone."""

from __future__ import annotations

import json
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from milkglass.errors import BadUpload, RemoteError, Unauthorized, Unreachable
from milkglass.server.inference.generator import ModelFailed
from milkglass.split.decoder import frames
from milkglass.split.decoder.client import DecoderClient
from milkglass.split.decoder.server import SplitSequence
from milkglass.split.spec import STREAM_PATH
from tests.split.decoder.kit import PATIENCE, PROMPT, TOKEN, Served, serving


def socket(served: Served, **fields: Any) -> ClientConnection:
    """A raw connection whose first message was sent."""
    made = bare(served)
    made.send(json.dumps({"dtype": "float32", "max_tokens": 8, **fields}))
    return made


def bare(served: Served) -> ClientConnection:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return connect(f"ws://127.0.0.1:{served.port}{STREAM_PATH}", additional_headers=headers, proxy=None).__enter__()


def first(served: Served, ids: list[int] = PROMPT) -> bytes:
    return frames.encode_vectors(served.table[ids])


def refusal(made: ClientConnection) -> dict[str, Any]:
    """The last message of a connection that the server ends."""
    while True:
        message = made.recv(timeout=60)
        if isinstance(message, str) and "error" in message:
            with pytest.raises(ConnectionClosed):
                made.recv(timeout=60)
            return json.loads(message)["error"]


def bad_frames(served: Served) -> dict[str, bytes]:
    good, table = first(served), served.table
    return {
        "empty": b"",
        "of another kind": frames.encode_token(frames.NextToken(5, None)),
        "with a second tensor": save({"x": table[PROMPT], "y": table[PROMPT]}),
        "cut off": good[:-3],
        "with more behind it": good + b"x",
        "that is no safetensors file": b"\xff" * 40,
        "whose header is a lie": struct.pack("<Q", 1 << 60) + b"12345678",
        "with NaN": frames.encode_vectors(table[PROMPT] * float("nan")),
        "with infinity": frames.encode_vectors(table[PROMPT] + float("inf")),
        "of another type": frames.encode_vectors(table[PROMPT].half()),
        "of another width": frames.encode_vectors(table[PROMPT][:, :8]),
        "without a vector": frames.encode_vectors(table[[]]),
        "of one vector without a shape": frames.encode_vectors(table[5]),
        "too long": frames.encode_vectors(table[[5] * 129]),
    }


@pytest.mark.parametrize("what", [
    "empty", "of another kind", "with a second tensor", "cut off", "with more behind it",
    "that is no safetensors file", "whose header is a lie", "with NaN", "with infinity", "of another type",
    "of another width", "without a vector", "of one vector without a shape", "too long",
])  # fmt: skip
def test_a_frame_that_is_wrong_ends_its_session_with_a_reason(served: Served, what: str) -> None:
    made = socket(served)
    made.send(bad_frames(served)[what])
    error = refusal(made)
    assert error["message"] and error["hint"] and "Traceback" not in error["message"]
    assert served.settled()
    assert served.answer(PROMPT, 4), "others are served as before"


def test_two_vectors_after_the_prompt_are_refused(served: Served) -> None:
    made = socket(served)
    made.send(first(served))
    made.send(frames.encode_vectors(served.table[[5, 6]]))
    message = refusal(made)["message"]
    assert "2 vectors" in message or "bytes" in message


@pytest.mark.parametrize("fields", [
    {"max_tokens": 0}, {"max_tokens": "8"}, {"dtype": "int8"}, {"temperature": -1}, {"seed": -1}, {"unknown": 1},
    {"max_tokens": 10**6}, {"beams": 2}, {"resume": "x"},
])  # fmt: skip
def test_a_first_message_that_is_wrong_is_refused(served: Served, fields: dict[str, Any]) -> None:
    assert refusal(socket(served, **fields))["message"]
    assert served.settled()


@pytest.mark.parametrize("message", ["", "{", "[]", "null", '{"max_tokens": NaN}', "x" * 5000, b"bytes"])
def test_a_first_message_that_is_no_object_is_refused(served: Served, message: str | bytes) -> None:
    made = bare(served)
    made.send(message)
    assert refusal(made)["message"]


def test_without_the_token_there_is_no_stream(served: Served) -> None:
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"ws://127.0.0.1:{served.port}{STREAM_PATH}", proxy=None)
    with pytest.raises(Unauthorized):
        DecoderClient(f"http://127.0.0.1:{served.port}", "another", retry=PATIENCE).connect()


def test_a_client_that_vanishes_leaves_no_session(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as served:
        vanished = [socket(served) for _ in range(5)]
        for made in vanished:
            made.send(first(served))
            made.recv(timeout=60)
            made.socket.close()  # without a word
        assert served.answer(PROMPT, 4)
        assert served.settled()
        for made in vanished:
            made.close()  # ends its thread, which would draw pings from `random` while other tests run


def test_a_client_that_falls_silent_is_told_so_and_leaves_no_session(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, idle=0.3) as served:
        made = socket(served)
        made.send(first(served))
        assert "no message" in refusal(made)["message"]
        assert served.settled()


def test_no_more_sessions_than_the_limit(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, sessions=2) as served:
        one, two = socket(served), socket(served)
        for made in (one, two):
            made.send(first(served))
            made.recv(timeout=60)
        three = socket(served)
        assert "2 sessions" in refusal(three)["message"]
        one.close(), two.close()
        assert served.settled()
        assert served.answer(PROMPT, 4)


def test_a_slow_client_delays_nobody(served: Served) -> None:
    slow = socket(served, max_tokens=4)
    slow.send(first(served))
    slow.recv(timeout=60)
    fast = [served.answer(PROMPT, 12) for _ in range(2)]  # while the slow one's row waits
    slow.send(frames.encode_vectors(served.table[[5]]))
    assert frames.decode_token(slow.recv(timeout=60), 300).reason is None  # type: ignore[arg-type]
    assert fast[0] == fast[1]
    slow.close()


@pytest.mark.parametrize("after", [0, 3])
def test_a_lost_connection_is_an_error_and_its_session_ends(served: Served, after: int) -> None:
    stream, calls = served.stream(10, "float32"), 0
    made: list[ClientConnection] = []
    connected = DecoderClient.connect

    class Kept(DecoderClient):
        def connect(self) -> ClientConnection:
            made.append(connected(self))
            return made[-1]

    def cut(one: int) -> torch.Tensor:
        nonlocal calls
        if calls == after:
            made[0].socket.close()
        calls += 1
        return served.table[[one]]

    stream._client = Kept(served.server.url, TOKEN, retry=PATIENCE)
    with pytest.raises(Unreachable) as caught:
        list(stream.ids(served.table[PROMPT], cut))
    assert "ask again" in caught.value.hint and calls == after + 1
    assert served.settled()
    assert len(served.answer(PROMPT, 4)) == 4


def test_an_engine_that_fails_ends_the_session_with_a_reason(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it says of a session whose client is gone is dropped."""

    def failing(sequences: list[SplitSequence]) -> None:
        for one in sequences:
            one.fail(ModelFailed("the model ran out of memory"))

    monkeypatch.setattr(served.sessions.engine, "submit", failing)
    made = socket(served)
    made.send(first(served))
    assert "out of memory" in refusal(made)["message"]
    assert served.settled()


@pytest.mark.slow
def test_fifty_sessions_for_two_minutes(folder: Path, tmp_path: Path) -> None:
    """None is lost, none is left, and memory does not grow."""
    import resource

    with serving(folder, tmp_path, sessions=64) as served:
        whole = served.answer(PROMPT, 20)
        until, wrong, done = time.monotonic() + 120, list[Any](), [0] * 50

        def work(place: int) -> None:
            while time.monotonic() < until:
                try:
                    result = served.answer(PROMPT, 20)
                except Exception as error:  # noqa: BLE001
                    wrong.append(error)
                    return
                if result != whole:
                    wrong.append(result)
                done[place] += 1

        threads = [threading.Thread(target=work, args=(n,)) for n in range(50)]
        for one in threads:
            one.start()
        time.sleep(40)
        early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for one in threads:
            one.join(180)
        late = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{sum(done)} answers, {len(wrong)} wrong, {early >> 10} MiB after 40 s, {late >> 10} MiB at the end")
        assert not wrong and min(done) > 0
        assert served.settled()
        assert late < early * 1.1


def test_messages_are_checked_by_the_client_too() -> None:
    good = frames.encode_token(frames.NextToken(5, None))
    assert frames.decode_token(good, 6) == frames.NextToken(5, None)
    many = save({"ids": torch.zeros(1000, dtype=torch.int64)})
    ended = save({"ids": torch.tensor([5, 3])})
    real = save({"ids": torch.tensor([5.0, 0.0])})
    for bad, size in ((good, 5), (good[:-1], 6), (b"", 6), (frames.encode_vectors(torch.ones(1, 2)), 6),
                      (many, 6), (ended, 6), (real, 6)):  # fmt: skip
        with pytest.raises(RemoteError):
            frames.decode_token(bad, size)
    with pytest.raises(BadUpload):
        frames.decode_vectors(good, 4, "float32", 1)
