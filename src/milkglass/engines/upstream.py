"""An engine over HTTP, for many conversations at once. All that a proxy sends leaves this machine here.

An engine is not trusted: strict_json.py reads every answer, each wait has a deadline, redirects are not followed, and
no more tokens are taken than were requested. Only the engine's own `Call`s and fixed headers are sent. A call whose
connection was not made is tried again. A call that the engine may have begun is not.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any, Protocol, final

import httpx2

from milkglass.client.remote import strict_json
from milkglass.client.remote.connection import (
    MAX_ANSWER_BYTES,
    MAX_ERROR_BYTES,
    NEVER_SENT_ERRORS,
    client_options,
    remove_user_agent,
    require_plain,
)
from milkglass.client.remote.strict_json import SERVER_HINT, parse_object
from milkglass.engines.concurrency import CallLimit, StepTimeout
from milkglass.engines.engine import Call, IdsChunk, IdsEngine, IdsRequest, Reader, ServedModel
from milkglass.engines.events import AnswerBounds, refusal
from milkglass.errors import RemoteError, Unreachable, UsageError

MAX_EVENT_BYTES = 4 << 20  # bytes of one event
MAX_COMMENT_BYTES = 256 << 10  # bytes of a whole answer that are no event: comments, and events without data
EVENT_OVERHEAD_BYTES = 128  # the most bytes of an event besides its data: names of fields, an id
TIMEOUT_HINT = "try again; if it goes on like this, the engine is overloaded, or not to be trusted"
DONE_DATA = "[DONE]"  # the data of OpenAI's last event
MAX_EVENTS_AFTER_END = 16  # events that may follow the end: the count of tokens, [DONE]
LAST_EVENTS_SECONDS = 5.0  # seconds that these may take
KEEP_ALIVE_SECONDS = 2.0  # seconds that an idle connection is kept: engines close theirs after 5
BREAK_OFF_MESSAGES = ("disconnected", "closed connection")  # in messages of httpx2's protocol errors


@dataclass
class Traffic:
    """Counts the bytes of bodies that were sent to an engine and received from it, without headers."""

    sent_bytes: int = 0
    received_bytes: int = 0


@final
class AnswerEvents:
    """Reads the server-sent events of one answer, within limits of size and time that the engine cannot extend.

    Close it (`aclosing`), so that the connection is given back.
    """

    def __init__(self, answer: httpx2.Response, silence: float, traffic: Traffic) -> None:
        """Takes a response whose body is unread.

        Args:
            answer: the response.
            silence: the most seconds between two events that have data.
            traffic: counts the received bytes.
        """
        # In place of what the engine says: a charset could name any of Python's codecs
        answer.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        answer.stream = self._bytes = _BoundedBytes(answer.stream, traffic)
        self._events: Any = aiter(httpx2.EventSource(answer, max_event_size=MAX_EVENT_BYTES))
        self.timeout = StepTimeout(silence)

    async def next(self) -> str | None:
        """Returns the data of the next event that has some, or None at the end of the answer.

        Raises RemoteError if events or comments have too many bytes, and Unreachable if none came in time.
        """
        try:
            with self.timeout:
                while (event := await anext(self._events, None)) is not None:
                    if event.data:
                        self._bytes.non_event_bytes -= len(event.data) + EVENT_OVERHEAD_BYTES
                        return str(event.data)
            return None
        except TimeoutError as error:
            raise Unreachable(f"the answer was silent for {self.timeout.seconds:g} s", TIMEOUT_HINT) from error
        except httpx2.SSEError as error:
            raise RemoteError(f"an event of the answer has more than {MAX_EVENT_BYTES} bytes", SERVER_HINT) from error

    async def aclose(self) -> None:
        self.timeout.close()
        await self._events.aclose()


class _BoundedBytes(httpx2.AsyncByteStream):
    """Passes the bytes of an answer on. It limits `non_event_bytes`, the bytes that are no event."""

    def __init__(self, stream: Any, traffic: Traffic) -> None:
        self._stream, self._traffic, self.non_event_bytes = stream, traffic, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self.non_event_bytes += len(chunk)
            self._traffic.received_bytes += len(chunk)
            if self.non_event_bytes > MAX_EVENT_BYTES + MAX_COMMENT_BYTES:
                raise RemoteError(f"the answer has more than {MAX_COMMENT_BYTES} bytes of comments", SERVER_HINT)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class Admission(Protocol):
    """Decides, connection by connection, what a request may be sent to (attest/channel.py)."""

    @property
    def context(self) -> Any:
        """Returns the TLS context whose connections send nothing before they are admitted."""

    def pieces(self, body: bytes) -> AsyncIterator[bytes]:
        """Yields a request's body in pieces, each of which is sent only while the connection is admitted."""

    async def admit_again(self, error: Exception, earlier_count: int) -> bool:
        """Returns whether a request that failed with `error` may be sent again.

        Raises AttestationError for a refused peer.

        Args:
            earlier_count: how often the same request was already allowed to be sent again.
        """


