"""Sends requests to an attested server on connections that are admitted before the first byte of a request.

A connection's TLS key needs a lease, for which the server gives evidence that the policy allows and that the hardware
bound to this key. The key is checked after the handshake on the very connection, and again before each write, so that
no write begins to a key without a lease, or after its end. Evidence is asked for on a connection of its own, and counts
for the key of that connection. So keys may be rotated, servers may be restarted, and several may be behind one address;
nothing is sent in between. The ordinary check of certificates stays on.

Evidence inside the TLS handshake could be relayed (CVE-2026-33697). A binding by TLS exporters is not possible, since
Python's ssl has none.
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
from milkglass.attest.chains import spki_digest_of
from milkglass.attest.claims import Verdict
from milkglass.attest.connections import SILENCE_SECONDS, make_client
from milkglass.attest.evidence import MAX_DOCUMENT_BYTES, NONCE_BYTES
from milkglass.attest.policy import Policy, judge
from milkglass.attest.providers import PROVIDERS, read_evidence
from milkglass.attest.sources import Collateral, with_collateral
from milkglass.errors import AttestationError, Busy, Unreachable

RELEASE_PATH = "/milkglass/release"
EVIDENCE_SECONDS = 30.0  # the seconds that a whole answer with evidence may take
ADMISSION_SECONDS = 60.0  # the seconds in which one key must get its lease
FAILURE_SECONDS = 5.0  # the seconds for which no evidence is asked for a key again that got no lease
MAX_CLOCK_JUMP_SECONDS = 30.0  # by which wall clock and monotonic clock may part before all leases end
MAX_CONNECTIONS = 240  # at a time: fewer than the server takes of one address, since evidence needs one, too
MAX_KEYS_PER_REQUEST = 16  # the most keys without a lease that one request may meet
MAX_EVIDENCE_REQUESTS = 4  # how often evidence is asked for a key: servers behind one address may answer in turn
PIECE_BYTES = 64 << 10  # bytes of a piece of a body; each is sent only while the lease lasts

_Error = TypeVar("_Error", bound=BaseException)
Verify = Callable[[bytes, bytes, bytes], Verdict]  # takes a document, SHA-256 of the SPKI, and the nonce


class NoLease(ssl.SSLError):
    """The connection's key has no lease. `spki_digest` is SHA-256 of its SPKI, or empty without a certificate."""

    def __init__(self, spki_digest: bytes) -> None:
        super().__init__("the key has no lease")
        self.spki_digest = spki_digest


@dataclass
class Leases:
    """Grants leases: says to which keys requests may be sent, and until when.

    Keys are named by SHA-256 of their SPKI. If the two clocks part, somebody set the wall clock, by which evidence is
    judged. All leases end then.

    Attributes:
        seconds: how long a lease lasts.
        monotonic_clock: the clock by which leases end, in seconds.
        wall_clock: the clock by which evidence is judged, in seconds.
    """

    seconds: float
    monotonic_clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    _end_times: dict[bytes, float] = field(default_factory=dict)
    _usual_offset: float | None = None

    def is_live(self, spki_digest: bytes) -> bool:
        """Returns whether a key has a lease."""
        self._check_clocks()
        return self._end_times.get(spki_digest, 0.0) > self.monotonic_clock()

    def grant(self, spki_digest: bytes, earlier_offset: float) -> None:
        """Gives a key a lease.

        Args:
            spki_digest: the key.
            earlier_offset: what `offset` returned before the key's evidence was asked for.

        Raises:
            AttestationError: the wall clock was set since then, so that the evidence may have been judged by a wrong
                time.
        """
        if (jump := abs(self.offset() - earlier_offset)) > MAX_CLOCK_JUMP_SECONDS:
            fault = (
                f"the clock was set by {jump:,.0f} s while evidence was judged; {MAX_CLOCK_JUMP_SECONDS:g} s are "
                "allowed"
            )
            raise AttestationError("clock", fault, "try again")
        self._check_clocks()
        self._end_times[spki_digest] = self.monotonic_clock() + self.seconds

    def offset(self) -> float:
        """Returns the seconds by which the wall clock is ahead of the monotonic clock."""
        return self.wall_clock() - self.monotonic_clock()

    def _check_clocks(self) -> None:
        """Ends all leases if the clocks have parted since the first of them."""
        offset = self.offset()
        if self._usual_offset is not None and abs(offset - self._usual_offset) > MAX_CLOCK_JUMP_SECONDS:
            self._end_times.clear()
        if self._usual_offset is None or not self._end_times:
            self._usual_offset = offset


