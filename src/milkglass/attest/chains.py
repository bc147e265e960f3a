"""Certificate chains that end at a pinned key."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from milkglass.errors import AttestationError

MAX_CERTIFICATES, MAX_BYTES = 8, 64 << 10


def certificates(raw: bytes, noun: str) -> list[x509.Certificate]:
    """Returns the certificates in PEM or one in DER. AMD's leaves have the serial number 0, of which the library warns.

    Raises:
        AttestationError: there is none, or too much.
    """
    if len(raw) > MAX_BYTES:
        raise AttestationError("size", f"{noun} has {len(raw):,} bytes, at most {MAX_BYTES:,} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CryptographyDeprecationWarning)
            pem = raw.lstrip().startswith(b"-----BEGIN")
            chain = x509.load_pem_x509_certificates(raw) if pem else [x509.load_der_x509_certificate(raw)]
            for cert in chain:  # the library parses these only when they are asked for
                _ = (cert.subject, cert.issuer, cert.not_valid_after_utc, len(cert.extensions), cert.public_key())
    except Exception as error:  # noqa: BLE001 - the library raises many kinds of errors for untrusted bytes
        raise AttestationError("chain", f"{noun} is no certificate ({type(error).__name__})") from None
    if len(chain) > MAX_CERTIFICATES:
        raise AttestationError("size", f"{noun} has {len(chain)} certificates, at most {MAX_CERTIFICATES} are read")
    return chain


def spki_of(certificate: x509.Certificate) -> bytes:
    """Returns SHA-256 of a certificate's public key."""
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key).digest()


def require_chain(chain: Sequence[x509.Certificate], root: str, now: datetime, noun: str) -> None:
    """Checks a chain from its leaf to a root.

    Args:
        chain: each is issued by the next; the last by itself.
        root: SHA-256 of the root's public key.
        now: the time at which all must be valid.
        noun: whose chain it is.

    Raises:
        AttestationError: the chain is broken, ends elsewhere, or has expired.
    """
    try:
        for certificate, issuer in zip(chain, [*chain[1:], chain[-1]], strict=True):
            certificate.verify_directly_issued_by(issuer)
        authorities = [_is_authority(certificate) for certificate in chain]
        end = spki_of(chain[-1]).hex()
    except Exception as error:  # noqa: BLE001 - as above
        raise AttestationError(
            "chain", f"the certificates of {noun} do not sign each other ({type(error).__name__})"
        ) from None
    if end != root:
        raise AttestationError("root", f"the certificates of {noun} end at another root than the maker's")
    if authorities[0] or not all(authorities[1:]):
        raise AttestationError("chain", f"a certificate of {noun} has a role that it must not have")
    for certificate in chain:
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            until = certificate.not_valid_after_utc
            raise AttestationError(
                "expired",
                f"a certificate of {noun} is valid from {certificate.not_valid_before_utc:%Y-%m-%d} to "
                f"{until:%Y-%m-%d}, and the time is {now:%Y-%m-%d}",
            )


def _is_authority(certificate: x509.Certificate) -> bool:
    values = (extension.value for extension in certificate.extensions)
    return any(isinstance(value, x509.BasicConstraints) and value.ca for value in values)


def require_signed(key: object, r: int, s: int, content: bytes, noun: str) -> None:
    """Checks a signature of ECDSA over P-384 with SHA-384. Raises AttestationError."""
    try:
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise TypeError("another kind of key")
        key.verify(encode_dss_signature(r, s), content, ec.ECDSA(SHA384()))
    except Exception as error:  # noqa: BLE001 - as above
        raise AttestationError("signature", f"the signature of {noun} is wrong ({type(error).__name__})") from None


def require_not_revoked(chain: Sequence[x509.Certificate], lists: Sequence[bytes], now: datetime, noun: str) -> bool:
    """Checks a chain against revocation lists and answers of OCSP that its own authorities signed.

    Args:
        lists: lists in DER or PEM, and answers of OCSP in DER. Those of others, or out of date, do not count.

    Returns:
        Whether each certificate below the root has a current word of its issuer.

    Raises:
        AttestationError: a certificate is revoked or on hold, or a list is damaged.
    """
    answered_for = set[int]()
    for raw in lists:
        if len(raw) > MAX_BYTES:
            raise AttestationError("size", f"a revocation list has {len(raw):,} bytes, at most {MAX_BYTES:,} are read")
        for index, (certificate, issuer) in enumerate(zip(chain, chain[1:], strict=False)):
            revoked = _says_revoked(raw, certificate, issuer, now)
            if revoked:
                name = issuer.subject.rfc4514_string()
                raise AttestationError("revoked", f"a certificate of {noun} was revoked by {name}")
            if revoked is not None:
                answered_for.add(index)
    return answered_for == set(range(len(chain) - 1))


def _says_revoked(raw: bytes, certificate: x509.Certificate, issuer: x509.Certificate, now: datetime) -> bool | None:
    """Returns whether a list or an answer says that a certificate is revoked; None if it says nothing of it now.

    Raises:
        AttestationError: it can be read as neither.
    """
    try:
        if raw.lstrip().startswith(b"-----BEGIN"):
            return _is_listed(x509.load_pem_x509_crl(raw), certificate, issuer, now)
        try:
            return _is_listed(x509.load_der_x509_crl(raw), certificate, issuer, now)
        except ValueError:
            return _answer_says_revoked(ocsp.load_der_ocsp_response(raw), certificate, issuer, now)
    except Exception as error:  # noqa: BLE001 - as above
        raise AttestationError("revocation", f"a word on revoked keys is damaged ({type(error).__name__})") from None


def _is_listed(
    revocation_list: x509.CertificateRevocationList,
    certificate: x509.Certificate,
    issuer: x509.Certificate,
    now: datetime,
) -> bool | None:
    if revocation_list.issuer != issuer.subject or not revocation_list.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type]
        return None
    if not _is_current(revocation_list.last_update_utc, revocation_list.next_update_utc, now):
        return None
    return revocation_list.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None


def _is_current(since: datetime, until: datetime | None, now: datetime) -> bool:
    return until is not None and since <= now <= until


def _answer_says_revoked(
    response: ocsp.OCSPResponse, certificate: x509.Certificate, issuer: x509.Certificate, now: datetime
) -> bool | None:
    """Reads an answer that the issuer signed itself, or by a certificate that it made for this."""
    if (
        response.response_status != ocsp.OCSPResponseStatus.SUCCESSFUL
        or response.serial_number != certificate.serial_number
    ):
        return None
    by_hash_alone = response.responder_key_hash is not None and not response.certificates
    if response.responder_name == issuer.subject or by_hash_alone:
        signer = issuer
    else:
        if len(response.certificates) != 1:
            return None
        signer = response.certificates[0]
        signer.verify_directly_issued_by(issuer)
        usages = [
            usage for extension in signer.extensions if isinstance(usage := extension.value, x509.ExtendedKeyUsage)
        ]
        if not usages or ExtendedKeyUsageOID.OCSP_SIGNING not in usages[0]:
            return None
    key, algorithm = signer.public_key(), response.signature_hash_algorithm
    if not isinstance(key, ec.EllipticCurvePublicKey) or algorithm is None:
        return None
    try:
        key.verify(response.signature, response.tbs_response_bytes, ec.ECDSA(algorithm))
    except InvalidSignature:
        return None
    if not _is_current(response.this_update_utc, response.next_update_utc, now):
        return None
    return response.certificate_status != ocsp.OCSPCertStatus.GOOD
