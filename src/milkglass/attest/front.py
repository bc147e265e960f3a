"""The server inside a confidential machine: it owns the TLS key, gives evidence, and hands requests to an engine.

The engine listens on the machine's own loopback, such as vLLM or `milkglass serve`. What is not a listed path is not
handed on. Evidence is made at most EVIDENCE_PER_MINUTE times a minute, since processors are slow to sign and limit it
themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from cryptography import x509
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from milkglass.attest import passthrough, sealing
from milkglass.attest.chains import spki_of
from milkglass.attest.channel import RELEASE_PATH
from milkglass.attest.connections import SeparateConnections
from milkglass.attest.evidence import NONCE
from milkglass.attest.passthrough import (
    ANSWERED_HEADERS,
    EVENTS_TYPE,
    FORWARDED_HEADERS,
    JSON_TYPE,
    QUIET_HEADER,
    STATE_HEADER,
)
from milkglass.attest.providers import PATH
from milkglass.attest.sealing import Vault
from milkglass.attest.sources import EvidenceSource, Software
from milkglass.errors import Busy, Unreachable, UsageError

EVIDENCE_PER_MINUTE = 60  # pieces of evidence a minute
SILENCE_SECONDS = 600.0  # seconds without a byte of the engine's
MAX_CONNECTIONS = 1024  # to the engine at a time


def key_of(certificate: Path) -> bytes:
    """Returns SHA-256 of the public key in a PEM file, whose first certificate is the server's."""
    return spki_of(x509.load_pem_x509_certificates(certificate.read_bytes())[0])


class Front:
    """The application.

    Attributes:
        engine: the address of the engine on this machine. None: evidence alone is given.
        vault: keeps files that are released to this machine. None: none are taken.
    """

    def __init__(
        self, source: EvidenceSource, spki: bytes, engine: str | None = None, vault: Vault | None = None
    ) -> None:
        self.source, self.spki, self.engine, self.vault = source, spki, engine, vault
        self.attested = not isinstance(source.hardware, Software)
        self._times: deque[float] = deque(maxlen=EVIDENCE_PER_MINUTE)
        self._client: Any = None

    def app(self) -> Starlette:
        @asynccontextmanager
        async def running(_: Starlette) -> AsyncIterator[None]:
            async with httpx2.AsyncClient(
                base_url=self.engine or "http://127.0.0.1", trust_env=False, headers={"Accept-Encoding": "identity"},
                timeout=httpx2.Timeout(SILENCE_SECONDS, connect=10.0), transport=SeparateConnections(MAX_CONNECTIONS),
            ) as self._client:  # fmt: skip
                yield

        headers = {STATE_HEADER: "see the evidence" if self.attested else "NOT ATTESTED", "Cache-Control": "no-store"}
        forwarding = ((path, method, self.forward) for path, method in passthrough.PATHS.items())
        work = [(PATH, "GET", self.evidence), *forwarding]
        if self.vault is not None:
            work.append((RELEASE_PATH, "POST", self.release))
        routes = [
            Route(path, passthrough.answering(handler, headers), methods=[method]) for path, method, handler in work
        ]
        return Starlette(routes=routes, lifespan=running)

    async def evidence(self, request: Request) -> Response:
        """Answers with evidence for the nonce of the request."""
        nonce, now = _nonce(request.query_params.get("nonce", "")), time.monotonic()
        if len(self._times) == EVIDENCE_PER_MINUTE and now - self._times[0] < 60:
            raise Busy(f"more than {EVIDENCE_PER_MINUTE} pieces of evidence a minute", "try again in a minute")
        self._times.append(now)
        evidence = await run_in_threadpool(self.source.evidence, self.spki, nonce)
        return Response(evidence.document(), media_type=JSON_TYPE)

    async def release(self, request: Request) -> Response:
        """Keeps a file that was sealed to this machine."""
        assert self.vault is not None
        name = sealing.require_name(request.query_params.get("name", ""))
        sealed = await passthrough.body_of(request, sealing.MAX_FILE_BYTES)
        await run_in_threadpool(self.vault.open, sealed, name)
        return JSONResponse({"kept": name})

    async def forward(self, request: Request) -> Response:
        """Hands a request to the engine, and its answer back, quietly if that is asked for."""
        if self.engine is None:
            raise UsageError("this server has no engine behind it", "start it with --in-front-of ADDRESS")
        quiet = passthrough.quiet_of(request.headers.get(QUIET_HEADER))
        body = await passthrough.body_of(request)
        forwarded = self._client.build_request(
            request.method, request.url.path, content=body, headers=passthrough.kept(request.headers, FORWARDED_HEADERS)
        )
        try:
            answer = await self._client.send(forwarded, stream=True)
        except httpx2.TransportError as error:
            raise Unreachable(f"the engine does not answer ({type(error).__name__})", "is it running?") from None
        headers = passthrough.kept(answer.headers, ANSWERED_HEADERS)
        if quiet == "slots" and EVENTS_TYPE in headers.get("content-type", ""):
            parts = passthrough.slots(answer.aiter_raw())
            return StreamingResponse(passthrough.closing(parts, answer), answer.status_code, headers)
        if quiet is not None:
            content = await answer.aread()
            await answer.aclose()
            return Response(passthrough.padded(content), answer.status_code, headers)
        return StreamingResponse(passthrough.closing(answer.aiter_raw(), answer), answer.status_code, headers)


def _nonce(text: str) -> bytes:
    try:
        nonce = bytes.fromhex(text)
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE:
        raise UsageError(
            f"the nonce has {len(nonce)} bytes, {NONCE} are required", f"add ?nonce= and {2 * NONCE} hex digits"
        )
    return nonce
