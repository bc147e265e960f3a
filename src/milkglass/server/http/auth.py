"""Checks each request: bearer token, body limit, access log. No error quotes a request.

It is plain ASGI outside of the web framework, so that nothing of a refused request is read.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from milkglass.errors import Unauthorized
from milkglass.server.connections.logs import place_of
from milkglass.server.http.bodies import BodyMemory, BodyRule, CountedBody, too_large
from milkglass.server.http.errors import HINTS, REASONS, internal, respond
from milkglass.server.settings import Limits

log = logging.getLogger("milkglass.server")
OPEN = frozenset({"/health"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


Rule = Callable[[Scope], BodyRule]


class Guard:
    """Admits requests. All requests together may have `held` bytes of bodies in memory."""

    def __init__(self, app: ASGIApp, token: str, rule: Rule, held: int, limits: Limits) -> None:
        self._app, self._rule, self._limits = app, rule, limits
        self._memory = BodyMemory(held)
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
        authorization = headers.get(b"authorization", b"")
        if scope["path"] not in OPEN and not hmac.compare_digest(authorization, self._expected):
            refused = respond(Unauthorized(REASONS[401], HINTS[401]))
            refused.headers["WWW-Authenticate"] = "Bearer"
            await refused(scope, receive, send)
            return
        rule = self._rule(scope)
        claimed = headers.get(b"content-length", b"0")
        size = int(claimed[:20]) if claimed.isdigit() else 0
        if size > rule.limit:
            await respond(too_large(rule.limit))(scope, receive, send)
            return
        body = CountedBody(receive, rule, self._memory, self._limits, size)
        try:
            await self._app(scope, body, send)
        finally:
            body.release()


class _Answered:
    """A `send` that remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
