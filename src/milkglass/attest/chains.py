"""Certificate chains that end at a pinned key."""

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

MAX_CERTIFICATES, MAX_BYTES, MAX_LISTS = 8, 64 << 10, 512
WITHOUT_END = timedelta(hours=1)  # how long an answer of OCSP without an end counts, as in NVIDIA's own verifier
_Word = x509.CertificateRevocationList | ocsp.OCSPResponse


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
        if not _is_valid(certificate, now):
            until = certificate.not_valid_after_utc
            raise AttestationError(
                "expired",
                f"a certificate of {noun} is valid from {certificate.not_valid_before_utc:%Y-%m-%d} to "
                f"{until:%Y-%m-%d}, and the time is {now:%Y-%m-%d}",
            )


def _is_valid(certificate: x509.Certificate, now: datetime) -> bool:
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


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


def require_not_revoked(
    chain: Sequence[x509.Certificate], lists: Sequence[bytes], now: datetime, noun: str, first: int = 0
) -> bool:
    """Checks a chain against revocation lists and answers of OCSP that its own authorities signed.

    Whoever hands them over, all of them count: one that revokes a certificate refuses it, also if it is out of date.

    Args:
        lists: lists in DER or PEM, and answers of OCSP in DER. Those of others do not count.
        first: the index of the first certificate about which the maker publishes whether it is revoked. Those below
            it, such as a processor's own, need no word.

    Returns:
        Whether each certificate from the first to below the root has a current word of its issuer.

    Raises:
        AttestationError: a certificate is revoked or on hold, or a list is damaged.
    """
    if len(lists) > MAX_LISTS:
        raise AttestationError("size", f"{len(lists)} revocation lists, at most {MAX_LISTS} are read")
    answered_for = set[int]()
    for raw in lists:
        if len(raw) > MAX_BYTES:
            raise AttestationError("size", f"a revocation list has {len(raw):,} bytes, at most {MAX_BYTES:,} are read")
        try:
            revoked_by = _revoked_by(_parsed(raw), chain, now)
        except Exception as error:  # noqa: BLE001 - as above
            raise AttestationError(
                "revocation", f"a word on revoked keys is damaged ({type(error).__name__})"
            ) from None
        for index, revoked in revoked_by.items():
            if revoked:
                name = chain[index + 1].subject.rfc4514_string()
                raise AttestationError("revoked", f"a certificate of {noun} was revoked by {name}")
        answered_for |= revoked_by.keys()
    return answered_for >= set(range(first, len(chain) - 1))


def _parsed(raw: bytes) -> _Word:
    if raw.lstrip().startswith(b"-----BEGIN"):
        return x509.load_pem_x509_crl(raw)
    try:
        return x509.load_der_x509_crl(raw)
    except ValueError:
        return ocsp.load_der_ocsp_response(raw)


def _revoked_by(word: _Word, chain: Sequence[x509.Certificate], now: datetime) -> dict[int, bool]:
    """Returns whether each certificate is revoked, by its index, where a list or an answer says so."""
    found = dict[int, bool]()
    for index, (certificate, issuer) in enumerate(zip(chain, chain[1:], strict=False)):
        if isinstance(word, ocsp.OCSPResponse):
            revoked = _answer_says_revoked(word, certificate, issuer, now)
        else:
            revoked = _is_listed(word, certificate, issuer, now)
        if revoked is not None:
            found[index] = revoked
    return found


def _is_listed(
    revocation_list: x509.CertificateRevocationList,
    certificate: x509.Certificate,
    issuer: x509.Certificate,
    now: datetime,
) -> bool | None:
    if revocation_list.issuer != issuer.subject or not revocation_list.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type]
        return None
    if now < revocation_list.last_update_utc:
        return None
    if revocation_list.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None:
        return True
    is_partial = any(extension.critical for extension in revocation_list.extensions)  # of some certificates alone
    until = revocation_list.next_update_utc
    return None if is_partial or until is None or now > until else False


def _answer_says_revoked(
    response: ocsp.OCSPResponse, certificate: x509.Certificate, issuer: x509.Certificate, now: datetime
) -> bool | None:
    """Reads an answer that the issuer signed itself, or by a certificate that it made for this.

    "unknown" is no word: NVIDIA's service does not know the certificates that a GPU makes for itself.
    """
    if response.response_status != ocsp.OCSPResponseStatus.SUCCESSFUL:
        return None
    answers = [answer for answer in response.responses if _is_about(answer, certificate, issuer)]
    if not answers or not any(_has_signed(signer, response) for signer in _signers(response, issuer, now)):
        return None
    known = [answer for answer in answers if now >= answer.this_update_utc]
    if any(answer.certificate_status == ocsp.OCSPCertStatus.REVOKED for answer in known):
        return True
    current = [answer for answer in known if now <= (answer.next_update_utc or answer.this_update_utc + WITHOUT_END)]
    is_good = any(answer.certificate_status == ocsp.OCSPCertStatus.GOOD for answer in current)
    return False if is_good else None


def _is_about(answer: ocsp.OCSPSingleResponse, certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Returns whether an answer names a certificate by its number, its issuer's name and its issuer's key."""
    asked = ocsp.OCSPRequestBuilder().add_certificate(certificate, issuer, answer.hash_algorithm).build()
    return (answer.serial_number, answer.issuer_name_hash, answer.issuer_key_hash) == (
        asked.serial_number, asked.issuer_name_hash, asked.issuer_key_hash
    )  # fmt: skip


def _signers(response: ocsp.OCSPResponse, issuer: x509.Certificate, now: datetime) -> list[x509.Certificate]:
    """Returns the certificates whose keys may sign an answer: the issuer's, and those that it made for this."""
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
    key, algorithm = signer.public_key(), response.signature_hash_algorithm
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(algorithm, SHA256 | SHA384 | SHA512):
        return False
    try:
        key.verify(response.signature, response.tbs_response_bytes, ec.ECDSA(algorithm))
    except InvalidSignature:
        return False
    return True
