"""The door: bearer token, body limit, access log, and no exception leaves with what was in a request.

Plain ASGI, outside of the web framework, so that nothing of a refused request is ever read.
"""

from __future__ import annotations

import hmac
import logging
import time
import traceback
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from milkglass.errors import TooLarge, Unauthorized
from milkglass.server.answers import HINTS, REASONS, Refused, internal, respond

log = logging.getLogger("milkglass.server")
OPEN = frozenset({"/health"})
Limit = Callable[[Scope], int]


class Guard:
    """`limit` says how many bytes the body of a request may have."""

    def __init__(self, app: ASGIApp, token: str, limit: Limit) -> None:
        self._app, self._limit = app, limit
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
            log.info("%s %s %s %.0f ms", scope["method"], pattern, answered.status or "gone", spent)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if scope["path"] not in OPEN and not hmac.compare_digest(given, self._expected):
            refused = respond(Unauthorized(REASONS[401], HINTS[401]))
            refused.headers["WWW-Authenticate"] = "Bearer"
            await refused(scope, receive, send)
            return
        limit = self._limit(scope)
        claimed = headers.get(b"content-length", b"0")
        if claimed.isdigit() and int(claimed[:20]) > limit:
            await respond(too_large(limit))(scope, receive, send)
            return
        await self._app(scope, _counted(receive, limit), send)


def too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {limit} bytes", HINTS[413])


def _counted(receive: Receive, limit: int) -> Receive:
    """Count what really arrives: a length may be absent or a lie."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise Refused(too_large(limit))
        return message

    return counted


class _Answered:
    """A `send` that remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def place_of(error: BaseException) -> str:
    """The kind of an error and where it was raised. Never its message: that may quote ids."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}"
