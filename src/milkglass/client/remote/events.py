"""Server-sent events, read as they come.

Out of scope: how a connection is made, and what an event means (responses.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import httpx2

from milkglass.client.remote.deadline import Watch
from milkglass.client.remote.strict_json import HINT
from milkglass.errors import RemoteError

MAX_EVENT = 4 << 20  # bytes of an event, and of all comments before it
EVENT_ID = re.compile(r"[A-Za-z0-9_.-]{0,128}")


@final
@dataclass(frozen=True)
class ServerEvents:
    """An answer that is being read.

    Attributes:
        answer: its status and headers have arrived.
        watch: cuts the connection when its time is up.
        silence: seconds that an event may take, by default.
    """

    answer: httpx2.Response
    watch: Watch
    silence: float


def server_events(stream: ServerEvents, quiet: float | None = None) -> Iterator[tuple[str | None, str, str]]:
    """(id, event, data) of each server-sent event.

    quiet: seconds without an event after which the connection is cut; comments do not count as events, and the time
    that the caller takes for an event is not counted. Raises RemoteError for more than MAX_EVENT bytes that end no
    event, and for an id that cannot go back to the server in a header."""
    quiet = stream.silence if quiet is None else quiet
    number: str | None = None
    kind, data, size = "message", list[str](), 0
    stream.watch.extend(quiet)
    for line in _lines(stream.answer):
        size += len(line) + 1
        if size > MAX_EVENT:
            raise RemoteError(f"an event of the answer has more than {MAX_EVENT} bytes", HINT)
        if not line:
            if data:
                stream.watch.pause()
                yield number, kind, "\n".join(data)
                stream.watch.extend(quiet)
                size = 0
            kind, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id":
            number = _event_id(value)


def _event_id(value: str) -> str:
    if not EVENT_ID.fullmatch(value):
        raise RemoteError("an event of the answer has no proper id", HINT)
    return value


def _lines(answer: httpx2.Response) -> Iterator[str]:
    rest = b""
    for chunk in answer.iter_raw():
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r").decode("utf-8", "replace") for line in whole)
        if len(rest) > MAX_EVENT:
            raise RemoteError(f"a line of the answer has more than {MAX_EVENT} bytes", HINT)
    if rest:
        yield rest.decode("utf-8", "replace")
