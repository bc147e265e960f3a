"""Decides which enclaves get the provider's table. The client passes two requests on from its enclave.

POST /v1/split/challenge  {}                               -> {"nonce": hex}
POST /v1/split/release    {"nonce", "public", "quote": b64} -> the encrypted package
(enclave/release.py)
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

from pydantic import Field

from milkglass.enclave import quote, release
from milkglass.enclave.package import TablePackage
from milkglass.errors import Busy, EnclaveError, UsageError
from milkglass.server.http.routing import RequestBody

CHALLENGE, RELEASE = "/v1/split/challenge", "/v1/split/release"
MAX_NONCES, LIFE = 256, 120.0  # the most open challenges, and how many seconds each stays open
MAX_BODY = 256 << 10
UNATTESTED = "start the server with --allow-unattested only where the client may have the table"


class ReleaseRequest(RequestBody):
    nonce: str = Field(pattern="^[0-9a-f]{64}$")
    public: str = Field(pattern="^[0-9a-f]{64}$")
    quote: str = Field(max_length=2 * quote.MAX_QUOTE)


@dataclass
class Gate:
    """Releases a table to enclaves.

    Attributes:
        measurements: MRENCLAVE, in hex, of the enclaves that may have it.
        unattested: whether enclaves without attestation may have it too.
        trust: the root that quotes must lead to.
    """

    package: TablePackage = field(repr=False)
    measurements: frozenset[str] = frozenset()
    unattested: bool = False
    trust: quote.Trust = quote.INTEL
    _nonces: dict[str, float] = field(default_factory=dict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)  # challenges and releases run in different threads

    def challenge(self) -> str:
        """Returns a nonce that can be used once. Raises Busy if too many are open."""
        now, nonce = time.monotonic(), secrets.token_hex(release.NONCE)
        with self._lock:
            self._nonces = {one: until for one, until in self._nonces.items() if until > now}
            if len(self._nonces) >= MAX_NONCES:
                raise Busy(f"{MAX_NONCES} challenges are open", "try again in a moment")
            self._nonces[nonce] = now + LIFE
        return nonce

    def release(self, request: ReleaseRequest) -> Iterator[bytes]:
        """Yields the encrypted package in pieces. Raises EnclaveError if the enclave may not have it."""
        with self._lock:
            until = self._nonces.pop(request.nonce, 0.0)
        if until < time.monotonic():
            raise EnclaveError("the challenge is not open: it was answered, or is too old", "ask for another")
        public, nonce = bytes.fromhex(request.public), bytes.fromhex(request.nonce)
        self.require(_decoded(request.quote), release.report_data(public, nonce))
        return release.encrypted(self._encoded, public, nonce)

    @cached_property
    def _encoded(self) -> bytes:
        """Returns the encoded package, made once: all enclaves get the same bytes, each encrypted under its own key."""
        return self.package.encode()

    def require(self, evidence: bytes, data: bytes) -> None:
        """Raises EnclaveError unless the quote is of an enclave that may have the table, and answers `data`."""
        software = _software(evidence)
        if software is None:
            quote.verify(evidence, data, self.measurements, self.trust)
        elif not self.unattested:
            raise EnclaveError(f"an enclave of kind {software.get('kind')!r} is not attested", UNATTESTED)
        elif software.get("report_data") != data.hex():
            raise EnclaveError("the quote answers another question", "ask for a new challenge")


def measurements_of(words: Collection[str]) -> frozenset[str]:
    """Returns measurements as quotes have them: hex in lower case. Raises UsageError for what is no MRENCLAVE."""
    for one in words:
        if not re.fullmatch("[0-9a-fA-F]{64}", one):
            raise UsageError(f"the measurement {one!r} is not 64 hex digits", "sign.sh prints it as mr_enclave")
    return frozenset(one.lower() for one in words)


def _software(evidence: bytes) -> dict[str, object] | None:
    """Returns the fields of a software quote, or None for any other."""
    try:
        value = json.loads(evidence)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "milkglass_software_quote" in value else None


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise EnclaveError("the quote is not base64", "speak version 1 of the protocol") from None
