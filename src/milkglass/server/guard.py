"""The door: bearer token, body limit, access log, and no exception leaves with what was in a request.

Plain ASGI, outside of the web framework, so that nothing of a refused request is ever read.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from milkglass.errors import Busy, TooLarge, Unauthorized
from milkglass.server.answers import HINTS, REASONS, Refused, internal, respond
from milkglass.server.places import place_of

log = logging.getLogger("milkglass.server")
OPEN = frozenset({"/health"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@final
@dataclass(frozen=True)
class BodyRule:
    """What holds for a request's body.

    Attributes:
        limit: bytes that it may have.
        held: whether the application keeps it in memory.
    """

    limit: int
    held: bool = True


Rule = Callable[[Scope], BodyRule]


class Guard:
    """`held` bytes of bodies may be in memory at a time, of all requests together."""

    def __init__(self, app: ASGIApp, token: str, rule: Rule, held: int) -> None:
        self._app, self._rule = app, rule
        self._memory = Memory(held)
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = _Answered(send)
        began = time.monotonic()
        try:
            await self._admit(scope, receive, answered)
        except Exception as error:  # noqa: BLE001  (whatever it was: the server stays up and its log stays clean)
            log.error("internal error: %s", place_of(error))
            if answered.status is None:
                await internal()(scope, receive, answered)
        finally:
            # The route's pattern, never the path: names in a path are the caller's
            pattern = getattr(scope.get("route"), "path", "-")
            spent = (time.monotonic() - began) * 1000
            method = scope["method"] if scope["method"] in METHODS else "-"  # any other word is the caller's, too
            log.info("%s %s %s %.0f ms", method, pattern, answered.status or "gone", spent)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if scope["path"] not in OPEN and not hmac.compare_digest(given, self._expected):
            refused = respond(Unauthorized(REASONS[401], HINTS[401]))
            refused.headers["WWW-Authenticate"] = "Bearer"
            await refused(scope, receive, send)
            return
        rule = self._rule(scope)
        claimed = headers.get(b"content-length", b"0")
        if claimed.isdigit() and int(claimed[:20]) > rule.limit:
            await respond(too_large(rule.limit))(scope, receive, send)
            return
        body = _Body(receive, rule, self._memory)
        try:
            await self._app(scope, body, send)
        finally:
            self._memory.used -= body.held


def too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {limit} bytes", HINTS[413])


@final
@dataclass
class Memory:
    """Bytes of bodies that are kept. One event loop counts.

    Attributes:
        limit: bytes of all requests together.
        used: bytes of the requests that are not answered yet.
    """

    limit: int
    used: int = 0


@final
class _Body:
    """A `receive` that counts what really arrives: a length may be absent or a lie.

    Attributes:
        held: bytes counted as kept in memory.
    """

    def __init__(self, receive: Receive, rule: BodyRule, memory: Memory) -> None:
        self._receive, self._rule, self._memory = receive, rule, memory
        self._seen = self.held = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        size = len(message.get("body", b""))
        self._seen += size
        if self._seen > self._rule.limit:
            raise Refused(too_large(self._rule.limit))
        if self._rule.held and size:
            if self._memory.used + size > self._memory.limit:
                raise Refused(Busy("the bodies of other requests fill the server's memory", "try again in a moment"))
            self._memory.used += size
            self.held += size
        return message


class _Answered:
    """A `send` that remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