def admission_context(is_allowed: Callable[[bytes], bool], authority: Path | None) -> ssl.SSLContext:
    """Returns a TLS context whose connections send no application data to a key that is not allowed.

    Args:
        is_allowed: says whether data may be sent to a key, by SHA-256 of its SPKI, at this moment.
        authority: a PEM file with the server's certificate or its authority. None: the system's authorities.
    """

    class AdmittedConnection(ssl.SSLObject):
        """Checks the server's key after the handshake, and before each write."""

        _spki: bytes | None = None

        def do_handshake(self) -> None:
            super().do_handshake()
            certificate = self.getpeercert(binary_form=True)
            self._spki = spki_digest_of(x509.load_der_x509_certificate(certificate)) if certificate else b""
            self._require()

        def write(self, data: Any) -> int:
            self._require()
            return super().write(data)

        def _require(self) -> None:
            if self._spki is None or not is_allowed(self._spki):
                raise NoLease(self._spki or b"")

    context = ssl.create_default_context(cafile=None if authority is None else str(authority))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The environment's SSLKEYLOGFILE would have the connections' secrets written to a file
    context.keylog_filename = None  # type: ignore[assignment]
    context.sslobject_class = AdmittedConnection
    return context


class AttestedChannel:
    """Sends requests to an attested server.

    Attributes:
        policy: the policy of the server.
        on_verdict: receives each verdict, also one that refuses. Evidence that does not verify has none.
        leases: the leases of the server's keys.
        context: the TLS context of all connections to which requests are sent.

    Args:
        verify: judges a document of the server (`make_verifier`).
        authority: a PEM file with the server's certificate or its authority. None: the system's authorities.
        silence: the seconds that an answer may be silent, and that a request waits for a free connection.
    """

    def __init__(
        self, policy: Policy, verify: Verify, authority: Path | None = None,
        on_verdict: Callable[[Verdict], None] = lambda verdict: None, leases: Leases | None = None,
        silence: float = SILENCE_SECONDS,
    ) -> None:  # fmt: skip
        self.policy, self.on_verdict, self._verify, self._authority = policy, on_verdict, verify, authority
        self.leases = leases or Leases(policy.lease_seconds)
        self.context = admission_context(self.leases.is_live, authority)
        self._admissions = WeakValueDictionary[bytes, asyncio.Lock]()  # by key, while somebody waits for its lease
        self._failures = dict[bytes, tuple[float, AttestationError | Unreachable]]()  # until when, and with what
        self._silence = silence
        self._client = make_client(policy.server, MAX_CONNECTIONS, self.context, silence)

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> httpx2.Response:
        """Sends a request and returns the answer, whose body is unread. The caller must close it.

        Args:
            method: the HTTP method.
            path: the path and the query.
            headers: by name. Content-Length is added.
            body: the whole body.

        Raises:
            AttestationError: a key of the server got no lease. Nothing was sent to it.
            Unreachable: there is no answer, or none in time.
            Busy: no connection is free.
        """
        admission_count, sent_headers = 0, httpx2.Headers(headers, "latin-1")
        sent_headers["Content-Length"] = str(len(body))
        while True:
            request = self._client.build_request(method, path, headers=sent_headers, content=self.pieces(body))
            try:
                async with asyncio.timeout(2 * self._silence):  # for a free connection, and for the head
                    return await self._client.send(request, stream=True)
            except (httpx2.ReadTimeout, TimeoutError) as error:
                silence_text = f"was silent for {self._silence:g} s"
                delay_text = f"began no answer within {2 * self._silence:g} s"
                is_silent = isinstance(error, httpx2.ReadTimeout)
                fault = f"{self.policy.server} {silence_text if is_silent else delay_text}"
                raise Unreachable(fault, "try again; ask for shorter answers, or for a stream") from None
            except (httpx2.TransportError, ssl.SSLError) as error:
                if not await self.admit_again(error, admission_count):
                    raise unreachable_error(self.policy.server, error) from error
                admission_count += 1

    async def pieces(self, body: bytes) -> AsyncIterator[bytes]:
        """Yields a body in pieces. The connection checks its lease before it sends each."""
        for start in range(0, len(body), PIECE_BYTES):
            yield body[start : start + PIECE_BYTES]

    async def admit_again(self, error: Exception, earlier_count: int) -> bool:
        """Asks for a lease if a request failed for want of one. Returns whether the request may be sent again.

        Args:
            error: the error with which the request failed.
            earlier_count: how many times this was so for the same request.

        Raises:
            AttestationError: the key gets no lease, or the server shows one new key after another.
            Unreachable: no evidence came in time.
        """
        no_lease = _find_cause(error, NoLease)
        if no_lease is None:
            return False
        if earlier_count == MAX_KEYS_PER_REQUEST:
            raise AttestationError(
                "rotation", f"{self.policy.server} showed a new key each of {MAX_KEYS_PER_REQUEST} times", "try again"
            )
        await self.admit(no_lease.spki_digest)
        return True

    async def admit(self, spki_digest: bytes) -> None:
        """Asks for evidence until a key gave it, and grants a lease to each key that did.

        Behind one address several servers may answer in turn, so that the first evidence may be another server's. After
        MAX_EVIDENCE_REQUESTS the key is not waited for: it may be gone, since keys are rotated.

        Args:
            spki_digest: SHA-256 of the key's SPKI. Empty: the key of whichever server answers first.

        Raises:
            AttestationError: the evidence does not verify, or the policy refuses it. For FAILURE_SECONDS the same error
                is raised without asking again.
            Unreachable: no evidence came in time.
        """
        lock = self._admissions.setdefault(spki_digest, asyncio.Lock())
        try:
            async with asyncio.timeout(ADMISSION_SECONDS), lock:
                self._raise_recent_failure(spki_digest)
                await self._admit(spki_digest)
        except TimeoutError:
            fault = f"{self.policy.server} gave no evidence that counts within {ADMISSION_SECONDS:g} s"
            raise Unreachable(fault, "try again later") from None
        except (AttestationError, Unreachable) as error:
            self._failures[spki_digest] = (time.monotonic() + FAILURE_SECONDS, error)
            raise

    def _raise_recent_failure(self, spki_digest: bytes) -> None:
        """Raises the error of a key's last admission if that failed moments ago, so that all who waited get it."""
        now = time.monotonic()
        self._failures = {key: failure for key, failure in self._failures.items() if failure[0] > now}
        if spki_digest in self._failures:
            raise self._failures[spki_digest][1].with_traceback(None)

    async def _admit(self, spki_digest: bytes) -> None:
        """Does the work of `admit`, without its limit of time and its memory of failures."""
        for _ in range(MAX_EVIDENCE_REQUESTS):
            if self.leases.is_live(spki_digest):
                return
            nonce, offset = secrets.token_bytes(NONCE_BYTES), self.leases.offset()
            peer, document = await request_evidence(self.policy.server, nonce, self._authority, self.policy.evidence)
            if not self.leases.is_live(peer):
                verdict = await asyncio.to_thread(self._verify, document, peer, nonce)
                self.on_verdict(verdict)
                if not verdict.holds:
                    name, reason = next(iter(verdict.refusals.items()))
                    hint = "see `milkglass attest URL --policy POLICY`"
                    raise AttestationError(name, f"nothing was sent without a lease: {reason}", hint)
                self.leases.grant(peer, offset)
            if not spki_digest:
                return

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()


