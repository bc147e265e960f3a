"""An Intel of the tests' own: a root, platforms that it certified, their quotes of SGX, and the collateral it signs.

Quotes are made byte by byte after Intel's "SGX ECDSA QuoteGenReference", certificates after its "SGX PCK Certificate
Profile", collateral after the API of the Provisioning Certification Service, version 4. The verifier is the product's;
only the root that it is given is this one.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

NOW = datetime(2026, 11, 1, tzinfo=UTC)
MEASUREMENT, QE_SIGNER, DATA = bytes(range(32)), b"Q" * 32, bytes(range(64))
FMSPC, SVN, PCE_SVN, QE_SVN = "00906ed50000", 5, 11, 8
EXTENSION = "1.2.840.113741.1.13.1"
CONFIGURATION = ("dynamic_platform", "cached_keys", "smt_enabled")


# --- DER --------------------------------------------------------------------------------------------------------------
def der(tag: int, content: bytes) -> bytes:
    size = len(content)
    head = bytes([size]) if size < 128 else bytes([0x80 | (size.bit_length() + 7) // 8]) + size.to_bytes(
        (size.bit_length() + 7) // 8, "big"
    )  # fmt: skip
    return bytes([tag]) + head + content


def entry(place: str, value: bytes) -> bytes:
    """A pair of a number below Intel's and a value."""
    first, second, *others = (int(part) for part in f"{EXTENSION}.{place}".split("."))
    raw = bytes([40 * first + second])
    for one in others:
        parts = [one & 127]
        while one := one >> 7:
            parts.append(one & 127 | 128)
        raw += bytes(reversed(parts))
    return der(0x30, der(6, raw) + value)


def pck_extension(svn: int, pce_svn: int, fmspc: str, configuration: Sequence[str] | None) -> bytes:
    """What Intel says of a platform in its PCK certificate. configuration: what is on; None: of a single package."""
    levels = [entry(f"2.{number}", der(2, bytes([svn]))) for number in range(1, 17)]
    levels += [entry("2.17", der(2, bytes([pce_svn]))), entry("2.18", der(4, bytes([svn]) * 16))]
    parts = [
        entry("1", der(4, b"P" * 16)), entry("2", der(0x30, b"".join(levels))), entry("3", der(4, bytes(2))),
        entry("4", der(4, bytes.fromhex(fmspc))), entry("5", der(10, b"\0" if configuration is None else b"\1")),
    ]  # fmt: skip
    if configuration is not None:
        flags = [entry(f"7.{place}", der(1, b"\xff" if name in configuration else b"\0"))
                 for place, name in enumerate(CONFIGURATION, 1)]  # fmt: skip
        parts += [entry("6", der(4, b"I" * 16)), entry("7", der(0x30, b"".join(flags)))]
    return der(0x30, b"".join(parts))


