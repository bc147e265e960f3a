"""Serves inside a confidential machine: owns the TLS key, gives evidence, and forwards requests to an engine.

The engine, such as vLLM or `milkglass serve`, listens on the machine's own loopback. Only listed paths are forwarded.
Processors are slow to sign, and limit how often they do. So one piece of evidence is made at a time, and few requests
wait for one. Each address gets evidence a limited number of times a minute, and so do all addresses together. When the
limit of all is used up, an address that had no evidence in the last minute still gets one piece.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from cryptography import x509
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from milkglass.attest import passthrough, sealing
from milkglass.attest.chains import spki_digest_of
from milkglass.attest.channel import RELEASE_PATH
from milkglass.attest.connections import make_client
from milkglass.attest.evidence import NONCE_BYTES
from milkglass.attest.providers import EVIDENCE_PATH
from milkglass.attest.sealing import ReleaseInbox
from milkglass.attest.sources import EvidenceSource, Software
from milkglass.errors import Busy, Unreachable, UsageError
from milkglass.server.http.guard import OPEN_PATHS, BodyRule, Guard
from milkglass.server.http.routing import CLIENT_GONE, result_unless_gone, wait_for_disconnect
from milkglass.server.settings import Limits

# Pieces of evidence a minute: for one address, for the /48 of an IPv6 address, and for all addresses
EVIDENCE_PER_ADDRESS, EVIDENCE_PER_SITE, EVIDENCE_PER_MINUTE = 30, 60, 240
# The most pieces a minute in all: those beyond EVIDENCE_PER_MINUTE go to addresses that had none in that minute
EVIDENCE_PER_MINUTE_WITH_FIRST = 960
# Requests for evidence that may be unfinished at a time: of all addresses, and of one
MAX_UNFINISHED, MAX_UNFINISHED_OF_ADDRESS = 12, 4
MAX_HELD_BYTES = 4 * passthrough.MAX_BODY_BYTES  # of all bodies that are arriving or are not answered
MAX_CONNECTIONS = 1024  # the most connections to the engine at a time


def spki_digest_of_file(certificate: Path) -> bytes:
    """Returns SHA-256 of the SPKI of the first certificate in a PEM file, which is the server's own."""
    return spki_digest_of(x509.load_pem_x509_certificates(certificate.read_bytes())[0])


