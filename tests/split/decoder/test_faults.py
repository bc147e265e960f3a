"""A client that lies, repeats, drops, reorders, sends NaN, falls silent or vanishes harms itself alone."""

from __future__ import annotations

import json
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from milkglass.errors import BadUpload, RemoteError, Unauthorized, Unreachable
from milkglass.split.decoder import frames
from milkglass.split.decoder.client import DecoderServer
from milkglass.split.decoder.spec import STREAM
from tests.split.decoder.kit import PATIENCE, PROMPT, TOKEN, Served, serving


def socket(served: Served, **fields: Any) -> ClientConnection:
    """A raw connection whose first message was sent."""
    made = bare(served)
    made.send(json.dumps({"dtype": "float32", "max_tokens": 8, **fields}))
    return made


def bare(served: Served) -> ClientConnection:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return connect(f"ws://127.0.0.1:{served.port}{STREAM}", additional_headers=headers, proxy=None).__enter__()


def first(served: Served, ids: list[int] = PROMPT) -> bytes:
    return frames.encode_vectors(0, served.table[ids])


def refusal(made: ClientConnection) -> dict[str, Any]:
    """The last message of a connection that the server ends."""
    while True:
        message = made.recv(timeout=60)
        if isinstance(message, str) and "error" in message:
            with pytest.raises(ConnectionClosed):
                made.recv(timeout=60)
            return json.loads(message)["error"]


def head(kind: int, number: int, length: int) -> bytes:
    return struct.pack("<BII", kind, number, length)


def bad_frames(served: Served) -> dict[str, bytes]:
    good, table = first(served), served.table
    return {
        "empty": b"",
        "of another kind": b"\x02" + good[1:],
        "whose length is a lie": good[:5] + struct.pack("<I", 1 << 30) + good[9:],
        "cut off": good[:-3],
        "with more behind it": good + b"x",
        "that is no safetensors file": head(1, 0, 40) + b"\xff" * 40,
        "whose header is a lie": head(1, 0, 16) + struct.pack("<Q", 1 << 60) + b"12345678",
        "with NaN": frames.encode_vectors(0, table[PROMPT] * float("nan")),
        "with infinity": frames.encode_vectors(0, table[PROMPT] + float("inf")),
        "of another type": frames.encode_vectors(0, table[PROMPT].half()),
        "of another width": frames.encode_vectors(0, table[PROMPT][:, :8]),
        "without a vector": frames.encode_vectors(0, table[[]]),
        "of one vector without a shape": frames.encode_vectors(0, table[5]),
        "too long": frames.encode_vectors(0, table[[5] * 129]),
        "that is not the first": frames.encode_vectors(1, table[PROMPT]),
    }


@pytest.mark.parametrize("what", [
    "empty", "of another kind", "whose length is a lie", "cut off", "with more behind it",
    "that is no safetensors file", "whose header is a lie", "with NaN", "with infinity", "of another type",
    "of another width", "without a vector", "of one vector without a shape", "too long", "that is not the first",
])  # fmt: skip
def test_a_frame_that_is_wrong_ends_its_session_with_a_reason(served: Served, what: str) -> None:
    made = socket(served)
    made.send(bad_frames(served)[what])
    error = refusal(made)
    assert error["message"] and error["hint"] and "Traceback" not in error["message"]
    assert served.settled()
    assert served.answer(PROMPT, 4), "others are served as before"


@pytest.mark.parametrize("number", [0, 2, 3, (1 << 32) - 1])
def test_frames_that_are_repeated_or_out_of_order_are_refused(served: Served, number: int) -> None:
    made = socket(served)
    made.send(first(served))
    made.recv(timeout=60), made.recv(timeout=60)
    made.send(frames.encode_vectors(number, served.table[[5]]))
    assert "where 1 is due" in refusal(made)["message"]
    assert served.settled()


def test_two_vectors_after_the_prompt_are_refused(served: Served) -> None:
    made = socket(served)
    made.send(first(served))
    made.send(frames.encode_vectors(1, served.table[[5, 6]]))
    assert "2 vectors" in refusal(made)["message"] or "bytes" in refusal(made)["message"]


