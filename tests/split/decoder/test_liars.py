"""A server that lies, or says nothing more, harms no client: each answer has an end, and no connection is left open."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from milkglass.client.remote.connection import RetryPolicy
from milkglass.errors import RemoteError, Unreachable
from milkglass.split.decoder import client, frames
from milkglass.split.decoder.client import DecoderServer, SplitSampling, SplitStream
from milkglass.split.decoder.spec import DecoderInfo

INFO = DecoderInfo("m", 8, 300, 128, 100, 4, 4, 30.0, "t", "float32")


@contextmanager
def stream_of(handle: Callable[[ServerConnection], None], sampling: SplitSampling) -> Iterator[SplitStream]:
    """A client's stream from a server that does what `handle` does after the first message."""

    def greeted(socket: ServerConnection) -> None:
        socket.recv()
        socket.send(json.dumps({"session": "x", "expected": 0}))
        handle(socket)

    with serve(greeted, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        patience = RetryPolicy(attempts=2, first=0.01, longest=0.01)
        at = DecoderServer(f"http://127.0.0.1:{server.socket.getsockname()[1]}", "t", patience=patience)
        yield at.stream(INFO, sampling, "float32")
        server.shutdown()
        thread.join(30)


def answers(socket: ServerConnection, ids: tuple[int, ...], end: int | None) -> None:
    """These ids for each frame; "stop" with frame `end`."""
    for number, _ in enumerate(socket):
        reason = "stop" if number == end else None
        socket.send(frames.encode_ids(frames.IdsFrame(number, ids, reason)))


@pytest.mark.parametrize("beams", [1, 2])
def test_an_answer_that_does_not_end_is_refused(beams: int) -> None:
    asked: list[int] = []

    def rows(ids: tuple[int, ...]) -> torch.Tensor:
        asked.extend(ids)
        assert len(asked) < 100, "the answer has no end"
        return torch.zeros(len(ids), 8)

    sampling = SplitSampling(max_tokens=8, beams=beams)
    with stream_of(lambda socket: answers(socket, (5,) * beams, None), sampling) as stream:
        with pytest.raises(RemoteError, match="goes on after 8 ids, 8 were asked for"):
            list(stream.ids(torch.zeros(3, 8), rows))
        assert len(asked) == 7 * beams, "no row leaves for an id beyond the last"


@pytest.mark.parametrize("end", [0, 3, 7])
def test_an_answer_that_ends_in_time_is_taken(end: int) -> None:
    with stream_of(lambda socket: answers(socket, (5,), end), SplitSampling(max_tokens=8)) as stream:
        assert list(stream.ids(torch.zeros(3, 8), lambda ids: torch.zeros(1, 8))) == [5] * (end + 1)


def test_a_connection_that_was_given_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENCE", 0.3)
    gone: list[threading.Event] = []

    def silent(socket: ServerConnection) -> None:
        gone.append(threading.Event())
        try:
            for _ in socket:
                pass
        except ConnectionClosed:  # and not by words, which would end the session
            gone[-1].set()

    with stream_of(silent, SplitSampling(max_tokens=8)) as stream:
        with pytest.raises(Unreachable, match="TimeoutError"):
            list(stream.ids(torch.zeros(3, 8), lambda ids: torch.zeros(1, 8)))
        assert len(gone) == 2 and all(one.wait(20) for one in gone)