# --- the authority ----------------------------------------------------------------------------------------------------
def signature(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    r, s = decode_dss_signature(key.sign(content, ec.ECDSA(SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def raw_point(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:]


@dataclass(frozen=True)
class Signer:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def serial(self) -> int:
        return self.certificate.serial_number


def issued(
    name: str, issuer: Signer | None, authority: bool, extension: bytes | None = None, days: int = 3650
) -> Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    by, signing = (subject, key) if issuer is None else (issuer.certificate.subject, issuer.key)
    builder = (
        x509.CertificateBuilder(by, subject, key.public_key(), x509.random_serial_number(), NOW - timedelta(days=30),
                                NOW + timedelta(days=days))
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
        .add_extension(x509.KeyUsage(not authority, not authority, False, False, False, authority, authority, False,
                                     False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )  # fmt: skip
    if extension is not None:
        unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier(EXTENSION), extension)
        builder = builder.add_extension(unknown, critical=False)
    return Signer(builder.sign(signing, SHA256()), key)


@dataclass(frozen=True)
class Intel:
    """The root, the authority of platforms, and what signs collateral."""

    root: Signer
    platforms: Signer
    tcb: Signer

    @property
    def root_der(self) -> bytes:
        return self.root.certificate.public_bytes(Encoding.DER)

    def platform(self, extension: bytes | None = None, days: int = 3650) -> Signer:
        """A machine. None: an extension of a platform that is up to date."""
        found = pck_extension(SVN, PCE_SVN, FMSPC, None) if extension is None else extension
        return issued("Intel SGX PCK Certificate", self.platforms, False, found, days)

    def revocation(self, by: Signer, serials: Sequence[int], now: datetime = NOW) -> bytes:
        builder = (
            x509.CertificateRevocationListBuilder().issuer_name(by.certificate.subject)
            .last_update(now - timedelta(days=1)).next_update(now + timedelta(days=30))
            .add_extension(x509.CRLNumber(1), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.key.public_key()), critical=False)
        )  # fmt: skip
        for serial in serials:
            one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - timedelta(days=2))
            builder = builder.add_revoked_certificate(one.build())
        return builder.sign(by.key, SHA256()).public_bytes(Encoding.DER)


@cache
def intel(name: str = "test") -> Intel:
    root = issued(f"{name} SGX Root CA", None, True)
    return Intel(root, issued(f"{name} SGX PCK Processor CA", root, True), issued("TCB Signing", root, False))


@cache
def platform() -> Signer:
    """The machine of most tests."""
    return intel().platform()


@dataclass(frozen=True)
class Collateral:
    """Intel's answers before they are signed.

    Attributes:
        levels: the components' version from which a status counts, the status, and its advisories.
        qe_levels: the same by the quoting enclave's version.
        revoked, revoked_authorities: serial numbers of platforms, and of authorities below the root.
        edited: what is put into the answers after they were signed.
        number: of the data by which the levels were made.
    """

    levels: Sequence[tuple[int, str, Sequence[str]]] = ((SVN, "UpToDate", ()), (0, "OutOfDate", ("INTEL-SA-00001",)))
    qe_levels: Sequence[tuple[int, str]] = ((QE_SVN, "UpToDate"), (0, "OutOfDate"))
    fmspc: str = FMSPC
    revoked: Sequence[int] = ()
    revoked_authorities: Sequence[int] = ()
    edited: dict[str, str] = field(default_factory=dict)
    now: datetime = NOW
    who: Intel | None = None
    number: int = 17

    def files(self) -> dict[str, bytes]:
        """As a collateral folder has it."""
        return {"intel": self.content()}

    def content(self) -> bytes:
        who = self.who or intel()
        tcb_info, identity = (json.dumps(one, separators=(",", ":")) for one in (self._tcb_info(), self._identity()))
        chain = (who.tcb.pem + who.root.pem).decode()
        value = {
            "pck_crl_issuer_chain": (who.platforms.pem + who.root.pem).decode(),
            "root_ca_crl": who.revocation(who.root, self.revoked_authorities, self.now).hex(),
            "pck_crl": who.revocation(who.platforms, self.revoked, self.now).hex(),
            "tcb_info_issuer_chain": chain, "tcb_info": tcb_info,
            "tcb_info_signature": signature(who.tcb.key, tcb_info.encode()).hex(),
            "qe_identity_issuer_chain": chain, "qe_identity": identity,
            "qe_identity_signature": signature(who.tcb.key, identity.encode()).hex(),
        }  # fmt: skip
        return json.dumps({**value, **self.edited}).encode()

    def _times(self) -> dict[str, Any]:
        issue, until = (f"{self.now + timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}" for days in (-1, 29))
        return {"issueDate": issue, "nextUpdate": until, "tcbEvaluationDataNumber": self.number}

    def _tcb_info(self) -> dict[str, Any]:
        levels = [
            {
                "tcb": {"sgxtcbcomponents": [{"svn": svn}] * 16, "pcesvn": PCE_SVN if svn else 0},
                "tcbDate": "2026-03-13T00:00:00Z", "tcbStatus": status, "advisoryIDs": [*advisories],
            }
            for svn, status, advisories in self.levels
        ]  # fmt: skip
        return {"id": "SGX", "version": 3, **self._times(), "fmspc": self.fmspc.upper(), "pceId": "0000", "tcbType": 0,
                "tcbLevels": levels}  # fmt: skip

    def _identity(self) -> dict[str, Any]:
        levels = [{"tcb": {"isvsvn": svn}, "tcbDate": "2026-03-13T00:00:00Z", "tcbStatus": status}
                  for svn, status in self.qe_levels]  # fmt: skip
        return {
            "id": "QE", "version": 2, **self._times(), "miscselect": "00000000", "miscselectMask": "FFFFFFFF",
            "attributes": "11" + "00" * 15, "attributesMask": "FBFFFFFFFFFFFFFF" + "00" * 8,
            "mrsigner": QE_SIGNER.hex().upper(), "isvprodid": 1, "tcbLevels": levels,
        }  # fmt: skip


# --- quotes -----------------------------------------------------------------------------------------------------------
def report(
    mr_enclave: bytes = MEASUREMENT, mr_signer: bytes = b"S" * 32, data: bytes = DATA, flags: int = 5, svn: int = 3,
    product: int = 0, misc: int = 0,
) -> bytes:  # fmt: skip
    """384 bytes: cpu_svn 16, misc 4, 28, attributes 16, mr_enclave 32, 32, mr_signer 32, 96, product and svn 4, ..."""
    raw = bytes([SVN]) * 16 + struct.pack("<I", misc) + bytes(28) + struct.pack("<QQ", flags, 7) + mr_enclave
    raw += bytes(32) + mr_signer + bytes(96) + struct.pack("<HH", product, svn) + bytes(60) + data
    assert len(raw) == 384
    return raw


@dataclass(frozen=True)
class Quote:
    """A quote's parts before they are put together.

    Attributes:
        bound: report data of the quoting enclave; None: the right ones.
        chain: certificates in place of the platform's.
        signer: what signs the quote; None: the attestation key.
    """

    enclave: bytes = report()
    version: int = 3
    key_type: int = 2
    qe_flags: int = 0x15
    qe_product: int = 1
    qe_svn: int = QE_SVN
    qe_misc: int = 0
    qe_signer: bytes = QE_SIGNER
    qe_data: bytes = bytes(range(32))
    bound: bytes | None = None
    data_type: int = 5
    machine: Signer | None = None
    chain: bytes | None = None
    signer: ec.EllipticCurvePrivateKey | None = None

    def bytes(self) -> bytes:
        who, machine, key = intel(), self.machine or platform(), ec.generate_private_key(ec.SECP256R1())
        chain = machine.pem + who.platforms.pem + who.root.pem if self.chain is None else self.chain
        vendor = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")  # Intel's
        signed = struct.pack("<HHIHH", self.version, self.key_type, 0, self.qe_svn, PCE_SVN) + vendor + bytes(20)
        signed += self.enclave
        point = raw_point(key)
        bound = self.bound or hashlib.sha256(point + self.qe_data).digest() + bytes(32)
        qe = report(b"q" * 32, self.qe_signer, bound, self.qe_flags, self.qe_svn, self.qe_product, self.qe_misc)
        body = signature(self.signer or key, signed) + point + qe + signature(machine.key, qe)
        body += struct.pack("<H", len(self.qe_data)) + self.qe_data
        body += struct.pack("<HI", self.data_type, len(chain)) + chain
        return signed + struct.pack("<I", len(body)) + body
