"""Checks each request: bearer token, body limit, access log. No error quotes a request.

The guard is plain ASGI outside of the web framework, so that nothing of a refused request is read. All request bodies
in memory share one limit of bytes, and each must arrive within a limit of time. A body that is still arriving keeps its
memory until a faster one needs it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from milkglass.errors import Busy, TooLarge, TooSlow, Unauthorized
from milkglass.server.http.errors import (
    HTTP_ERROR_HINTS,
    HTTP_ERROR_MESSAGES,
    RefusedRequest,
    error_response,
    internal_error_response,
)
from milkglass.server.logs import place_of
from milkglass.server.settings import Limits

PACE_SECONDS = 2.0  # time constant of a body's pace: bytes of so long ago count 1/e
MIN_AGE_SECONDS = 0.1  # minimum age assumed of a body, as one piece that came at once says little of its pace
log = logging.getLogger("milkglass.server")
OPEN_PATHS = frozenset({"/health"})
LOGGED_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@final
@dataclass(frozen=True)
class BodyRule:
    """Limits the bytes of a request's body. `in_memory`: the application keeps the body in memory."""

    max_bytes: int
    in_memory: bool = True


def too_large_error(max_bytes: int) -> TooLarge:
    """Returns the error for a body of more than `max_bytes` bytes."""
    return TooLarge(f"the request body is larger than {max_bytes} bytes", HTTP_ERROR_HINTS[413])


