"""Parses and verifies a DCAP quote of SGX (version 3, ECDSA over P-256), as Intel's quoting library documents it.

    header 48 | report 384 | u32 length | signature 64 | attestation key 64 | QE report 384 | its signature 64
    | u16 length, QE data | u16 type 5 | u32 length, PEM chain

Verified are: the chain of three certificates (PCK, its authority, Intel's root, whose key is pinned) with their roles;
the quoting enclave's report by the PCK, and that it is Intel's quoting enclave, of a version that Intel calls up to
date; the attestation key by that report; the quote by the attestation key; that the enclave has the attributes of a
production enclave and no other; its measurement; and the report data. NOT verified: revocation lists and whether the
processor's microcode is up to date, which need Intel's service; the XFRM of the enclave's attributes.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from milkglass.errors import EnclaveError

HEADER, REPORT, PAIR = 48, 384, 64
# Attributes: initialised, debug, 64 bits, may use the provisioning key
INITIALISED, DEBUG, MODE64, PROVISION = 0x01, 0x02, 0x04, 0x10
# Intel's quoting enclave (its QE identity of 2024-03-13): ISVPRODID, and the least ISVSVN that is up to date
QE_PRODUCT, QE_SVN = 1, 8
PCK_EXTENSION = x509.ObjectIdentifier("1.2.840.113741.1.13.1")  # Intel's, in PCK certificates only
PEM_CHAIN = 5
MAX_QUOTE = 64 << 10
# Intel SGX Root CA: its public key, x and y. And MRSIGNER of Intel's quoting enclave.
INTEL_ROOT = bytes.fromhex(
    "0ba9c4c0c0c86193a3fe23d6b02cda10a8bbd4e88e48b4458561a36e705525f5"
    "67918e2edc88e40d860bd0cc4ee26aacc988e505a953558c453f6b0904ae7394"
)
INTEL_QE = bytes.fromhex("8c4f5775d796503e96137f77c68a829a0056ac8ded70140b081b094490c57bff")
HINT = "start the enclave with gramine-sgx, and allow its measurement with --allow-measurement"


@dataclass(frozen=True)
class Trust:
    """The roots that a quote must lead to.

    Attributes:
        root: x and y of the root certificate's key.
        qe_signer: MRSIGNER of the quoting enclave.
    """

    root: bytes = INTEL_ROOT
    qe_signer: bytes = INTEL_QE


INTEL = Trust()


@dataclass(frozen=True)
class SgxReport:
    """An enclave's report.

    Attributes:
        raw: the 384 bytes that are signed.
        misc: MISCSELECT, which says what else is written when the enclave is left.
        flags: the attributes' flags.
        mr_enclave: the enclave's measurement, 32 bytes.
        mr_signer: the measurement of the key that signed it, 32 bytes.
        product: its product number.
        svn: its security version.
        report_data: 64 bytes that the enclave chose.
    """

    raw: bytes
    misc: int
    flags: int
    mr_enclave: bytes
    mr_signer: bytes
    product: int
    svn: int
    report_data: bytes

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        (misc,), (flags,), (product, svn) = (
            struct.unpack_from(form, raw, at) for form, at in (("<I", 16), ("<Q", 48), ("<HH", 256))
        )
        return cls(raw, misc, flags, raw[64:96], raw[128:160], product, svn, raw[320:384])

    def has(self, flags: int) -> bool:
        """Returns whether these are its only attributes besides 64 bits, and nothing else is written on its exits."""
        return self.flags & ~MODE64 == flags and not self.misc


@dataclass(frozen=True)
class SgxQuote:
    """The parts of a quote. `signed` is what the attestation key signed."""

    signed: bytes
    report: SgxReport
    signature: bytes
    attestation_key: bytes
    qe_report: SgxReport
    qe_signature: bytes
    qe_data: bytes
    chain: bytes

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parses a quote. Raises EnclaveError for anything else than a quote of this form."""
        try:
            version, key_type = struct.unpack_from("<HH", raw)
            if (version, key_type) != (3, 2) or len(raw) > MAX_QUOTE:
                raise EnclaveError(f"a quote of version {version} and key type {key_type}", "3 and 2 are supported")
            (size,) = struct.unpack_from("<I", raw, HEADER + REPORT)
            body = raw[HEADER + REPORT + 4 : HEADER + REPORT + 4 + size]
            at = 2 * PAIR + REPORT + PAIR
            (data,) = struct.unpack_from("<H", body, at)
            kind, length = struct.unpack_from("<HI", body, at + 2 + data)
            chain = body[at + 8 + data :]
            if kind != PEM_CHAIN or len(chain) != length or len(body) != size:
                raise EnclaveError(f"the quote has certificate data of type {kind}", f"{PEM_CHAIN} is supported")
        except struct.error:
            raise EnclaveError("the quote is cut off", HINT) from None
        return cls(
            raw[: HEADER + REPORT], SgxReport.parse(raw[HEADER : HEADER + REPORT]), body[:PAIR],
            body[PAIR : 2 * PAIR], SgxReport.parse(body[2 * PAIR : 2 * PAIR + REPORT]),
            body[2 * PAIR + REPORT : at], body[at + 2 : at + 2 + data], chain,
        )  # fmt: skip