async def request_evidence(
    server: str, nonce: bytes, authority: Path | None, provider: str = "milkglass"
) -> tuple[bytes, bytes]:
    """Asks a server for evidence on a connection of its own.

    Args:
        server: the server's address, https://HOST:PORT.
        nonce: the nonce that the evidence must answer.
        authority: a PEM file with the server's certificate or its authority. None: the system's authorities.
        provider: the form of evidence, a name in `PROVIDERS`.

    Returns:
        SHA-256 of the SPKI of the connection's certificate, and the document.

    Raises:
        AttestationError: the server gives no evidence, or too much.
        Unreachable: there is no answer, or no whole one in time.
    """
    key_digests, body = list[bytes](), bytearray()

    def is_first_key(spki_digest: bytes) -> bool:
        key_digests.append(spki_digest)
        return spki_digest == key_digests[0]

    path = PROVIDERS[provider].path.format(nonce=nonce.hex())
    try:
        async with (
            asyncio.timeout(EVIDENCE_SECONDS),
            make_client(server, 1, admission_context(is_first_key, authority), EVIDENCE_SECONDS) as client,
            client.stream("GET", path) as answer,
        ):
            if answer.status_code != 200:
                hint = "try again in a minute" if answer.status_code == Busy.status else ""
                raise AttestationError("evidence", f"the server gives no evidence (status {answer.status_code})", hint)
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > MAX_DOCUMENT_BYTES:
                    raise AttestationError("size", f"the evidence has more than {MAX_DOCUMENT_BYTES:,} bytes")
    except (httpx2.TransportError, ssl.SSLError) as error:
        raise unreachable_error(server, error) from error
    except TimeoutError:
        raise Unreachable(f"{server} gave no whole evidence within {EVIDENCE_SECONDS:g} s", "try again later") from None
    return key_digests[0], bytes(body)


