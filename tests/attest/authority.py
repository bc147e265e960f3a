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
from cryptography.x509.oid import ExtendedKeyUsageOID

GOOD, REVOKED, UNKNOWN = ocsp.OCSPCertStatus.GOOD, ocsp.OCSPCertStatus.REVOKED, ocsp.OCSPCertStatus.UNKNOWN
FIRST, LAST = datetime(2020, 1, 1), datetime(2040, 1, 1)


@dataclass(frozen=True)
class Authority:
    """A chain, leaf first, and its keys, root first."""

    chain: list[x509.Certificate]
    keys: list[ec.EllipticCurvePrivateKey]

    @classmethod
    def make(cls, *names: str, leaf: Sequence[x509.ExtensionType] = (), until: datetime = LAST) -> Authority:
        """Names from the root to the leaf. leaf: more extensions of the last. until: how long it is valid."""
        keys = [ec.generate_private_key(ec.SECP384R1()) for _ in names]
        found = list[x509.Certificate]()
        for level, (name, key) in enumerate(zip(names, keys, strict=True)):
            is_leaf = level == len(names) - 1
            one = certificate(name, key, found[-1:], keys[max(0, level - 1)], not is_leaf, until if is_leaf else LAST)
            for extension in leaf if is_leaf else ():
                one = one.add_extension(extension, critical=False)
            found.append(one.sign(keys[max(0, level - 1)], SHA384()))
        return cls(found[::-1], keys)

    @property
    def pem(self) -> bytes:
        return b"".join(one.public_bytes(Encoding.PEM) for one in self.chain)

    def revoked(
        self, level: int, serials: Sequence[int], now: datetime, days: int = 1,
        critical: x509.ExtensionType | None = None,
    ) -> bytes:  # fmt: skip
        """The revocation list of the authority at a level, 0 being the root, made some days before `now`."""
        when = now.replace(tzinfo=None)
        builder = (
            x509.CertificateRevocationListBuilder().issuer_name(self.chain[-1 - level].subject)
            .last_update(when - timedelta(days=days)).next_update(when + timedelta(days=31 - days))
        )  # fmt: skip
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when - timedelta(days=2))
            builder = builder.add_revoked_certificate(entry.build())
        if critical is not None:
            builder = builder.add_extension(critical, critical=True)
        return builder.sign(self.keys[level], SHA384()).public_bytes(Encoding.DER)

    def status(
        self, level: int, now: datetime, revoked: bool = False, state: ocsp.OCSPCertStatus = GOOD,
        end: timedelta | None = timedelta(days=7),
        responder: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None,
    ) -> bytes:  # fmt: skip
        """An answer of OCSP of the authority at a level on the certificate below it, made an hour before `now`.

        end: when it ends, from `now`; None: it does not say. responder: what signs it in the authority's place.
        """
        state, when, issuer = REVOKED if revoked else state, now.replace(tzinfo=None), self.chain[-1 - level]
        by, key = responder or (issuer, self.keys[level])
        gone = state is REVOKED
        builder = ocsp.OCSPResponseBuilder().add_response(
            self.chain[-2 - level], issuer, SHA1(),  # noqa: S303 - OCSP names certificates by it
            state, when - timedelta(hours=1), None if end is None else when + end,
            when - timedelta(days=1) if gone else None,
            x509.ReasonFlags.certificate_hold if gone else None,
        ).responder_id(ocsp.OCSPResponderEncoding.NAME, by)  # fmt: skip
        if responder is not None:
            builder = builder.certificates([by])
        return builder.sign(key, SHA384()).public_bytes(Encoding.DER)

    def responder(
        self, level: int, until: datetime = LAST, may: bool = True
    ) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """A certificate of the authority at a level that may answer OCSP for it, and its key."""
        key = ec.generate_private_key(ec.SECP384R1())
        builder = certificate("responder", key, [self.chain[-1 - level]], self.keys[level], False, until)
        if may:
            builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.OCSP_SIGNING]), critical=False)
        return builder.sign(self.keys[level], SHA384()), key


def certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: Sequence[x509.Certificate], signing: ec.EllipticCurvePrivateKey,
    authority: bool, until: datetime,
) -> x509.CertificateBuilder:  # fmt: skip
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(FIRST).not_valid_after(until)
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
        .add_extension(x509.KeyUsage(not authority, False, False, False, False, authority, authority, False, False),
                       critical=True)
    )  # fmt: skip