class AttestationGateway:
    """Answers requests for evidence, takes released files, and forwards requests for listed paths to the engine.

    Attributes:
        source: makes the evidence.
        spki_digest: SHA-256 of the SPKI of the server's certificate, which the evidence binds.
        engine: the address of the engine on this machine. None: only evidence is given, and files are taken.
        inbox: receives files that are released to this machine. None: none are taken.
        limits: the limits of connections and bodies.
        token: the token that requests need, except those for evidence and health, and releases, which have a token of
            their own. None: no token is needed.
        is_attested: whether hardware signs the evidence.
    """

    def __init__(
        self, source: EvidenceSource, spki_digest: bytes, engine: str | None = None, inbox: ReleaseInbox | None = None,
        limits: Limits | None = None, token: str | None = None,
    ) -> None:  # fmt: skip
        self.source, self.spki_digest, self.engine, self.inbox, self.token = source, spki_digest, engine, inbox, token
        self.limits = limits or Limits()
        self.is_attested = not isinstance(source.hardware, Software)
        self._budget = EvidenceBudget()
        self._executor, self._unfinished = ThreadPoolExecutor(1, "evidence"), Counter[str]()
        self._client: Any = None

    def app(self) -> Starlette:
        """Returns the application behind its guard."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with make_client(self.engine or "http://127.0.0.1", MAX_CONNECTIONS) as self._client:
                yield

        forwarded = ((path, method, self.forward) for path, method in passthrough.METHOD_BY_PATH.items())
        handlers = [(EVIDENCE_PATH, "GET", self.evidence), *forwarded]
        if self.inbox is not None:
            handlers.append((RELEASE_PATH, "POST", self.receive_release))
        routes = [Route(path, handler, methods=[method]) for path, method, handler in handlers]
        app = passthrough.web_app(routes, lifespan)
        app.add_middleware(
            Guard, token=self.token, rule_of=_body_rule, max_held_bytes=MAX_HELD_BYTES, limits=self.limits,
            access_log=False, open_paths={*OPEN_PATHS, EVIDENCE_PATH, RELEASE_PATH},
        )  # fmt: skip
        app.add_middleware(passthrough.PaddingMiddleware)
        state = passthrough.SEE_EVIDENCE if self.is_attested else passthrough.NOT_ATTESTED
        headers = {passthrough.STATE_HEADER: state, "Cache-Control": "no-store"}
        app.add_middleware(passthrough.HeaderMiddleware, headers=lambda path, status: headers)
        return app

    async def evidence(self, request: Request) -> Response:
        """Answers with evidence for the nonce of the request. Raises UsageError for an invalid nonce, and Busy."""
        nonce = _parse_nonce(request.query_params.get("nonce", ""))
        address = "" if request.client is None else request.client.host
        group = _rate_limit_groups(address)[0]
        if self._unfinished[group] >= MAX_UNFINISHED_OF_ADDRESS or self._unfinished.total() >= MAX_UNFINISHED:
            raise Busy(
                f"too many pieces of evidence are being made or wait: {MAX_UNFINISHED_OF_ADDRESS} of one address, and "
                f"{MAX_UNFINISHED} of all, are possible", "try again in a moment",
            )  # fmt: skip
        self._budget.take(address)
        future = asyncio.get_running_loop().run_in_executor(
            self._executor, self.source.evidence, self.spki_digest, nonce
        )
        self._unfinished[group] += 1
        try:
            evidence = await result_unless_gone(future, wait_for_disconnect(request))
        finally:
            self._unfinished[group] -= 1
            self._unfinished += Counter()  # removes groups with none
        return CLIENT_GONE if evidence is None else Response(evidence.document(), media_type=passthrough.JSON_TYPE)

    async def receive_release(self, request: Request) -> Response:
        """Opens and keeps a file that was sealed to this machine."""
        assert self.inbox is not None
        self.inbox.require_sender(request.headers.get("authorization", ""))
        name = request.query_params.get("name", "")
        self.inbox.require_free(name)
        with self.inbox.arrival_file() as sealed:
            async for part in request.stream():
                await run_in_threadpool(sealed.write, part)
            await run_in_threadpool(self.inbox.unseal, sealed, name)
        return JSONResponse({"kept": name})

    async def forward(self, request: Request) -> Response:
        """Forwards a request to the engine, and the answer to the client: padded or in slots if a header says so.

        Raises UsageError without an engine or for an unknown mode, and Unreachable.
        """
        if self.engine is None:
            raise UsageError("this server has no engine behind it", "start it with --in-front-of ADDRESS")
        quiet = passthrough.parse_quiet_mode(request.headers.get(passthrough.QUIET_HEADER))
        body = await request.body()
        if request.method != "POST":
            body = b""  # a quiet request without a body is padded with blanks
        headers = passthrough.select_headers(request.headers.raw, passthrough.REQUEST_HEADERS)
        forwarded = self._client.build_request(request.method, request.url.path, content=body, headers=headers)
        return await result_unless_gone(self._answer(forwarded, quiet), wait_for_disconnect(request)) or CLIENT_GONE

    async def _answer(self, request: httpx2.Request, quiet: passthrough.QuietMode | None) -> Response:
        """Sends a request to the engine, and returns its answer for the client. Raises Unreachable."""
        try:
            answer = await self._client.send(request, stream=True)
        except httpx2.TransportError as error:
            raise Unreachable(f"the engine does not answer ({type(error).__name__})", "is it running?") from None
        headers = passthrough.select_headers(answer.headers.raw, passthrough.RESPONSE_HEADERS)
        if quiet is None or (quiet == "slots" and passthrough.EVENTS_TYPE in headers.get("content-type", "")):
            return passthrough.ForwardedResponse(answer, headers, in_slots=quiet is not None)
        return Response(await passthrough.read_whole(answer), answer.status_code, headers)


class EvidenceBudget:
    """Counts the evidence of the last minute, so that a few addresses cannot use up what all may have."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pieces = deque[tuple[float, tuple[str, ...]]]()  # time and groups of each piece
        self._count_of_group = Counter[str]()

    def take(self, address: str) -> None:
        """Counts one more piece of evidence for an address. Raises Busy if a limit of it or of all is used up."""
        now, groups = self._clock(), _rate_limit_groups(address)
        while self._pieces and now - self._pieces[0][0] >= 60:
            for group in self._pieces.popleft()[1]:
                self._count_of_group[group] -= 1
                if not self._count_of_group[group]:
                    del self._count_of_group[group]
        for group, limit in zip(groups, (EVIDENCE_PER_ADDRESS, EVIDENCE_PER_SITE), strict=False):
            if self._count_of_group[group] >= limit:
                raise Busy(
                    f"more than {limit} pieces of evidence a minute for one address",
                    "try again in a minute",
                    retry_after=60,
                )
        limit = EVIDENCE_PER_MINUTE if self._count_of_group[groups[-1]] else EVIDENCE_PER_MINUTE_WITH_FIRST
        if len(self._pieces) >= limit:
            raise Busy(f"more than {limit} pieces of evidence a minute", "try again in a minute", retry_after=60)
        self._pieces.append((now, groups))
        self._count_of_group.update(groups)


def _rate_limit_groups(address: str) -> tuple[str, ...]:
    """Returns the groups in which an address is counted: the address of IPv4, or of IPv6 its /64 and its /48."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return (address,)
    if isinstance(parsed, ipaddress.IPv4Address):
        return (str(parsed),)
    if parsed.ipv4_mapped:
        return (str(parsed.ipv4_mapped),)
    return tuple(str(ipaddress.ip_network((parsed, bits), strict=False)) for bits in (64, 48))


def _body_rule(scope: Scope) -> BodyRule:
    """Returns the limit of a request's body. A released file goes to disk as it arrives."""
    if scope["path"] == RELEASE_PATH:
        return BodyRule(sealing.MAX_FILE_BYTES + sealing.SEALED_EXTRA_BYTES, in_memory=False)
    return BodyRule(passthrough.MAX_BODY_BYTES)


def _parse_nonce(text: str) -> bytes:
    """Parses a nonce in hex. Raises UsageError if it has another length."""
    try:
        nonce = bytes.fromhex(text)
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise UsageError(
            f"the nonce has {len(nonce)} bytes, {NONCE_BYTES} are required",
            f"add ?nonce= and {2 * NONCE_BYTES} hex digits",
        )
    return nonce