@final
class BodyMemory:
    """Limits the bytes of request bodies in memory, in one event loop.

    Attributes:
        max_bytes: the most bytes at a time.
        used_bytes: the bytes of all requests that are not answered yet.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self._arriving: set[CountedBody] = set()

    def take(self, body: CountedBody, size: int, is_complete: bool) -> None:
        """Charges bytes to a body, its last ones if `is_complete`. Raises Busy if no room is left or can be made."""
        if is_complete:
            self._arriving.discard(body)
        elif body not in self._arriving:
            self._arriving.add(body)
        self._make_room(body, size, is_complete)
        self.used_bytes += size
        body.held_bytes += size

    def release(self, body: CountedBody) -> None:
        """Gives back the bytes that are charged to a body."""
        self.used_bytes -= body.held_bytes
        body.held_bytes = 0
        self._arriving.discard(body)

    def _make_room(self, body: CountedBody, size: int, is_complete: bool) -> None:
        """Evicts the slowest bodies that arrive more slowly than `body`. A complete body counts as the fastest.

        If that would not be enough, it evicts none and raises Busy.
        """
        lacking_bytes = self.used_bytes + size - self.max_bytes
        if lacking_bytes <= 0:
            return
        now = time.monotonic()
        pace_of_body = math.inf if is_complete else body.pace(now)
        slower = sorted(
            (pace, id(slow), slow) for slow in self._arriving - {body} if (pace := slow.pace(now)) < pace_of_body
        )
        if sum(slow.held_bytes for _, _, slow in slower) < lacking_bytes:
            raise Busy("the bodies of other requests fill the server's memory", "try again in a moment")
        for _, _, slow in slower:
            if lacking_bytes <= 0:
                return
            lacking_bytes -= slow.held_bytes
            slow.evict()


@final
class CountedBody:
    """Receives a body, and counts what really arrives: a stated length may be missing or wrong.

    Attributes:
        held_bytes: the bytes that are charged to the shared memory.
    """

    def __init__(
        self, receive: Receive, rule: BodyRule, memory: BodyMemory, limits: Limits, claimed_bytes: int
    ) -> None:
        """Wraps `receive`.

        Args:
            receive: ASGI's function.
            rule: the limit of this body.
            memory: what all bodies share.
            limits: how long the body may take.
            claimed_bytes: the length in the headers; 0: they have none.
        """
        self._receive, self._rule, self._memory, self._limits = receive, rule, memory, limits
        self._claimed_bytes, self._started_at = claimed_bytes, time.monotonic()
        self._received_bytes = self.held_bytes = 0
        self._is_complete = self._evicted = False
        self._recent_bytes, self._decayed_at = 0.0, self._started_at
        self._timeout: asyncio.Timeout | None = None

    async def __call__(self) -> Message:
        """Receives the next piece. Raises RefusedRequest if the body is too large, too slow, or finds no memory."""
        if self._is_complete or not self._rule.in_memory:
            return self._count(await self._receive())
        loop = asyncio.get_running_loop()
        allowed_seconds = self._limits.body_seconds(max(self._claimed_bytes, self._received_bytes))
        seconds_left = self._started_at + allowed_seconds - time.monotonic()
        try:
            async with asyncio.timeout_at(loop.time() + seconds_left) as self._timeout:
                message = await self._receive()
        except TimeoutError:
            if not self._evicted:
                raise RefusedRequest(TooSlow("the request body came too slowly", "send less at once")) from None
        finally:
            self._timeout = None
        if self._evicted:
            raise RefusedRequest(Busy("the request body came slowly, and others needed its memory", "send it again"))
        return self._count(message)

    def _count(self, message: Message) -> Message:
        """Counts a message's bytes, and returns it. Raises RefusedRequest if a limit is exceeded."""
        size = len(message.get("body", b""))
        self._is_complete = self._is_complete or not message.get("more_body", False)
        self._received_bytes += size
        if self._received_bytes > self._rule.max_bytes:
            raise RefusedRequest(too_large_error(self._rule.max_bytes))
        if self._rule.in_memory:
            self._decay(time.monotonic())
            self._recent_bytes += size
            try:
                self._memory.take(self, size, self._is_complete)
            except Busy as error:
                raise RefusedRequest(error) from None
        return message

    def pace(self, now: float) -> float:
        """Returns the recent speed in bytes a second."""
        self._decay(now)
        age = max(now - self._started_at, MIN_AGE_SECONDS)
        return self._recent_bytes / (PACE_SECONDS * -math.expm1(-age / PACE_SECONDS))

    def _decay(self, now: float) -> None:
        """Decays the weight of earlier bytes by the time since the last call."""
        self._recent_bytes *= math.exp((self._decayed_at - now) / PACE_SECONDS)
        self._decayed_at = now

    def evict(self) -> None:
        """Frees the body's memory, so that its request is refused."""
        self._evicted = True
        self.release()
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Gives back the bytes that are charged to this body."""
        self._memory.release(self)


BodyRuleOf = Callable[[Scope], BodyRule]


class Guard:
    """Admits requests with the token, and limits their bodies.

    Args:
        app: the application behind the guard.
        token: the bearer token. None: everybody may ask, and the application decides.
        rule_of: returns the limit of a request's body.
        max_held_bytes: the bytes of bodies that all requests together may have in memory.
        limits: how long a body may take.
        access_log: whether requests are logged.
        open_paths: paths that need no token.
    """

    def __init__(
        self, app: ASGIApp, token: str | None, rule_of: BodyRuleOf, max_held_bytes: int, limits: Limits,
        access_log: bool = True, open_paths: Collection[str] = OPEN_PATHS,
    ) -> None:  # fmt: skip
        self._app, self._rule_of, self._limits, self._access_log = app, rule_of, limits, access_log
        self._open_paths = open_paths
        self._memory = BodyMemory(max_held_bytes)
        self._expected_header = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _StatusRecorder(send)
        started_at = time.monotonic()
        try:
            await self._admit(scope, receive, answer)
        except Exception as error:  # noqa: BLE001  (whatever it was: the server stays up and its log stays clean)
            log.error("internal error: %s", place_of(error))
            if answer.status is None:
                await internal_error_response()(scope, receive, answer)
        finally:
            if self._access_log:
                # The route's pattern, never the path: names in a path are the caller's
                pattern = getattr(scope.get("route"), "path", "-")
                milliseconds = (time.monotonic() - started_at) * 1000
                # Any other word is the caller's, too
                method = scope["method"] if scope["method"] in LOGGED_METHODS else "-"
                log.info("%s %s %s %.0f ms", method, pattern, answer.status or "gone", milliseconds)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if not self._is_admitted(scope["path"], headers.get(b"authorization", b"")):
            refusal = error_response(Unauthorized(HTTP_ERROR_MESSAGES[401], HTTP_ERROR_HINTS[401]))
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        rule = self._rule_of(scope)
        claimed_length = headers.get(b"content-length", b"0")
        size = int(claimed_length[:20]) if claimed_length.isdigit() else 0
        if size > rule.max_bytes:
            await error_response(too_large_error(rule.max_bytes))(scope, receive, send)
            return
        body = CountedBody(receive, rule, self._memory, self._limits, size)
        try:
            await self._app(scope, body, send)
        finally:
            body.release()

    def _is_admitted(self, path: str, authorization: bytes) -> bool:
        if self._expected_header is None or path in self._open_paths:
            return True
        return hmac.compare_digest(authorization, self._expected_header)


class _StatusRecorder:
    """Sends an answer, and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
