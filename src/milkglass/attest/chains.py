"""Verifies certificate chains that end at a pinned key, signatures of their keys, and that no key is revoked."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from milkglass.errors import AttestationError

MAX_CERTIFICATES, MAX_REVOCATION_FILES = 8, 512
MAX_FILE_BYTES = 64 << 10  # of one file of certificates, one revocation list or one OCSP response
# How long an OCSP response without nextUpdate counts, as in NVIDIA's own verifier
OCSP_DEFAULT_VALIDITY = timedelta(hours=1)
_RevocationData = x509.CertificateRevocationList | ocsp.OCSPResponse


def parse_certificates(raw: bytes, noun: str) -> list[x509.Certificate]:
    """Parses certificates in PEM, or one in DER.

    Args:
        raw: the certificates.
        noun: whose certificates these are, for messages.

    Raises:
        AttestationError: there is none, or there are too many or too long ones.
    """
    if len(raw) > MAX_FILE_BYTES:
        raise AttestationError("size", f"{noun} has {len(raw):,} bytes, at most {MAX_FILE_BYTES:,} are read")
    try:
        with warnings.catch_warnings():
            # AMD's leaves have the serial number 0, of which the library warns
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


def spki_digest_of(certificate: x509.Certificate) -> bytes:
    """Returns SHA-256 of a certificate's SubjectPublicKeyInfo (SPKI) in DER, 32 bytes."""
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key).digest()


def require_chain(chain: Sequence[x509.Certificate], root_digest: str, now: datetime, noun: str) -> None:
    """Checks a chain from its leaf to a root.

    Args:
        chain: the certificates; each must be issued by the next, and the last by itself. All but the leaf must be
            authorities.
        root_digest: SHA-256 of the root's SPKI, in hex.
        now: the time at which all must be valid.
        noun: whose chain it is, for messages.

    Raises:
        AttestationError: the chain is broken, ends at another root, has a wrong role, or is not valid at that time.
    """
    try:
        for certificate, issuer in zip(chain, [*chain[1:], chain[-1]], strict=True):
            certificate.verify_directly_issued_by(issuer)
        authority_flags = [_is_authority(certificate) for certificate in chain]
        end_digest = spki_digest_of(chain[-1]).hex()
    except Exception as error:  # noqa: BLE001 - as above
        raise AttestationError(
            "chain", f"the certificates of {noun} do not sign each other ({type(error).__name__})"
        ) from None
    if end_digest != root_digest:
        raise AttestationError("root", f"the certificates of {noun} end at another root than the maker's")
    if authority_flags[0] or not all(authority_flags[1:]):
        raise AttestationError("chain", f"a certificate of {noun} has a role that it must not have")
    for certificate in chain:
        if not _is_valid(certificate, now):
            until = certificate.not_valid_after_utc
            raise AttestationError(
                "expired",
                f"a certificate of {noun} is valid from {certificate.not_valid_before_utc:%Y-%m-%d} to "
                f"{until:%Y-%m-%d}, and the time is {now:%Y-%m-%d}",
            )


def _is_valid(certificate: x509.Certificate, now: datetime) -> bool:
    """Returns whether a certificate is valid at a time."""
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def _is_authority(certificate: x509.Certificate) -> bool:
    """Returns whether a certificate's key may sign other certificates."""
    values = (extension.value for extension in certificate.extensions)
    return any(isinstance(value, x509.BasicConstraints) and value.ca for value in values)


def require_signed(key: object, r: int, s: int, content: bytes, noun: str) -> None:
    """Raises AttestationError unless (r, s) is a key's ECDSA signature of a content, on P-384 with SHA-384.

    `noun` is what was signed, for messages.
    """
    try:
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise TypeError("another kind of key")
        key.verify(encode_dss_signature(r, s), content, ec.ECDSA(SHA384()))
    except Exception as error:  # noqa: BLE001 - as above
        raise AttestationError("signature", f"the signature of {noun} is wrong ({type(error).__name__})") from None


def require_not_revoked(
    chain: Sequence[x509.Certificate], revocation_files: Sequence[bytes], now: datetime, noun: str, first_index: int = 0
) -> bool:
    """Checks a chain against revocation lists (CRL) and OCSP responses that its own authorities signed.

    All of them count, whoever hands them over: one that revokes a certificate refuses it, even if it is out of date.

    Args:
        chain: the certificates, leaf first.
        revocation_files: CRLs in DER or PEM, and OCSP responses in DER. Those of other authorities do not count.
        now: the time at which they must be current.
        noun: whose chain it is, for messages.
        first_index: the index of the first certificate whose revocation status the maker publishes. Those before it,
            such as a processor's own, need no status.

    Returns:
        Whether each certificate from that index on, except the root, has a current status from its issuer.

    Raises:
        AttestationError: a certificate is revoked or on hold, a list is damaged, or there are too many or too long
            ones.
    """
    if len(revocation_files) > MAX_REVOCATION_FILES:
        raise AttestationError(
            "size", f"{len(revocation_files)} revocation lists, at most {MAX_REVOCATION_FILES} are read"
        )
    checked_indices = set[int]()
    for raw in revocation_files:
        if len(raw) > MAX_FILE_BYTES:
            raise AttestationError(
                "size", f"a revocation list has {len(raw):,} bytes, at most {MAX_FILE_BYTES:,} are read"
            )
        try:
            is_revoked_by_index = _revocation_by_index(_parse_revocation(raw), chain, now)
        except Exception as error:  # noqa: BLE001 - as above
            raise AttestationError(
                "revocation", f"a word on revoked keys is damaged ({type(error).__name__})"
            ) from None
        for index, is_revoked in is_revoked_by_index.items():
            if is_revoked:
                name = chain[index + 1].subject.rfc4514_string()
                raise AttestationError("revoked", f"a certificate of {noun} was revoked by {name}")
        checked_indices |= is_revoked_by_index.keys()
    return checked_indices >= set(range(first_index, len(chain) - 1))


