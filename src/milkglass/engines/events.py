"""Reads the server-sent events of one answer, within limits of size and time that the engine cannot extend."""

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
FRAME = 128  # bytes of an event besides its data: names of fields, an id
TIMED_OUT = "try again; if it goes on like this, the engine is overloaded, or not to be trusted"


@dataclass
class Traffic:
    """The bytes of bodies that were sent and received, without headers."""

    sent: int = 0
    received: int = 0


@final
class AnswerEvents:
    """The events of one answer, in order. Close it (`aclosing`), so that the connection is given back.

    Attributes:
        silence: seconds that the next event may take. Comments do not count as events.
    """

    def __init__(self, answer: httpx2.Response, silence: float, traffic: Traffic) -> None:
        # Whatever it says: what is no event is not read, and a charset could name any of Python's codecs
        answer.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        answer.stream = self._bytes = _BoundedBytes(answer.stream, traffic)
        self._events: Any = aiter(httpx2.EventSource(answer, max_event_size=MAX_EVENT))
        self.silence = silence

    async def next(self) -> str | None:
        """Returns the data of the next event that has some, or None at the end of the answer.

        Raises:
            RemoteError: an event, or the comments, have too many bytes.
            Unreachable: no event came in time.
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
        """Stops reading the answer."""
        await self._events.aclose()


class _BoundedBytes(httpx2.AsyncByteStream):
    """The bytes of an answer, with a limit on those that are no event.

    Attributes:
        no_events: how many bytes came so far that are not part of an event.
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
