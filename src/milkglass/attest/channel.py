"""Connections to an attested server, each admitted before the first byte of a request.

A connection's TLS key needs a lease: evidence that the policy allows, and that the hardware bound to this key. The key
is looked at after the handshake on the very connection, and again before each write, so that no write begins to a key
without a lease, nor after its end. Evidence is asked for on a connection of its own, and counts for the key of that
connection. So the rotation of keys, restarts and several servers behind one address work, and nothing is sent in
between. The ordinary check of certificates stays on.

Why not inside the handshake: evidence there can be relayed (CVE-2026-33697). Why not an exporter: Python has none.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import httpx2
from cryptography import x509

from milkglass.attest import evidence
from milkglass.attest.chains import spki_of
from milkglass.attest.claims import Verdict
from milkglass.attest.connections import SILENCE_SECONDS, client_of
from milkglass.attest.evidence import MAX_DOCUMENT, NONCE
from milkglass.attest.policy import Policy, judge
from milkglass.attest.providers import PROVIDERS, read_evidence
from milkglass.attest.sources import Collateral, with_collateral
from milkglass.errors import AttestationError, Busy, Unreachable

RELEASE_PATH = "/milkglass/release"
EVIDENCE_SECONDS = 30.0  # for a whole answer with evidence
ADMISSION_SECONDS = 60.0  # for the lease of one key
FAILURE_SECONDS = 5.0  # in which a key that was refused is not asked again
CLOCK_JUMP = 30.0  # seconds by which wall clock and monotonic clock may part before all leases end
MAX_CONNECTIONS = 240  # to the server at a time: fewer than it takes of one address, since evidence needs one, too
MAX_ATTEMPTS = 16  # keys without a lease under one request
MAX_EVIDENCE = 4  # pieces of evidence for one key: servers behind one address may answer in turn
PIECE_BYTES = 64 << 10  # of a body, each of which is sent only while the lease lasts

_Error = TypeVar("_Error", bound=BaseException)
Verify = Callable[[bytes, bytes, bytes], Verdict]  # of a document, SHA-256 of the SPKI, and the nonce


class NoLease(ssl.SSLError):
    """The connection's key has no lease. `spki`: SHA-256 of the key."""

    def __init__(self, spki: bytes) -> None:
        super().__init__("the key has no lease")
        self.spki = spki


@dataclass
class Leases:
    """The keys to which requests may be sent, each until a time.

    Attributes:
        seconds: of a lease.
        monotonic, wall: clocks. If they part, somebody set the wall clock, by which evidence is judged: all leases end.
    """

    seconds: float
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    _until: dict[bytes, float] = field(default_factory=dict)
    _offset: float | None = None

    def live(self, spki: bytes) -> bool:
        self._check_clocks()
        return self._until.get(spki, 0.0) > self.monotonic()

    def grant(self, spki: bytes, judged_at: float) -> None:
        """Lets requests be sent to a key.

        Args:
            judged_at: `offset` before its evidence was asked for.

        Raises:
            AttestationError: the wall clock was set since then: perhaps the evidence was judged by a wrong time.
        """
        if (jump := abs(self.offset() - judged_at)) > CLOCK_JUMP:
            fault = f"the clock was set by {jump:,.0f} s while evidence was judged; {CLOCK_JUMP:g} s are allowed"
            raise AttestationError("clock", fault, "try again")
        self._check_clocks()
        self._until[spki] = self.monotonic() + self.seconds

    def offset(self) -> float:
        """Returns the seconds between the two clocks."""
        return self.wall() - self.monotonic()

    def _check_clocks(self) -> None:
        offset = self.offset()
        if self._offset is not None and abs(offset - self._offset) > CLOCK_JUMP:
            self._until.clear()
        if self._offset is None or not self._until:
            self._offset = offset


def admitting(is_allowed: Callable[[bytes], bool], authority: Path | None) -> ssl.SSLContext:
    """Returns a context whose connections send nothing to a key that is not allowed.

    Args:
        is_allowed: says whether a key, by SHA-256 of its SPKI, may be written to now.
        authority: a PEM file with the server's certificate or its authority. None: the system's.
    """

    class AdmittedConnection(ssl.SSLObject):
        """A connection that looks at the server's key after the handshake, and before each write."""

        _spki: bytes | None = None

        def do_handshake(self) -> None:
            super().do_handshake()
            certificate = self.getpeercert(binary_form=True)
            self._spki = spki_of(x509.load_der_x509_certificate(certificate)) if certificate else b""
            self._require()

        def write(self, data: Any) -> int:
            self._require()
            return super().write(data)

        def _require(self) -> None:
            if self._spki is None or not is_allowed(self._spki):
                raise NoLease(self._spki or b"")

    context = ssl.create_default_context(cafile=None if authority is None else str(authority))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The variable SSLKEYLOGFILE would have the connections' secrets written to a file
    context.keylog_filename = None  # type: ignore[assignment]
    context.sslobject_class = AdmittedConnection
    return context


