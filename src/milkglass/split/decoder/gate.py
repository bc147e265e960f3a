"""Decides which enclaves get the provider's table. The client passes two requests on from its enclave.

POST /v1/split/challenge  {}                                                  -> {"nonce": hex}
POST /v1/split/release    {"nonce", "public", "quote": b64, "collateral": b64} -> the encrypted package
(enclave/release.py; `collateral` is what Intel signs beside a quote of SGX)
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
import secrets
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

from pydantic import Field

from milkglass.attest.intel import MAX_QUOTE
from milkglass.enclave import release
from milkglass.enclave.package import TablePackage
from milkglass.enclave.verification import QuoteVerifier
from milkglass.errors import Busy, EnclaveError, UsageError
from milkglass.server.http.routing import RequestBody

log = logging.getLogger(__name__)

CHALLENGE, RELEASE = "/v1/split/challenge", "/v1/split/release"
MAX_NONCES, CHALLENGE_SECONDS = 256, 120.0  # the most open challenges, and how many seconds each stays open
MAX_COLLATERAL, MAX_BODY = 192 << 10, 384 << 10
UNATTESTED = "start the server with --allow-unattested only where the client may have the table"


class ReleaseRequest(RequestBody):
    nonce: str = Field(pattern="^[0-9a-f]{64}$")
    public: str = Field(pattern="^[0-9a-f]{64}$")
    quote: str = Field(max_length=2 * MAX_QUOTE)
    collateral: str = Field("", max_length=MAX_COLLATERAL)


@dataclass
class Gate:
    """Releases a table to enclaves.

    Attributes:
        verifier: decides which quotes of SGX count. None: none does.
        unattested: whether enclaves without attestation may have it too.
    """

    package: TablePackage = field(repr=False)
    verifier: QuoteVerifier | None = None
    unattested: bool = False
    _nonces: dict[str, float] = field(default_factory=dict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)  # challenges and releases run in different threads

    def challenge(self) -> str:
        """Returns a nonce that can be used once. Raises Busy if too many are open."""
        now, nonce = time.monotonic(), secrets.token_hex(release.NONCE_BYTES)
        with self._lock:
            self._nonces = {key: open_until for key, open_until in self._nonces.items() if open_until > now}
            if len(self._nonces) >= MAX_NONCES:
                raise Busy(f"{MAX_NONCES} challenges are open", "try again in a moment")
            self._nonces[nonce] = now + CHALLENGE_SECONDS
        return nonce

    def release(self, request: ReleaseRequest) -> Iterator[bytes]:
        """Yields the encrypted package in pieces. Raises EnclaveError if the enclave may not have it."""
        with self._lock:
            open_until = self._nonces.pop(request.nonce, 0.0)
        if open_until < time.monotonic():
            raise EnclaveError("the challenge is not open: it was answered, or is too old", "ask for another")
        public, nonce = bytes.fromhex(request.public), bytes.fromhex(request.nonce)
        self.require(_decoded(request.quote), release.report_data(public, nonce), _decoded(request.collateral))
        return release.encrypt_package(self._encoded, public, nonce)

    @cached_property
    def _encoded(self) -> bytes:
        """Returns the encoded package, made once: all enclaves get the same bytes, each encrypted under its own key."""
        return self.package.to_bytes()

    def require(self, evidence: bytes, data: bytes, collateral: bytes = b"") -> None:
        """Raises EnclaveError unless the quote is of an enclave that may have the table, and answers `data`."""
        software = _software_quote(evidence)
        if software is None:
            if self.verifier is None:
                raise EnclaveError("no enclave of SGX is allowed here", "start the server with --allow-measurement")
            verdict = self.verifier.require(evidence, data, collateral)
            log.warning("a quote of SGX counts; accepted by the policy: %s", "; ".join(verdict.accepted) or "nothing")
        elif not self.unattested:
            raise EnclaveError(f"an enclave of kind {software.get('kind')!r} is not attested", UNATTESTED)
        elif software.get("report_data") != data.hex():
            raise EnclaveError("the quote answers another question", "ask for a new challenge")


def measurements_of(texts: Collection[str]) -> frozenset[str]:
    """Returns measurements as quotes have them: hex in lower case. Raises UsageError for what is no MRENCLAVE."""
    for text in texts:
        if not re.fullmatch("[0-9a-fA-F]{64}", text):
            raise UsageError(f"the measurement {text!r} is not 64 hex digits", "sign.sh prints it as mr_enclave")
    return frozenset(text.lower() for text in texts)


def _software_quote(evidence: bytes) -> dict[str, object] | None:
    """Returns the fields of a software quote, or None for any other."""
    try:
        document = json.loads(evidence)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "milkglass_software_quote" in document else None


def _decoded(text: str) -> bytes:
    """Decodes base64. Raises EnclaveError."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise EnclaveError("the quote or its collateral is not base64", "speak version 1 of the protocol") from None
