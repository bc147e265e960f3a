"""Decides who may use the proxy, and limits what it accepts at a time and how long an answer waits for its reader.

A web page in a browser must not use the proxy: unless a token is required, requests with an `Origin`, or for a `Host`
that is not this machine, are refused.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from milkglass.attest.passthrough import NOT_ATTESTED, OWN_ANSWER, STATE_HEADER
from milkglass.engines.concurrency import REQUEST, StepTimeout
from milkglass.errors import MilkglassError, Unauthorized
from milkglass.proxy import refusals
from milkglass.server.http import errors
from milkglass.server.http.guard import BodyMemory, BodyRule, CountedBody, too_large_error
from milkglass.server.logs import place_of
from milkglass.server.settings import Limits
from milkglass.system import is_loopback

log = logging.getLogger("milkglass.proxy")
MAX_BODY_BYTES = 64 << 20  # the most bytes of a request's body
MAX_HELD_BYTES = 3 * MAX_BODY_BYTES  # the most bytes of all bodies that are arriving or not answered yet
MAX_UNREAD_SECONDS = 600.0  # how long a part of an answer waits to be read; its connection to the engine waits too
CODE_EXCHANGE_PATH = "/monitor/open"  # the address at which a page exchanges a code for its key
OPEN_PATHS = frozenset({"/", "/health", CODE_EXCHANGE_PATH})  # paths that need no token
HOST_PORT = re.compile(r":[0-9]*\Z")  # the port in a Host header


class LocalGuard:
    """Admits this machine's own programs, or anyone with the token, and never a page of another site."""

    def __init__(self, app: ASGIApp, token: str | None, second_token: str | None, limits: Limits) -> None:
        """Wraps an application.

        Args:
            app: the application behind the guard.
            token: the API key; None if none is needed.
            second_token: another token that is accepted if `token` is set. None: there is none.
            limits: how long a body may take.
        """
        tokens = [] if token is None else [token, *([] if second_token is None else [second_token])]
        self._app, self._expected_headers = app, [f"Bearer {token}".encode() for token in tokens]
        self._limits, self._memory = limits, BodyMemory(MAX_HELD_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        REQUEST.set(object())  # the answers to one request wait for each other
        has_begun, reader_timeout = False, StepTimeout(MAX_UNREAD_SECONDS)

        async def send_in_time(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            try:
                with reader_timeout:
                    await send(message)
            except TimeoutError:
                raise _UnreadAnswer from None

        headers = dict(scope["headers"])
        claimed_length = headers.get(b"content-length", b"0")
        body_bytes = int(claimed_length[:20]) if claimed_length.isdigit() else 0
        body = CountedBody(receive, BodyRule(MAX_BODY_BYTES), self._memory, self._limits, body_bytes)
        refusal = (
            too_large_error(MAX_BODY_BYTES) if body_bytes > MAX_BODY_BYTES else self._refusal(scope["path"], headers)
        )
        try:
            await (self._app if refusal is None else refusals.error_response(refusal))(scope, body, send_in_time)
        except _UnreadAnswer:
            log.warning("an answer was not read for %g s, and was ended", MAX_UNREAD_SECONDS)
        except Exception as error:  # noqa: BLE001  (its message may quote a text)
            log.error("internal error: %s", place_of(error))
            if not has_begun:
                await errors.internal_error_response()(scope, receive, send)
        finally:
            reader_timeout.close()
            body.release()

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> MilkglassError | None:
        """Returns the error with which a request is refused, or None if it is admitted."""
        if self._expected_headers:
            header = headers.get(b"authorization", b"")
            if path in OPEN_PATHS or any(hmac.compare_digest(header, value) for value in self._expected_headers):
                return None
            hint = "it is in the file of --api-key-file, or was printed when the proxy started"
            return Unauthorized("the API key is wrong", hint)
        host = HOST_PORT.sub("", headers.get(b"host", b"").decode("latin-1")).strip("[]")
        if is_loopback(host) and b"origin" not in headers:
            return None
        hint = "programs of this machine may ask; for others start the proxy without --open"
        return Unauthorized("this request comes from a web page, or is for another host", hint)


def attestation_header(attested_state: str, own_paths: tuple[str, ...] = ()) -> Callable[[str, int], Mapping[str, str]]:
    """Returns a function from an answer's path and status to its headers, which hold STATE_HEADER.

    Answers of the server get `attested_state`. Errors and own paths are the proxy's own answers, sent perhaps before
    the server was attested. If the state is NOT_ATTESTED, every answer has it.

    Args:
        attested_state: the value of the header in the server's answers.
        own_paths: beginnings of further paths that the proxy answers without the server.
    """
    own_state = attested_state if attested_state == NOT_ATTESTED else OWN_ANSWER

    def state_header(path: str, status: int) -> Mapping[str, str]:
        is_own = status >= 400 or path in OPEN_PATHS or path.startswith(own_paths)
        return {STATE_HEADER: own_state if is_own else attested_state}

    return state_header


class _UnreadAnswer(Exception):
    """Is raised if the client does not read a part of an answer in time."""