def _parse_revocation(raw: bytes) -> _RevocationData:
    """Parses a CRL in PEM or DER, or an OCSP response in DER. Raises ValueError."""
    if raw.lstrip().startswith(b"-----BEGIN"):
        return x509.load_pem_x509_crl(raw)
    try:
        return x509.load_der_x509_crl(raw)
    except ValueError:
        return ocsp.load_der_ocsp_response(raw)


def _revocation_by_index(data: _RevocationData, chain: Sequence[x509.Certificate], now: datetime) -> dict[int, bool]:
    """Returns whether a certificate is revoked, by its index, for each one whose status the data give."""
    revoked_by_index = dict[int, bool]()
    for index, (certificate, issuer) in enumerate(zip(chain, chain[1:], strict=False)):
        if isinstance(data, ocsp.OCSPResponse):
            is_revoked = _is_revoked_by_response(data, certificate, issuer, now)
        else:
            is_revoked = _is_revoked_by_list(data, certificate, issuer, now)
        if is_revoked is not None:
            revoked_by_index[index] = is_revoked
    return revoked_by_index


def _is_revoked_by_list(
    revocation_list: x509.CertificateRevocationList,
    certificate: x509.Certificate,
    issuer: x509.Certificate,
    now: datetime,
) -> bool | None:
    """Returns whether a list of the issuer revokes a certificate, or None if the list gives no current status of it."""
    if revocation_list.issuer != issuer.subject or not revocation_list.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type]
        return None
    if now < revocation_list.last_update_utc:
        return None
    if revocation_list.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None:
        return True
    # A critical extension may limit the list to some certificates
    is_partial = any(extension.critical for extension in revocation_list.extensions)
    until = revocation_list.next_update_utc
    return None if is_partial or until is None or now > until else False


def _is_revoked_by_response(
    response: ocsp.OCSPResponse, certificate: x509.Certificate, issuer: x509.Certificate, now: datetime
) -> bool | None:
    """Returns whether an OCSP response revokes a certificate, or None if it gives no current status of it.

    The issuer must have signed the response, or a key that it certified for this purpose. "unknown" is no status:
    NVIDIA's service does not know the certificates that a GPU makes for itself.
    """
    if response.response_status != ocsp.OCSPResponseStatus.SUCCESSFUL:
        return None
    answers = [answer for answer in response.responses if _is_about(answer, certificate, issuer)]
    if not answers or not any(_has_signed(signer, response) for signer in _allowed_signers(response, issuer, now)):
        return None
    started = [answer for answer in answers if now >= answer.this_update_utc]
    if any(answer.certificate_status == ocsp.OCSPCertStatus.REVOKED for answer in started):
        return True
    current = [
        answer
        for answer in started
        if now <= (answer.next_update_utc or answer.this_update_utc + OCSP_DEFAULT_VALIDITY)
    ]
    is_good = any(answer.certificate_status == ocsp.OCSPCertStatus.GOOD for answer in current)
    return False if is_good else None


def _is_about(answer: ocsp.OCSPSingleResponse, certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Returns whether an answer names a certificate by its serial number and its issuer's name and key."""
    request = ocsp.OCSPRequestBuilder().add_certificate(certificate, issuer, answer.hash_algorithm).build()
    return (answer.serial_number, answer.issuer_name_hash, answer.issuer_key_hash) == (
        request.serial_number, request.issuer_name_hash, request.issuer_key_hash
    )  # fmt: skip


def _allowed_signers(response: ocsp.OCSPResponse, issuer: x509.Certificate, now: datetime) -> list[x509.Certificate]:
    """Returns the certificates whose keys may sign a response: the issuer's, and those that it made for OCSP."""
    signers = [issuer]
    for candidate in response.certificates[:MAX_CERTIFICATES]:
        usages = [item.value for item in candidate.extensions if isinstance(item.value, x509.ExtendedKeyUsage)]
        if not usages or ExtendedKeyUsageOID.OCSP_SIGNING not in usages[0] or not _is_valid(candidate, now):
            continue
        try:
            candidate.verify_directly_issued_by(issuer)
        except (InvalidSignature, ValueError, TypeError):
            continue
        signers.append(candidate)
    return signers


def _has_signed(signer: x509.Certificate, response: ocsp.OCSPResponse) -> bool:
    """Returns whether the signer's ECDSA key signed a response. Other kinds of keys do not count."""
    key, algorithm = signer.public_key(), response.signature_hash_algorithm
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(algorithm, SHA256 | SHA384 | SHA512):
        return False
    try:
        key.verify(response.signature, response.tbs_response_bytes, ec.ECDSA(algorithm))
    except InvalidSignature:
        return False
    return True
