"""A server that lies, or says nothing more, harms no client: each answer has an end, and no connection is left open."""

from __future__ import annotations

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
from milkglass.split.decoder.client import DecoderClient, SplitSampling, SplitStream
from milkglass.split.spec import DecoderInfo
from tests.serving import in_thread

INFO = DecoderInfo("m", 8, 300, 128, 100, 4, "t", "float32")


@contextmanager
def stream_of(handle: Callable[[ServerConnection], None], sampling: SplitSampling) -> Iterator[SplitStream]:
    """A client's stream from a server that does what `handle` does after the first message."""

    def greeted(socket: ServerConnection) -> None:
        socket.recv()
        handle(socket)

    with serve(greeted, "127.0.0.1", 0) as server, in_thread(server):
        patience = RetryPolicy(max_attempts=2, first_limit=0.01, last_limit=0.01)
        at = DecoderClient(f"http://127.0.0.1:{server.socket.getsockname()[1]}", "t", retry=patience)
        yield at.stream(INFO, sampling, "float32")


def answers(socket: ServerConnection, token: int, end: int | None) -> None:
    """This id for each message; "stop" with message `end`."""
    for number, _ in enumerate(socket):
        socket.send(frames.encode_token(frames.NextToken(token, "stop" if number == end else None)))


def test_an_answer_that_does_not_end_is_refused() -> None:
    asked: list[int] = []

    def vector_of(token: int) -> torch.Tensor:
        asked.append(token)
        assert len(asked) < 100, "the answer has no end"
        return torch.zeros(1, 8)

    with stream_of(lambda socket: answers(socket, 5, None), SplitSampling(max_tokens=8)) as stream:
        with pytest.raises(RemoteError, match=r"\b8 ids\b.*\b8\b"):
            list(stream.ids(torch.zeros(3, 8), vector_of))
        assert len(asked) == 7, "no row leaves for an id beyond the last"


@pytest.mark.parametrize("end", [0, 3, 7])
def test_an_answer_that_ends_in_time_is_taken(end: int) -> None:
    with stream_of(lambda socket: answers(socket, 5, end), SplitSampling(max_tokens=8)) as stream:
        assert list(stream.ids(torch.zeros(3, 8), lambda one: torch.zeros(1, 8))) == [5] * (end + 1)


@pytest.mark.parametrize("words", ["{}", "[]", "x", '{"error": {"message": "no"}}'])
def test_words_where_an_id_is_due_end_the_answer(words: str) -> None:
    sampling = SplitSampling(max_tokens=8)
    with stream_of(lambda socket: socket.send(words), sampling) as stream, pytest.raises(RemoteError):
        list(stream.ids(torch.zeros(3, 8), lambda one: torch.zeros(1, 8)))


def test_a_connection_that_was_given_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TOKEN_TIMEOUT_SECONDS", 0.3)
    gone = threading.Event()

    def silent(socket: ServerConnection) -> None:
        try:
            for _ in socket:
                pass
        except ConnectionClosed:  # and not by words
            gone.set()

    with stream_of(silent, SplitSampling(max_tokens=8)) as stream:
        with pytest.raises(Unreachable, match="TimeoutError"):
            list(stream.ids(torch.zeros(3, 8), lambda one: torch.zeros(1, 8)))
        assert gone.wait(20)