@dataclass(frozen=True)
class Timeouts:
    """Limits the seconds to wait for an engine, and the number of connections to it.

    Attributes:
        connect: for making a connection.
        begin: for the beginning of an answer, before which come a queue and a long prompt; and as long for a free
            connection before that (concurrency.py).
        silence: for each further event of an answer. Comments do not count as events.
        body: for a complete answer that does not stream, once it has begun, and for an error's body.
        attempts: how often a request is tried whose connection cannot be made.
        pause: before the second try; each further pause is twice as long.
        connections: the most open connections. More conversations wait.
    """

    connect: float = 10.0
    begin: float = 300.0
    silence: float = 120.0
    body: float = 60.0
    attempts: int = 3
    pause: float = 0.25
    connections: int = 256


class Upstream:
    """Sends the requests of an `IdsEngine` to one address, and reads its answers. Every call can raise RemoteError."""

    def __init__(
        self,
        engine: IdsEngine,
        url: str,
        token: str | None = None,
        allow_http: bool = False,
        authority: Path | None = None,
        timeouts: Timeouts | None = None,
        admission: Admission | None = None,
    ) -> None:
        """Prepares a client.

        Args:
            engine: how requests are written and answers are read.
            url: the engine's address.
            token: the engine's bearer token. None: none is sent.
            allow_http: whether the token may cross a network unencrypted.
            authority: a PEM file with the engine's certificate or its authority. None: the system's authorities.
            timeouts: how long to wait. None: the defaults.
            admission: decides which connections anything is sent on. None: all of them.

        Raises:
            UsageError: the token would cross a network unencrypted.
        """
        self.engine, self.url, self.timeouts = engine, url.rstrip("/"), timeouts or Timeouts()
        self.traffic, self._calls = Traffic(), CallLimit(self.timeouts.connections, self.timeouts.begin)
        self._admission = admission
        options = client_options(self.url, token, allow_http, authority)
        if admission is not None:
            options |= {"verify": admission.context, "trust_env": False}
        connections = self.timeouts.connections
        self._client = httpx2.AsyncClient(
            **options,
            limits=httpx2.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEEP_ALIVE_SECONDS
            ),
            # What is read has deadlines of its own, below: httpx2 knows only those of silence
            timeout=httpx2.Timeout(None, connect=self.timeouts.connect),
        )
        remove_user_agent(self._client.headers)
        # An engine must not tell one conversation from another by what it had us remember
        self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    async def models(self) -> list[ServedModel]:
        """Returns the models that the engine serves."""
        return self.engine.served_models(await self._fetch_json(self.engine.models))

    async def embed(self, model: str, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns a vector for each row of ids, in order.

        Raises UsageError for no row or an empty one, UnsupportedModel if the engine embeds no ids, and RemoteError.
        """
        if not rows or not all(rows):
            raise UsageError("there is nothing to embed: no row, or an empty one", "give at least one id a row")
        vectors = self.engine.vectors(await self._fetch_json(self.engine.embedding(model, rows)))
        if len(vectors) != len(rows):
            raise RemoteError(f"the engine answers {len(vectors)} vectors for {len(rows)} rows", "try again")
        return vectors

    async def generate(self, model: str, request: IdsRequest) -> AsyncGenerator[IdsChunk, None]:
        """Yields an answer as it arrives. The last chunk says why it ended. Closing the iterator ends the request.

        Raises UsageError if the engine does not offer an option, before anything is sent, and Unreachable if it breaks
        off.
        """
        self.engine.require(request)
        call, read, bounds = self.engine.completion(model, request), self.engine.reader(request), AnswerBounds(request)
        async with (
            self._open_response(call) as answer,
            aclosing(AnswerEvents(answer, self.timeouts.silence, self.traffic)) as events,
        ):
            while not bounds.ended:
                event_data = await events.next()
                if event_data is None or event_data.strip() == DONE_DATA:
                    raise Unreachable("the answer broke off before its end", "try again")
                chunk = bounds.check(read(parse_object(event_data, "an event of the answer")))
                if chunk.ids or chunk.finish:
                    yield chunk
            await self._read_to_end(events, bounds, read)

    async def _read_to_end(self, events: AnswerEvents, bounds: AnswerBounds, read: Reader) -> None:
        """Reads what follows the end, so that the connection can be used again.

        If the engine does not end soon, or breaks off, the connection is closed: the answer is complete.
        """
        events.timeout.seconds = min(events.timeout.seconds, LAST_EVENTS_SECONDS)
        for _ in range(MAX_EVENTS_AFTER_END):
            try:
                event_data = await events.next()
            except (Unreachable, httpx2.TransportError):
                return
            if event_data is None:
                return
            if event_data.strip() != DONE_DATA:
                bounds.check(read(parse_object(event_data, "an event of the answer")))

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def _fetch_json(self, call: Call) -> dict[str, Any]:
        """Returns the JSON object that the engine answers."""
        async with self._open_response(call) as answer:
            body = await self._body(answer, MAX_ANSWER_BYTES)
        if len(body) > MAX_ANSWER_BYTES:
            raise RemoteError(f"the answer has more than {MAX_ANSWER_BYTES} bytes", "ask for less at a time")
        return parse_object(body)

    @asynccontextmanager
    async def _open_response(self, call: Call) -> AsyncIterator[httpx2.Response]:
        """Yields a successful response, its body unread. Raises RemoteError for an error, Unreachable for silence."""
        try:
            async with self._calls.call():
                answer = await self._send(call)
                try:
                    if answer.status_code >= 300:
                        error_fields = strict_json.error_in(await self._body(answer, MAX_ERROR_BYTES))
                        raise refusal(answer.status_code, error_fields.get("type"))
                    require_plain(answer)
                    yield answer
                finally:
                    await answer.aclose()
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error
        except TimeoutError as error:
            raise Unreachable(f"{self.url} went silent in the middle of an answer", TIMEOUT_HINT) from error
        except RemoteError as error:
            if error.hint == strict_json.SERVER_HINT:  # which speaks of a Milkglass server
                error.hint = f"is this a server of the engine {self.engine.name}?"
            raise

    async def _send(self, call: Call) -> httpx2.Response:
        method = "GET" if call.body is None else "POST"
        request = self._client.build_request(method, call.path, json=call.body)
        self.traffic.sent_bytes += len(request.content)
        attempt, admissions = 0, 0
        while True:
            try:
                async with asyncio.timeout(self.timeouts.begin):
                    return await self._client.send(self._in_pieces(request), stream=True)
            except (httpx2.TransportError, ssl.SSLError) as error:
                if self._admission is not None and await self._admission.admit_again(error, admissions):
                    admissions += 1
                    continue
                attempt += 1
                if not isinstance(error, NEVER_SENT_ERRORS) or attempt == self.timeouts.attempts:
                    raise
                await asyncio.sleep(self.timeouts.pause * 2 ** (attempt - 1))
            except TimeoutError as error:
                fault = f"{self.url} did not begin to answer within {self.timeouts.begin:g} s"
                raise Unreachable(fault, TIMEOUT_HINT) from error

    def _in_pieces(self, request: httpx2.Request) -> httpx2.Request:
        """Returns a request whose body the admission cuts, if there is one."""
        if self._admission is None or not request.content:
            return request
        body = self._admission.pieces(request.content)
        return httpx2.Request(
            request.method, request.url, headers=request.headers, content=body, extensions=request.extensions
        )

    async def _body(self, answer: httpx2.Response, limit: int) -> bytes:
        """Returns the body, or a little more than `limit` bytes of a longer one."""
        body = bytearray()
        async with asyncio.timeout(self.timeouts.body):
            async with aclosing(answer.aiter_raw()) as chunks:
                async for chunk in chunks:
                    self.traffic.received_bytes += len(chunk)
                    body += chunk
                    if len(body) > limit:
                        break
        return bytes(body)

    def _unreachable(self, error: Exception) -> Unreachable:
        hint = "is the engine running there, and is the address right?"
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            hint = "its certificate is not trusted here: give the engine's certificate, as PEM, if it signed its own"
        is_protocol_error = isinstance(error, httpx2.RemoteProtocolError)
        broke_off = is_protocol_error and any(message in str(error) for message in BREAK_OFF_MESSAGES)
        if broke_off or isinstance(error, httpx2.ReadError | httpx2.WriteError):
            return Unreachable(
                f"{self.url} broke off the connection before the answer ended",
                "see there whether the engine still runs, and ask again",
            )
        return Unreachable(f"{self.url} does not answer ({type(error).__name__})", hint)
