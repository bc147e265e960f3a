"""A maker's authority of the tests: a chain of keys that can revoke, on P-384."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA1, SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp


@dataclass(frozen=True)
class Authority:
    """A chain, leaf first, and its keys, root first."""

    chain: list[x509.Certificate]
    keys: list[ec.EllipticCurvePrivateKey]

    @classmethod
    def make(cls, *names: str) -> Authority:
        """Names from the root to the leaf."""
        keys = [ec.generate_private_key(ec.SECP384R1()) for _ in names]
        found = list[x509.Certificate]()
        for level, (name, key) in enumerate(zip(names, keys, strict=True)):
            subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
            issuer = found[-1].subject if found else subject
            one = (
                x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(datetime(2020, 1, 1)).not_valid_after(datetime(2040, 1, 1))
                .add_extension(x509.BasicConstraints(level < len(names) - 1, None), critical=True)
                .sign(keys[max(0, level - 1)], SHA384())
            )  # fmt: skip
            found.append(one)
        return cls(found[::-1], keys)

    def revoked(self, level: int, serials: Sequence[int], now: datetime) -> bytes:
        """The revocation list of the authority at a level, 0 being the root."""
        when = now.replace(tzinfo=None)
        builder = (
            x509.CertificateRevocationListBuilder().issuer_name(self.chain[-1 - level].subject)
            .last_update(when - timedelta(days=1)).next_update(when + timedelta(days=30))
        )  # fmt: skip
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when - timedelta(days=2))
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(self.keys[level], SHA384()).public_bytes(Encoding.DER)

    def status(self, level: int, now: datetime, revoked: bool = False) -> bytes:
        """An answer of OCSP of the authority at a level on the certificate below it."""
        when, issuer = now.replace(tzinfo=None), self.chain[-1 - level]
        builder = ocsp.OCSPResponseBuilder().add_response(
            self.chain[-2 - level], issuer, SHA1(),  # noqa: S303 - OCSP names certificates by it
            ocsp.OCSPCertStatus.REVOKED if revoked else ocsp.OCSPCertStatus.GOOD,
            when - timedelta(hours=1), when + timedelta(days=7), when - timedelta(days=1) if revoked else None,
            x509.ReasonFlags.certificate_hold if revoked else None,
        ).responder_id(ocsp.OCSPResponderEncoding.NAME, issuer)  # fmt: skip
        return builder.sign(self.keys[level], SHA384()).public_bytes(Encoding.DER)