@pytest.mark.parametrize("fields", [
    {"max_tokens": 0}, {"max_tokens": "8"}, {"dtype": "int8"}, {"beams": 0}, {"temperature": -1}, {"seed": -1},
    {"resume": "x" * 500}, {"received": -1}, {"unknown": 1}, {"max_tokens": 10**6}, {"beams": 64},
    {"resume": "nobody", "received": 1},
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
        connect(f"ws://127.0.0.1:{served.port}{STREAM}", proxy=None)
    with pytest.raises(Unauthorized):
        DecoderServer(f"http://127.0.0.1:{served.port}", "another", patience=PATIENCE).connect()


def test_a_client_that_vanishes_leaves_no_session(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, resume=0.2) as served:
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
        assert "no frame came" in refusal(made)["message"]
        assert served.settled()


def test_no_more_sessions_than_the_limit(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, sessions=2) as served:
        one, two = socket(served), socket(served)
        one.recv(timeout=60), two.recv(timeout=60)
        three = socket(served)
        assert "2 sessions are open" in refusal(three)["message"]
        one.close(), two.close()
        assert served.settled()
        assert served.answer(PROMPT, 4)


def test_a_slow_client_delays_nobody(served: Served) -> None:
    slow = socket(served, max_tokens=4)
    slow.send(first(served))
    slow.recv(timeout=60), slow.recv(timeout=60)
    fast = [served.answer(PROMPT, 12) for _ in range(2)]  # while the slow one's row waits
    slow.send(frames.encode_vectors(1, served.table[[5]]))
    assert frames.decode_ids(slow.recv(timeout=60), 300).number == 1  # type: ignore[arg-type]
    assert fast[0] == fast[1]
    slow.close()


class Cutting:
    """A server's address whose connections are cut after so many messages from the server."""

    def __init__(self, served: Served, after: list[int]) -> None:
        self.server = DecoderServer(served.server.url, TOKEN, patience=PATIENCE)
        self.after, self.made = after, 0

    def connect(self) -> Any:
        made = self.server.connect()
        limit = self.after[self.made] if self.made < len(self.after) else 10**9
        self.made += 1
        return _Cut(made, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)


class _Cut:
    def __init__(self, inner: ClientConnection, limit: int) -> None:
        self.inner, self.left = inner, limit

    def recv(self, timeout: float) -> str | bytes:
        message = self.inner.recv(timeout=timeout)
        if self.left <= 0:  # it came, and is lost
            self.inner.socket.close()
            raise ConnectionClosed(None, None)
        self.left -= 1
        return message

    def send(self, message: str | bytes) -> None:
        if self.left <= 0 and isinstance(message, bytes) and self.left > -1:
            self.left = -1
        self.inner.send(message)

    def close(self) -> None:
        self.inner.close()

    def close_socket(self) -> None:
        self.inner.close_socket()


@pytest.mark.parametrize("after", [[1], [2], [3, 1, 4], [1, 1], [5]])
def test_an_answer_goes_on_after_the_connection_was_cut(served: Served, after: list[int]) -> None:
    whole = served.answer(PROMPT, 10)
    stream = served.stream(10, "float32")
    stream._server = Cutting(served, after)  # type: ignore[assignment]
    ids = [one.ids[0] for one in stream.answer(served.table[PROMPT], lambda ids: served.table[list(ids)])]
    assert ids == whole and stream.reconnects == len(after)
    assert served.settled()


def test_a_session_that_expired_is_an_error_and_not_another_answer(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, resume=0.05) as served:
        stream = served.stream(10, "float32")
        answer = stream.answer(served.table[PROMPT], lambda ids: served.table[list(ids)])
        next(answer)
        assert stream._socket is not None
        stream._socket.socket.close()
        assert served.settled()
        with pytest.raises((RemoteError, Unreachable), match="no such session|does not answer"):
            list(answer)


def test_another_connection_takes_the_session_over(served: Served) -> None:
    old = socket(served)
    name = json.loads(old.recv(timeout=60))["session"]
    old.send(first(served))
    old.recv(timeout=60)
    new = socket(served, resume=name, received=1)
    assert json.loads(new.recv(timeout=60))["expected"] == 1
    old.send(frames.encode_vectors(1, served.table[[5]]))
    assert "another connection" in refusal(old)["message"]
    goes_on(new, served, 1)
    new.close()
    assert served.settled()


def goes_on(made: ClientConnection, served: Served, number: int, count: int = 3) -> None:
    """Frames from `number` on are answered."""
    for place in range(number, number + count):
        made.send(frames.encode_vectors(place, served.table[[5]]))
        assert frames.decode_ids(made.recv(timeout=20), 300).number == place  # type: ignore[arg-type]


def test_an_idle_connection_does_not_close_a_session_that_a_newer_one_serves(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, idle=3.0) as served:
        old = socket(served, max_tokens=100)
        name = json.loads(old.recv(timeout=60))["session"]
        old.send(first(served))
        old.recv(timeout=60)
        new = socket(served, max_tokens=100, resume=name, received=1)
        new.recv(timeout=60)
        ended = threading.Thread(target=refusal, args=(old,))
        ended.start()
        number = 1
        while ended.is_alive():  # the old connection's idle time passes, the new one is at work
            goes_on(new, served, number, 1)
            number += 1
            time.sleep(0.1)
        goes_on(new, served, number)
        new.close()
        assert served.settled()


def test_a_closed_session_fails_whoever_waits_for_its_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.sessions.engine, "submit", lambda sequences: None)  # an answer that does not come
    old = socket(served)
    name = json.loads(old.recv(timeout=60))["session"]
    old.send(first(served))
    new = socket(served, resume=name, received=1)
    while "error" in (head := json.loads(new.recv(timeout=60))):  # the first frame has not arrived
        new = socket(served, resume=name, received=1)
    assert head["expected"] == 1
    new.close()
    assert "was closed" in refusal(old)["message"]
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


def test_frames_are_checked_by_the_client_too() -> None:
    good = frames.encode_ids(frames.IdsFrame(3, (5,), None))
    assert frames.decode_ids(good, 6) == frames.IdsFrame(3, (5,), None)
    for bad, size in ((good, 5), (good[:-1], 6), (b"", 6), (frames.encode_vectors(0, torch.ones(1, 2)), 6)):
        with pytest.raises(RemoteError):
            frames.decode_ids(bad, size)
    with pytest.raises(BadUpload):
        frames.decode_vectors(good, 4, "float32", 1)