def make_verifier(
    policy: Policy, pinned: Mapping[str, str], collateral: Collateral = dict,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Verify:  # fmt: skip
    """Returns a function that verifies a server's document and judges it by a policy.

    Args:
        policy: the policy of the server.
        pinned: when each machine of the lock file was first seen, by its id.
        collateral: returns the makers' signed files that the client has.
        now: returns the time by which evidence is judged.
    """

    def verify(document: bytes, spki_digest: bytes, nonce: bytes) -> Verdict:
        time_of_check, host = now(), urlsplit(policy.server).hostname or ""
        received = read_evidence(policy.evidence, document, spki_digest, nonce, host, time_of_check)
        complete = with_collateral(received, collateral())
        machine, gpus, binding_claims = evidence.verify(complete, time_of_check, spki_digest, nonce)
        return judge(policy, machine, gpus, binding_claims, pinned)

    return verify


def unreachable_error(server: str, error: BaseException) -> Unreachable:
    """Returns the error that says why a server cannot be reached, from the library's error."""
    if certificate_error := _find_cause(error, ssl.SSLCertVerificationError):
        return Unreachable(
            f"the certificate of {server} is not trusted, or is for another name ({certificate_error.verify_message})",
            "give its certificate or its authority with --certificate, and the name that stands in it",
        )
    return Unreachable(f"{server} cannot be reached ({type(error).__name__})", "is the server running?")


def _find_cause(error: BaseException | None, error_type: type[_Error]) -> _Error | None:
    """Returns the first error of a type among an error and its causes, or None."""
    while error is not None and not isinstance(error, error_type):
        error = error.__cause__ or error.__context__
    return error