class AttestedChannel:
    """Sends requests to an attested server.

    Attributes:
        verdicts: receives each verdict, also a refusal. Evidence that does not verify has none.

    Args:
        silence: seconds that an answer may be silent, and that a request waits for a free connection.
    """

    def __init__(
        self, policy: Policy, verify: Verify, authority: Path | None = None,
        verdicts: Callable[[Verdict], None] = lambda verdict: None, leases: Leases | None = None,
        silence: float = SILENCE_SECONDS,
    ) -> None:  # fmt: skip
        self.policy, self.verdicts, self._verify, self._authority = policy, verdicts, verify, authority
        self.leases = leases or Leases(policy.lease_seconds)
        self.context = admitting(self.leases.live, authority)
        self._admissions = WeakValueDictionary[bytes, asyncio.Lock]()  # by key, while somebody waits for its lease
        self._failures = dict[bytes, tuple[float, AttestationError | Unreachable]]()  # until when, and with what
        self._silence = silence
        self._client = client_of(policy.server, MAX_CONNECTIONS, self.context, silence)

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> httpx2.Response:
        """Sends a request and returns the answer, its body unread. Close it.

        Raises:
            AttestationError: the policy does not allow what answers there. Nothing was sent to it without a lease.
            Unreachable: there is no answer, or none in time.
            Busy: no connection is free.
        """
        admissions, sent_headers = 0, httpx2.Headers(headers, "latin-1")
        sent_headers["Content-Length"] = str(len(body))
        while True:
            request = self._client.build_request(method, path, headers=sent_headers, content=self.pieces(body))
            try:
                async with asyncio.timeout(2 * self._silence):  # for a free connection, and for the head
                    return await self._client.send(request, stream=True)
            except (httpx2.ReadTimeout, TimeoutError) as error:
                silent, late = f"was silent for {self._silence:g} s", f"began no answer within {2 * self._silence:g} s"
                fault = f"{self.policy.server} {silent if isinstance(error, httpx2.ReadTimeout) else late}"
                raise Unreachable(fault, "try again; ask for shorter answers, or for a stream") from None
            except (httpx2.TransportError, ssl.SSLError) as error:
                if not await self.admitted(error, admissions):
                    raise unreachable(self.policy.server, error) from error
                admissions += 1

    async def pieces(self, body: bytes) -> AsyncIterator[bytes]:
        """Yields a body in pieces. The connection looks at its lease before each."""
        for start in range(0, len(body), PIECE_BYTES):
            yield body[start : start + PIECE_BYTES]

    async def admitted(self, error: Exception, earlier: int) -> bool:
        """Returns whether an error was a key without a lease, which has one now.

        Args:
            earlier: keys that were admitted under this request before.

        Raises:
            AttestationError: the policy does not allow the key, or the server shows one new key after another.
        """
        no_lease = _cause(error, NoLease)
        if no_lease is None:
            return False
        if earlier == MAX_ATTEMPTS:
            raise AttestationError(
                "rotation", f"{self.policy.server} showed a new key each of {MAX_ATTEMPTS} times", "try again"
            )
        await self.admit(no_lease.spki)
        return True

    async def admit(self, spki: bytes) -> None:
        """Asks for evidence until this key gave it, and grants a lease to each key that did.

        Behind one address several servers may answer in turn, so that the first evidence may be another one's. A key
        that is gone, since it was rotated, is not waited for.

        Args:
            spki: SHA-256 of the key. Empty: of whoever answers first.

        Raises:
            AttestationError: the evidence does not count. For some seconds the same is raised without asking again.
            Unreachable: none came in time.
        """
        lock = self._admissions.setdefault(spki, asyncio.Lock())
        try:
            async with asyncio.timeout(ADMISSION_SECONDS), lock:
                self._raise_recent_failure(spki)
                await self._admit(spki)
        except TimeoutError:
            fault = f"{self.policy.server} gave no evidence that counts within {ADMISSION_SECONDS:g} s"
            raise Unreachable(fault, "try again later") from None
        except (AttestationError, Unreachable) as error:
            self._failures[spki] = (time.monotonic() + FAILURE_SECONDS, error)
            raise

    def _raise_recent_failure(self, spki: bytes) -> None:
        """Raises what a key's last admission failed with, if that was moments ago: those who waited share it."""
        now = time.monotonic()
        self._failures = {key: failure for key, failure in self._failures.items() if failure[0] > now}
        if spki in self._failures:
            raise self._failures[spki][1].with_traceback(None)

    async def _admit(self, spki: bytes) -> None:
        for _ in range(MAX_EVIDENCE):
            if self.leases.live(spki):
                return
            nonce, offset = secrets.token_bytes(NONCE), self.leases.offset()
            peer, document = await evidence_from(self.policy.server, nonce, self._authority, self.policy.evidence)
            if not self.leases.live(peer):
                verdict = await asyncio.to_thread(self._verify, document, peer, nonce)
                self.verdicts(verdict)
                if not verdict.holds:
                    name, reason = next(iter(verdict.refused.items()))
                    hint = "see `milkglass attest URL --policy POLICY`"
                    raise AttestationError(name, f"nothing was sent without a lease: {reason}", hint)
                self.leases.grant(peer, offset)
            if not spki:
                return

    async def close(self) -> None:
        await self._client.aclose()


