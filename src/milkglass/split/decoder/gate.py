"""Decides which enclaves get the provider's table.

The client forwards two requests of its enclave:

POST /v1/split/challenge  {}                                                  -> {"nonce": hex}
POST /v1/split/release    {"nonce", "public", "quote": b64, "collateral": b64} -> the encrypted package
enclave/release.py describes the package. `collateral` is what Intel signs beside a quote of SGX.
"""

from __future__ import annotations

import base64
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

from milkglass.attest.intel import MAX_QUOTE_BYTES
from milkglass.enclave import release
from milkglass.enclave.package import TablePackage
from milkglass.enclave.verification import QuoteVerifier
from milkglass.errors import Busy, EnclaveError, UsageError
from milkglass.server.http.routing import RequestBody

log = logging.getLogger(__name__)

CHALLENGE_PATH, RELEASE_PATH = "/v1/split/challenge", "/v1/split/release"
MAX_OPEN_CHALLENGES, CHALLENGE_SECONDS = 256, 120.0  # the most open challenges, and how long each stays open
MAX_COLLATERAL_CHARACTERS, MAX_BODY_BYTES = 192 << 10, 384 << 10  # of base64, and of a request
UNATTESTED_HINT = "start the server with --allow-unattested only where the client may have the table"


class ReleaseRequest(RequestBody):
    """Describes an enclave's request for the table.

    Attributes:
        nonce: the nonce of a challenge, in hex.
        public: the enclave's X25519 public key, in hex.
        quote: the quote that binds the enclave's code to the nonce and its key, in base64.
        collateral: what Intel signs beside a quote of SGX, in base64; "" for other kinds.
    """

    nonce: str = Field(pattern="^[0-9a-f]{64}$")
    public: str = Field(pattern="^[0-9a-f]{64}$")
    quote: str = Field(max_length=2 * MAX_QUOTE_BYTES)
    collateral: str = Field("", max_length=MAX_COLLATERAL_CHARACTERS)


@dataclass
class TableGate:
    """Releases the provider's table to enclaves that may have it.

    Attributes:
        package: the table with what belongs to it.
        verifier: decides which quotes of SGX are accepted. None: no quote is.
        allow_unattested: whether enclaves that are not attested get the table, too.
    """

    package: TablePackage = field(repr=False)
    verifier: QuoteVerifier | None = None
    allow_unattested: bool = False
    _deadlines: dict[str, float] = field(default_factory=dict, repr=False)  # by nonce, of the open challenges
    _lock: Lock = field(default_factory=Lock, repr=False)  # challenges and releases run in different threads

    def challenge(self) -> str:
        """Returns the nonce of a new challenge, which can be used once. Raises Busy if too many challenges are open."""
        now, nonce = time.monotonic(), secrets.token_hex(release.NONCE_BYTES)
        with self._lock:
            self._deadlines = {
                open_nonce: deadline for open_nonce, deadline in self._deadlines.items() if deadline > now
            }
            if len(self._deadlines) >= MAX_OPEN_CHALLENGES:
                raise Busy(f"{MAX_OPEN_CHALLENGES} challenges are open", "try again in a moment")
            self._deadlines[nonce] = now + CHALLENGE_SECONDS
        return nonce

    def release(self, request: ReleaseRequest) -> Iterator[bytes]:
        """Returns the pieces of the encrypted package.

        Raises:
            EnclaveError: the challenge is not open, or the enclave may not have the table.
        """
        with self._lock:
            deadline = self._deadlines.pop(request.nonce, 0.0)
        if deadline < time.monotonic():
            raise EnclaveError("the challenge is not open: it was answered, or is too old", "ask for another")
        public_key, nonce = bytes.fromhex(request.public), bytes.fromhex(request.nonce)
        report_data = release.report_data(public_key, nonce)
        self.require_allowed(_decode_base64(request.quote), report_data, _decode_base64(request.collateral))
        return release.encrypt_package(self._package_bytes, public_key, nonce)

    @cached_property
    def _package_bytes(self) -> bytes:
        """Returns the package as bytes, made once: all enclaves get the same ones, each encrypted under its own key."""
        return self.package.to_bytes()

    def require_allowed(self, quote: bytes, report_data: bytes, collateral: bytes = b"") -> None:
        """Raises EnclaveError unless a quote is of an enclave that may have the table, and has this report data."""
        software_quote = _parse_software_quote(quote)
        if software_quote is None:
            if self.verifier is None:
                raise EnclaveError("no enclave of SGX is allowed here", "start the server with --allow-measurement")
            verdict = self.verifier.verify(quote, report_data, collateral)
            log.warning(
                "a quote of SGX counts; accepted by the policy: %s", "; ".join(verdict.accepted_weaknesses) or "nothing"
            )
        elif not self.allow_unattested:
            raise EnclaveError(f"an enclave of kind {software_quote.get('kind')!r} is not attested", UNATTESTED_HINT)
        elif software_quote.get("report_data") != report_data.hex():
            raise EnclaveError("the quote answers another question", "ask for a new challenge")


def measurements_of(texts: Collection[str]) -> frozenset[str]:
    """Returns measurements in lower case. Raises UsageError for one that is not an MRENCLAVE in hex."""
    for text in texts:
        if not re.fullmatch("[0-9a-fA-F]{64}", text):
            raise UsageError(f"the measurement {text!r} is not 64 hex digits", "sign.sh prints it as mr_enclave")
    return frozenset(text.lower() for text in texts)


def _parse_software_quote(quote: bytes) -> dict[str, object] | None:
    """Returns the fields of a software quote, or None for any other quote."""
    try:
        document = json.loads(quote)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "milkglass_software_quote" in document else None


def _decode_base64(text: str) -> bytes:
    """Decodes a field of a release request from base64. Raises EnclaveError."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error, or for other characters than ASCII its base class
        raise EnclaveError("the quote or its collateral is not base64", "speak version 1 of the protocol") from None