def verify(
    raw: bytes,
    report_data: bytes,
    measurements: Collection[str],
    trust: Trust = INTEL,
    now: datetime | None = None,
) -> SgxReport:
    """Verifies a quote, and returns the enclave's report. Raises EnclaveError with the first fault.

    `measurements` are the allowed values of MRENCLAVE, in hex.
    """
    quote = SgxQuote.parse(raw)
    leaf = _leaf_key(quote.chain, trust.root, now or datetime.now(UTC))
    _require_signed(leaf, quote.qe_signature, quote.qe_report.raw, "the quoting enclave's report")
    bound = hashlib.sha256(quote.attestation_key + quote.qe_data).digest() + bytes(32)
    if not hmac.compare_digest(quote.qe_report.report_data, bound):
        raise EnclaveError("the quote's key is not the quoting enclave's", HINT)
    _require_quoting_enclave(quote.qe_report, trust)
    _require_signed(_point(quote.attestation_key), quote.signature, quote.signed, "the quote")
    _require_production(quote.report)
    if quote.report.mr_enclave.hex() not in measurements:
        raise EnclaveError(f"the enclave's measurement is {quote.report.mr_enclave.hex()}, which is not allowed", HINT)
    if not hmac.compare_digest(quote.report.report_data, report_data):
        raise EnclaveError("the quote answers another question", "ask for a new challenge")
    return quote.report


def _require_quoting_enclave(report: SgxReport, trust: Trust) -> None:
    if report.mr_signer != trust.qe_signer or report.product != QE_PRODUCT:
        raise EnclaveError(f"the quoting enclave is not Intel's (product {report.product})", HINT)
    if not report.has(INITIALISED | PROVISION):
        raise EnclaveError(f"the quoting enclave has attributes {report.flags:#x}, misc {report.misc:#x}", HINT)
    if report.svn < QE_SVN:
        raise EnclaveError(
            f"the quoting enclave has security version {report.svn}, {QE_SVN} or more is required",
            "update Intel's DCAP",
        )


def _require_production(report: SgxReport) -> None:
    if report.flags & DEBUG:
        raise EnclaveError("the enclave is a debug one, whose memory can be read", "build it with sgx.debug = false")
    if not report.has(INITIALISED):
        raise EnclaveError(
            f"the enclave has attributes {report.flags:#x}, misc {report.misc:#x}; {INITIALISED | MODE64:#x} and 0 are "
            "allowed", "sign it with the manifest of split enclave prepare",
        )  # fmt: skip


def _leaf_key(pem: bytes, root: bytes, now: datetime) -> ec.EllipticCurvePublicKey:
    """Verifies the chain up to the root, and returns the first certificate's key."""
    try:
        chain = x509.load_pem_x509_certificates(pem.rstrip(b"\0"))
        for one, issuer in zip(chain, [*chain[1:], chain[-1]], strict=True):
            one.verify_directly_issued_by(issuer)
            if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
                raise EnclaveError("a certificate of the quote has expired", "renew the machine's PCK certificate")
        authorities = [_is_authority(one) for one in chain]
        last, first = chain[-1].public_key(), chain[0].public_key()
        kinds = {extension.oid for extension in chain[0].extensions}
    except EnclaveError:
        raise
    except Exception as error:  # noqa: BLE001  (the library raises many kinds of errors for untrusted bytes)
        raise EnclaveError(
            f"the quote's certificates cannot be read, or do not sign each other ({type(error).__name__})", HINT
        ) from None
    if authorities != [False, True, True] or PCK_EXTENSION not in kinds:
        raise EnclaveError(f"{len(chain)} certificates that are not a PCK, its authority and a root", HINT)
    if not isinstance(last, ec.EllipticCurvePublicKey) or not isinstance(first, ec.EllipticCurvePublicKey):
        raise EnclaveError("the quote's certificates have keys of another kind", HINT)
    if last.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:] != root:
        raise EnclaveError("the quote's certificates do not end at Intel's root", HINT)
    return first


def _is_authority(one: x509.Certificate) -> bool:
    constraints = [item.value for item in one.extensions if isinstance(item.value, x509.BasicConstraints)]
    return bool(constraints) and constraints[0].ca


def _point(raw: bytes) -> ec.EllipticCurvePublicKey:
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), b"\x04" + raw)
    except Exception:  # noqa: BLE001  (as above)
        raise EnclaveError("the quote's key is not on the curve", HINT) from None


def _require_signed(key: ec.EllipticCurvePublicKey, signature: bytes, content: bytes, what: str) -> None:
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    try:
        key.verify(encode_dss_signature(r, s), content, ec.ECDSA(SHA256()))
    except Exception:  # noqa: BLE001  (as above)
        raise EnclaveError(f"{what} is not signed by the key that it names", HINT) from None
