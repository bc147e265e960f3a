"""Server-sent events, read from an asynchronous stream of bytes: only their data, which is all that engines use.

Whole events are cut out of the bytes that arrived, not line by line: an event of an engine is one line, and a proxy
reads thousands of them a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import final

from milkglass.client.remote.exchange import MAX_COMMENTS, MAX_EVENT
from milkglass.client.remote.strict_json import HINT
from milkglass.errors import RemoteError, Unreachable

TIMED_OUT = "try again; if it goes on like this, the engine is overloaded, or not to be trusted"


@final
class EventReader:
    """The events of one answer, in order.

    Attributes:
        silence: seconds that an event may take from when it is asked for; comments do not count.
    """

    def __init__(self, stream: AsyncIterator[bytes], silence: float) -> None:
        self._stream, self.silence = stream, silence
        self._rest, self._ready, self._quiet = bytearray(), deque[bytes](), 0

    async def next(self) -> bytes | None:
        """The data of the next event; None at the end of the stream, which ends an event, too.

        Raises RemoteError for more than MAX_EVENT bytes that end no event, or MAX_COMMENTS without data in the whole
        answer, Unreachable for a silence."""
        if self._ready:
            return self._ready.popleft()
        due = time.monotonic() + self.silence
        while not self._ready:
            part = await self._part(due)
            if part is None:
                last, self._rest = _data(bytes(self._rest)), bytearray()
                return last
            self._take(part)
        return self._ready.popleft()

    async def _part(self, due: float) -> bytes | None:
        try:
            async with asyncio.timeout(due - time.monotonic()):
                return await anext(self._stream, None)
        except TimeoutError as error:
            raise Unreachable(f"the answer was silent for {self.silence:g} s", TIMED_OUT) from error

    def _take(self, part: bytes) -> None:
        seen = max(0, len(self._rest) - 1)  # what was searched before is not searched again
        self._rest += part if b"\r" not in part else part.replace(b"\r", b"")  # JSON has them escaped only
        if self._rest.find(b"\n\n", seen) >= 0:
            *whole, rest = bytes(self._rest).split(b"\n\n")
            self._rest = bytearray(rest)
            for event in whole:
                if (data := _data(event)) is None:
                    self._quiet += len(event) + 2
                else:
                    self._ready.append(data)
        if len(self._rest) > MAX_EVENT:
            raise RemoteError(f"an event of the answer has more than {MAX_EVENT} bytes", HINT)
        if self._quiet > MAX_COMMENTS:
            raise RemoteError(f"the answer has more than {MAX_COMMENTS} bytes of comments", HINT)


def _data(event: bytes) -> bytes | None:
    """The lines of data of an event, without their name; None where it has none."""
    if event.startswith(b"data:") and b"\n" not in event:  # as engines write them
        return event[6:] if event[5:6] == b" " else event[5:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