async def evidence_from(
    server: str, nonce: bytes, authority: Path | None, provider: str = "milkglass"
) -> tuple[bytes, bytes]:
    """Asks a server for evidence on a connection of its own.

    Returns:
        SHA-256 of the connection's key, and the document.

    Raises:
        AttestationError: it gives none, or too much.
        Unreachable: there is no answer.
    """
    keys, body = list[bytes](), bytearray()

    def is_first_key(spki: bytes) -> bool:
        keys.append(spki)
        return spki == keys[0]

    path = PROVIDERS[provider].path.format(nonce=nonce.hex())
    try:
        async with (
            asyncio.timeout(EVIDENCE_SECONDS),
            client_of(server, 1, admitting(is_first_key, authority), EVIDENCE_SECONDS) as client,
            client.stream("GET", path) as answer,
        ):
            if answer.status_code != 200:
                hint = "try again in a minute" if answer.status_code == Busy.status else ""
                raise AttestationError("evidence", f"the server gives no evidence (status {answer.status_code})", hint)
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > MAX_DOCUMENT:
                    raise AttestationError("size", f"the evidence has more than {MAX_DOCUMENT:,} bytes")
    except (httpx2.TransportError, ssl.SSLError) as error:
        raise unreachable(server, error) from error
    except TimeoutError:
        raise Unreachable(f"{server} gave no whole evidence within {EVIDENCE_SECONDS:g} s", "try again later") from None
    return keys[0], bytes(body)


def verifier(
    policy: Policy, pinned: Mapping[str, str], collateral: Collateral = dict,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Verify:  # fmt: skip
    """Returns what judges documents of a server by a policy.

    Args:
        pinned: the lock file's machines.
        collateral: returns the makers' signed files that the client has.
    """

    def verify(document: bytes, spki: bytes, nonce: bytes) -> Verdict:
        moment, host = now(), urlsplit(policy.server).hostname or ""
        received = read_evidence(policy.evidence, document, spki, nonce, host, moment)
        machine, gpus, bound = evidence.verify(with_collateral(received, collateral()), moment, spki, nonce)
        return judge(policy, machine, gpus, bound, pinned)

    return verify


def unreachable(server: str, error: BaseException) -> Unreachable:
    """Returns why a server cannot be reached, by the error of the library."""
    if certificate_error := _cause(error, ssl.SSLCertVerificationError):
        return Unreachable(
            f"the certificate of {server} is not trusted, or is for another name ({certificate_error.verify_message})",
            "give its certificate or its authority with --certificate, and the name that stands in it",
        )
    return Unreachable(f"{server} cannot be reached ({type(error).__name__})", "is the server running?")


def _cause(error: BaseException | None, error_type: type[_Error]) -> _Error | None:
    """Returns the error of a type inside the errors of the libraries that carried it."""
    while error is not None and not isinstance(error, error_type):
        error = error.__cause__ or error.__context__
    return error
