"""One engine over HTTP, for many conversations at once: what a proxy sends leaves this machine here.

An engine is not trusted: every answer is JSON that strict_json.py reads, each wait has a deadline, redirects are not
followed, and no more tokens are taken than were asked for. What crosses are the engine's own `Call`s and fixed headers.

A call whose connection was not made is tried again; what the engine may have begun is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from milkglass.client.remote import strict_json
from milkglass.client.remote.connection import (
    MAX_ANSWER,
    MAX_ERROR,
    NEVER_SENT,
    client_options,
    require_plain,
    say_no_agent,
)
from milkglass.client.remote.strict_json import document
from milkglass.engines.answers import AnswerBounds, refusal
from milkglass.engines.engine import Call, IdsChunk, IdsEngine, IdsRequest, Reader, ServedModel
from milkglass.engines.events import TIMED_OUT, EventReader
from milkglass.engines.transport import KEPT, BrokenOff, StreamTransport
from milkglass.engines.turns import Turns
from milkglass.errors import RemoteError, Unreachable, UsageError

DONE = b"[DONE]"
AFTER_END = 16  # events that may follow the end: what counts tokens, [DONE]
LAST_WORDS = 5.0  # seconds that these may take


@dataclass(frozen=True)
class Patience:
    """How long an engine is waited for, in seconds, and how much of it at a time.

    Attributes:
        connect: for a connection.
        begin: for the beginning of an answer: a queue and a long prompt come before it; and as long for a free
            connection before that, see turns.py.
        silence: for each further event of an answer; comments do not count.
        whole: for all of an answer that does not stream, once it has begun, and for an error's body.
        attempts: tries to connect.
        pause: before the second try, doubling.
        connections: open at a time. More conversations wait.
    """

    connect: float = 10.0
    begin: float = 300.0
    silence: float = 120.0
    whole: float = 60.0
    attempts: int = 3
    pause: float = 0.25
    connections: int = 256


@dataclass
class Traffic:
    """Bytes of bodies that crossed; headers are not counted. Attributes: sent, received."""

    sent: int = 0
    received: int = 0


class Upstream:
    """Where an engine is. Raises RemoteError or one of its kinds.

    Attributes:
        engine: how it is spoken to.
        traffic: what crossed so far.
    """

    def __init__(
        self,
        engine: IdsEngine,
        url: str,
        token: str | None = None,
        allow_http: bool = False,
        authority: Path | None = None,
        patience: Patience | None = None,
    ) -> None:
        """authority: a PEM file with the engine's certificate. Raises UsageError for an address over which the token
        would cross in the clear."""
        self.engine, self.url, self.patience = engine, url.rstrip("/"), patience or Patience()
        self.traffic, self._turns = Traffic(), Turns(self.patience.connections, self.patience.begin)
        options = client_options(self.url, token, allow_http, authority)
        most, proxied = self.patience.connections, options["trust_env"] and _is_proxied(self.url)
        self._client = httpx2.AsyncClient(
            **options,
            transport=None if proxied else StreamTransport(options["verify"], self.patience.connect),
            # Engines close an idle connection after 5 s: one that is used just then would be lost
            limits=httpx2.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=KEPT),
            # What is read has deadlines of its own, below: httpx2 knows only those of silence
            timeout=httpx2.Timeout(None, connect=self.patience.connect),
        )
        say_no_agent(self._client.headers)
        # An engine must not tell one conversation from another by what it had us remember
        self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    async def models(self) -> list[ServedModel]:
        """What it serves."""
        return self.engine.served(await self._whole(self.engine.models))

    async def embed(self, model: str, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """A vector a row, in order. Raises UsageError for no rows or an empty one, UnsupportedModel where the engine
        embeds nothing by ids."""
        if not rows or not all(rows):
            raise UsageError("there is nothing to embed: no row, or an empty one", "give at least one id a row")
        found = self.engine.vectors(await self._whole(self.engine.embedding(model, rows)))
        if len(found) != len(rows):
            raise RemoteError(f"the engine answers {len(found)} vectors for {len(rows)} rows", "try again")
        return found

    async def generate(self, model: str, request: IdsRequest) -> AsyncGenerator[IdsChunk, None]:
        """An answer as it comes; the last chunk says why it ended. Closing the iterator ends the request. Raises
        UsageError, before anything is sent, for an option that the engine does not offer; Unreachable where an answer
        breaks off or takes too long."""
        self.engine.require(request)
        call, read, bounds = self.engine.completion(model, request), self.engine.reader(request), AnswerBounds(request)
        async with self._answer(call) as answer, aclosing(self._parts(answer)) as parts:
            events = EventReader(parts, self.patience.silence)
            while not bounds.ended:
                data = await events.next()
                if data is None or data.strip() == DONE:
                    raise Unreachable("the answer broke off before its end", "try again")
                chunk = bounds.checked(read(document(data, "an event of the answer")))
                if chunk.ids or chunk.finish:
                    yield chunk
            await self._last_words(events, bounds, read)

    async def _last_words(self, events: EventReader, bounds: AnswerBounds, read: Reader) -> None:
        """What follows the end, so that the connection can serve again. An engine that does not come to its own end
        soon, or breaks off, has its connection closed: the answer is whole."""
        events.silence = min(events.silence, LAST_WORDS)
        for _ in range(AFTER_END):
            try:
                data = await events.next()
            except (Unreachable, httpx2.TransportError):
                return
            if data is None:
                return
            if data.strip() != DONE:
                bounds.checked(read(document(data, "an event of the answer")))

    async def close(self) -> None:
        """Ends all connections."""
        await self._client.aclose()

    async def _whole(self, call: Call) -> dict[str, Any]:
        """The JSON object that the engine answers."""
        async with self._answer(call) as answer:
            body = await self._body(answer, MAX_ANSWER)
        if len(body) > MAX_ANSWER:
            raise RemoteError(f"the answer has more than {MAX_ANSWER} bytes", "ask for less at a time")
        return document(body)

    @asynccontextmanager
    async def _answer(self, call: Call) -> AsyncIterator[httpx2.Response]:
        """An answer that began well, its body unread."""
        try:
            async with self._turns.one():
                answer = await self._begun(call)
                try:
                    if answer.status_code >= 300:
                        info = strict_json.error_in(await self._body(answer, MAX_ERROR))
                        raise refusal(answer.status_code, info.get("type"))
                    require_plain(answer)
                    yield answer
                finally:
                    await answer.aclose()
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error
        except TimeoutError as error:
            raise Unreachable(f"{self.url} went silent in the middle of an answer", TIMED_OUT) from error
        except RemoteError as error:
            if error.hint == strict_json.HINT:  # which speaks of our own server
                error.hint = f"is this a server of the engine {self.engine.name}?"
            raise

    async def _begun(self, call: Call) -> httpx2.Response:
        method = "GET" if call.body is None else "POST"
        request = self._client.build_request(method, call.path, json=call.body)
        self.traffic.sent += len(request.content)
        for attempt in range(self.patience.attempts):
            try:
                async with asyncio.timeout(self.patience.begin):
                    return await self._client.send(request, stream=True)
            except NEVER_SENT:
                if attempt == self.patience.attempts - 1:
                    raise
                await asyncio.sleep(self.patience.pause * 2**attempt)
            except TimeoutError as error:
                waited = f"{self.patience.begin:g} s"
                raise Unreachable(f"{self.url} did not begin to answer within {waited}", TIMED_OUT) from error
        raise AssertionError("the last attempt returns or raises")

    async def _body(self, answer: httpx2.Response, limit: int) -> bytes:
        """The body, or of a longer one a little more than `limit` bytes: the rest is never read."""
        body = bytearray()
        async with asyncio.timeout(self.patience.whole):
            async with aclosing(self._parts(answer)) as parts:
                async for part in parts:
                    body += part
                    if len(body) > limit:
                        break
        return bytes(body)

    async def _parts(self, answer: httpx2.Response) -> AsyncGenerator[bytes, None]:
        async for part in answer.aiter_raw():
            self.traffic.received += len(part)
            yield part

    def _unreachable(self, error: Exception) -> Unreachable:
        hint = "is the engine running there, and is the address right?"
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            hint = "its certificate is not trusted here: give the engine's certificate, as PEM, if it signed its own"
        if isinstance(error, BrokenOff | httpx2.ReadError | httpx2.WriteError):
            return Unreachable(
                f"{self.url} broke off the connection before the answer ended",
                "see there whether the engine still runs, and ask again",
            )
        return Unreachable(f"{self.url} does not answer ({type(error).__name__})", hint)


def _is_proxied(url: str) -> bool:
    """Whether the environment names a proxy for this address. httpx2's own, slower transport speaks to it."""
    parsed = urlsplit(url)
    return bool(getproxies().keys() & {parsed.scheme, "all"}) and not proxy_bypass(parsed.hostname or "")
