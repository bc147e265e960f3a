"""Certificate chains that end at a pinned key."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.utils import CryptographyDeprecationWarning

from milkglass.errors import AttestationError

MAX_CERTIFICATES, MAX_BYTES = 8, 64 << 10


def certificates(raw: bytes, what: str) -> list[x509.Certificate]:
    """Returns the certificates in PEM or one in DER. AMD's leaves have the serial number 0, of which the library warns.

    Raises:
        AttestationError: there is none, or too much.
    """
    if len(raw) > MAX_BYTES:
        raise AttestationError("size", f"{what} has {len(raw):,} bytes, at most {MAX_BYTES:,} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CryptographyDeprecationWarning)
            pem = raw.lstrip().startswith(b"-----BEGIN")
            found = x509.load_pem_x509_certificates(raw) if pem else [x509.load_der_x509_certificate(raw)]
    except Exception as error:  # noqa: BLE001 - the library raises many kinds of errors for untrusted bytes
        raise AttestationError("chain", f"{what} is no certificate ({type(error).__name__})") from None
    if len(found) > MAX_CERTIFICATES:
        raise AttestationError("size", f"{what} has {len(found)} certificates, at most {MAX_CERTIFICATES} are read")
    return found


def spki_digest(one: x509.Certificate) -> str:
    """Returns SHA-256 of a certificate's public key, in hex."""
    return hashlib.sha256(one.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def require_chain(chain: Sequence[x509.Certificate], root: str, now: datetime, what: str) -> None:
    """Checks a chain from its leaf to a root.

    Args:
        chain: each is issued by the next; the last by itself.
        root: SHA-256 of the root's public key.
        now: the time at which all must be valid.
        what: whose chain it is.

    Raises:
        AttestationError: the chain is broken, ends elsewhere, or has expired.
    """
    try:
        for one, issuer in zip(chain, [*chain[1:], chain[-1]], strict=True):
            one.verify_directly_issued_by(issuer)
        authorities = [_is_authority(one) for one in chain]
        end = spki_digest(chain[-1])
    except Exception as error:  # noqa: BLE001 - as above
        raise AttestationError(
            "chain", f"the certificates of {what} do not sign each other ({type(error).__name__})"
        ) from None
    if end != root:
        raise AttestationError("root", f"the certificates of {what} end at another root than the maker's")
    if authorities[0] or not all(authorities[1:]):
        raise AttestationError("chain", f"a certificate of {what} has a role that it must not have")
    for one in chain:
        if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
            until = one.not_valid_after_utc
            raise AttestationError(
                "expired",
                f"a certificate of {what} is valid from {one.not_valid_before_utc:%Y-%m-%d} to {until:%Y-%m-%d}, "
                f"and the time is {now:%Y-%m-%d}",
            )


def _is_authority(one: x509.Certificate) -> bool:
    constraints = [item.value for item in one.extensions if isinstance(item.value, x509.BasicConstraints)]
    return bool(constraints) and constraints[0].ca


def require_signed(key: object, r: int, s: int, content: bytes, what: str) -> None:
    """Checks a signature of ECDSA over P-384 with SHA-384. Raises AttestationError."""
    try:
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise TypeError("another kind of key")
        key.verify(encode_dss_signature(r, s), content, ec.ECDSA(SHA384()))
    except Exception as error:  # noqa: BLE001 - as above
        raise AttestationError("signature", f"the signature of {what} is wrong ({type(error).__name__})") from None


def require_not_revoked(chain: Sequence[x509.Certificate], lists: Sequence[bytes], now: datetime, what: str) -> bool:
    """Checks a chain against revocation lists that its own authorities signed.

    Returns:
        Whether every issuer but the root's own has a list that is current.

    Raises:
        AttestationError: a certificate is revoked, or a list is damaged.
    """
    covered = set[int]()
    for raw in lists:
        if len(raw) > MAX_BYTES:
            raise AttestationError("size", f"a revocation list has {len(raw):,} bytes, at most {MAX_BYTES:,} are read")
        try:
            pem = raw.lstrip().startswith(b"-----BEGIN")
            revoked = x509.load_pem_x509_crl(raw) if pem else x509.load_der_x509_crl(raw)
        except Exception as error:  # noqa: BLE001 - as above
            raise AttestationError("revocation", f"a revocation list is damaged ({type(error).__name__})") from None
        for place, issuer in enumerate(chain[1:], 1):
            if revoked.issuer != issuer.subject or not revoked.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type]
                continue
            if not revoked.last_update_utc <= now <= (revoked.next_update_utc or now):
                continue
            if revoked.get_revoked_certificate_by_serial_number(chain[place - 1].serial_number) is not None:
                raise AttestationError("revoked", f"a certificate of {what} was revoked by {_name(issuer)}")
            covered.add(place)
    return covered == set(range(1, len(chain)))


def _name(one: x509.Certificate) -> str:
    return one.subject.rfc4514_string()
