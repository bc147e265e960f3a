"""The server-sent events of one answer: their data, within bounds of size and time that the engine cannot stretch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, final

import httpx2

from milkglass.client.remote.strict_json import HINT
from milkglass.errors import RemoteError, Unreachable

MAX_EVENT = 4 << 20  # bytes of one event
MAX_COMMENTS = 256 << 10  # bytes of a whole answer that are no event: comments, and events without data
FRAME = 128  # bytes of an event beside its data: names of fields, an id
TIMED_OUT = "try again; if it goes on like this, the engine is overloaded, or not to be trusted"


@dataclass
class Traffic:
    """Bytes of bodies that crossed so far, those of headers not among them."""

    sent: int = 0
    received: int = 0


@final
class AnswerEvents:
    """The events of one answer, in order; close it (`aclosing`), so that the connection is given back.

    Attributes:
        silence: Seconds that an event may take from when it is asked for; comments do not count.
    """

    def __init__(self, answer: httpx2.Response, silence: float, traffic: Traffic) -> None:
        # Whatever it says: what is no event is not read, and a charset could name any of Python's codecs
        answer.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        answer.stream = self._bytes = _BoundedBytes(answer.stream, traffic)
        self._events: Any = aiter(httpx2.EventSource(answer, max_event_size=MAX_EVENT))
        self.silence = silence

    async def next(self) -> str | None:
        """Return the data of the next event that has some; None at the end of the answer.

        Raises:
            RemoteError: An event, or what is no event, has too many bytes.
            Unreachable: No event came in time.
        """
        try:
            async with asyncio.timeout(self.silence):
                while (event := await anext(self._events, None)) is not None:
                    if event.data:
                        self._bytes.no_events -= len(event.data) + FRAME
                        return str(event.data)
            return None
        except TimeoutError as error:
            raise Unreachable(f"the answer was silent for {self.silence:g} s", TIMED_OUT) from error
        except httpx2.SSEError as error:
            raise RemoteError(f"an event of the answer has more than {MAX_EVENT} bytes", HINT) from error

    async def aclose(self) -> None:
        """Read no more of the answer."""
        await self._events.aclose()


class _BoundedBytes(httpx2.AsyncByteStream):
    """The bytes of an answer, of which not too many may be no event.

    Attributes:
        no_events: Bytes so far, less those of the events that were read.
    """

    def __init__(self, stream: Any, traffic: Traffic) -> None:
        self._stream, self._traffic, self.no_events = stream, traffic, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self.no_events += len(part)
            self._traffic.received += len(part)
            if self.no_events > MAX_EVENT + MAX_COMMENTS:
                raise RemoteError(f"the answer has more than {MAX_COMMENTS} bytes of comments", HINT)
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
