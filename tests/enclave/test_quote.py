"""Quotes of DCAP: made by an authority of the tests' own, byte by byte after Intel's document, then bent."""

from __future__ import annotations

import base64
import hashlib
import random
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from milkglass.enclave import quote
from milkglass.errors import EnclaveError

# A quote of a machine with SGX, published in github.com/automata-network/dcap-rs (src/lib.rs at d847b8f, Apache-2.0)
RECORDED = Path(__file__).parents[1] / "fixtures" / "intel.quote"
ROOT_FINGERPRINT = "44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3"  # SHA-256, as Intel publishes it
MEASUREMENT, SIGNER, DATA = bytes(range(32)), b"Q" * 32, bytes(range(64))
NOW = datetime(2026, 11, 1, tzinfo=UTC)


def report(
    mr_enclave: bytes, mr_signer: bytes, data: bytes, flags: int = 5, svn: int = 3, product: int = 0, misc: int = 0
) -> bytes:
    """384 bytes: cpu_svn 16, misc 4, 12, ext 16, attributes 16, mr_enclave 32, 32, mr_signer 32, 32, config 64, ..."""
    raw = (
        bytes(16)
        + struct.pack("<I", misc)
        + bytes(12)
        + bytes(16)
        + struct.pack("<QQ", flags, 7)
        + mr_enclave
        + bytes(32)
    )
    raw += mr_signer + bytes(32) + bytes(64) + struct.pack("<HHH", product, svn, 0) + bytes(42) + bytes(16) + data
    assert len(raw) == 384
    return raw


def raw_point(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:]


def signature(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    r, s = decode_dss_signature(key.sign(content, ec.ECDSA(SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


@dataclass(frozen=True)
class Authority:
    """A root, an intermediate and a machine's key, and their certificates."""

    root: ec.EllipticCurvePrivateKey
    machine: ec.EllipticCurvePrivateKey
    chain: bytes


@cache
def authority(
    name: str = "test", days: int = 3650, authorities: tuple[bool, ...] = (True, True, False), pck: bool = True
) -> Authority:
    """authorities: the basicConstraints of each, from the root on. pck: whether the last has Intel's extension."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in authorities]  # root, platform, machine
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {one}")]) for one in range(len(keys))]
    made = []
    for place, is_authority in enumerate(authorities):
        issuer = max(0, place - 1)
        builder = x509.CertificateBuilder(
            names[issuer], names[place], keys[place].public_key(), 1000 + place,
            NOW - timedelta(days=30), NOW + timedelta(days=days),
        )  # fmt: skip
        builder = builder.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        if pck and place == len(keys) - 1:
            builder = builder.add_extension(x509.UnrecognizedExtension(quote.PCK_EXTENSION, b"\x30\0"), critical=False)
        made.append(builder.sign(keys[issuer], SHA256()))
    pem = b"".join(one.public_bytes(Encoding.PEM) for one in reversed(made))
    return Authority(keys[0], keys[-1], pem)


@dataclass(frozen=True)
class Forge:
    """A quote's parts before they are put together."""

    enclave: bytes = report(MEASUREMENT, b"S" * 32, DATA)
    version: int = 3
    key_type: int = 2
    qe_flags: int = 0x15
    qe_product: int = 1
    qe_svn: int = 8
    qe_misc: int = 0
    qe_signer: bytes = SIGNER
    qe_data: bytes = b"auth data"
    bound: bytes | None = None  # report data of the quoting enclave; None: the right one
    data_type: int = 5
    who: Authority | None = None
    signer: ec.EllipticCurvePrivateKey | None = None  # of the quote; None: the attestation key

    def bytes(self) -> bytes:
        who = self.who or authority()
        key = ec.generate_private_key(ec.SECP256R1())
        header = struct.pack("<HHIHH", self.version, self.key_type, 0, 1, 1) + bytes(16) + bytes(20)
        signed = header + self.enclave
        point = raw_point(key)
        bound = self.bound or hashlib.sha256(point + self.qe_data).digest() + bytes(32)
        qe = report(b"q" * 32, self.qe_signer, bound, self.qe_flags, self.qe_svn, self.qe_product, self.qe_misc)
        body = signature(self.signer or key, signed) + point + qe + signature(who.machine, qe)
        body += struct.pack("<H", len(self.qe_data)) + self.qe_data
        body += struct.pack("<HI", self.data_type, len(who.chain)) + who.chain
        return signed + struct.pack("<I", len(body)) + body


def check(raw: bytes, data: bytes = DATA, allowed: bytes = MEASUREMENT, now: datetime = NOW) -> quote.SgxReport:
    return quote.verify(raw, data, {allowed.hex()}, quote.Trust(raw_point(authority().root), SIGNER), now)


def test_a_good_quote_is_accepted() -> None:
    result = check(Forge().bytes())
    assert result.mr_enclave == MEASUREMENT and result.mr_signer == b"S" * 32
    assert result.svn == 3 and result.report_data == DATA


def recorded() -> tuple[bytes, quote.SgxQuote]:
    raw = RECORDED.read_bytes()
    return raw, quote.SgxQuote.parse(raw)


def test_a_recorded_quote_ends_at_intels_root_and_quoting_enclave() -> None:
    """The pinned anchors: with another root or quoting enclave it is refused."""
    raw, one = recorded()
    allowed = {one.report.mr_enclave.hex()}
    assert quote.verify(raw, one.report.report_data, allowed, now=NOW).mr_enclave == one.report.mr_enclave
    for bad in (replace(quote.INTEL, root=bytes(64)), replace(quote.INTEL, qe_signer=bytes(32))):
        with pytest.raises(EnclaveError, match="Intel's"):
            quote.verify(raw, one.report.report_data, allowed, bad, NOW)


def test_the_pinned_root_is_the_key_of_the_certificate_that_intel_publishes() -> None:
    _, one = recorded()
    root = x509.load_pem_x509_certificates(one.chain.rstrip(b"\0"))[-1]
    assert root.fingerprint(SHA256()).hex() == ROOT_FINGERPRINT
    assert root.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:] == quote.INTEL_ROOT


def test_no_changed_byte_of_a_recorded_quote_passes() -> None:
    raw, one = recorded()
    for place in range(0, 48 + 384 + 4 + 576, 5):
        bad = bytearray(raw)
        bad[place] ^= 1
        with pytest.raises(EnclaveError):
            quote.verify(bytes(bad), one.report.report_data, {one.report.mr_enclave.hex()}, now=NOW)


BAD = {
    "an enclave that is not allowed": (Forge(enclave=report(b"x" * 32, b"S" * 32, DATA)), "measurement"),
    "a debug enclave": (Forge(enclave=report(MEASUREMENT, b"S" * 32, DATA, flags=7)), "debug"),
    "an enclave that is not initialised": (
        Forge(enclave=report(MEASUREMENT, b"S" * 32, DATA, flags=4)),
        "attributes 0x4",
    ),
    "an enclave with the provisioning key": (
        Forge(enclave=report(MEASUREMENT, b"S" * 32, DATA, flags=0x35)),
        "attributes 0x35",
    ),
    "an enclave that writes more on its exits": (
        Forge(enclave=report(MEASUREMENT, b"S" * 32, DATA, misc=1)),
        "misc 0x1",
    ),
    "an answer to another question": (Forge(enclave=report(MEASUREMENT, b"S" * 32, bytes(64))), "another question"),
    "another version": (Forge(version=4), "version 4"),
    "another kind of key": (Forge(key_type=3), "key type 3"),
    "another quoting enclave": (Forge(qe_signer=b"x" * 32), r"not Intel's \(product 1\)"),
    "another enclave of Intel's": (Forge(qe_product=2), "product 2"),
    "an old quoting enclave": (Forge(qe_svn=7), r"version 7\b.*\b8\b"),
    "a debug quoting enclave": (Forge(qe_flags=0x17), "attributes 0x17"),
    "a quoting enclave without its key": (Forge(qe_flags=0x05), "attributes 0x5"),
    "a quoting enclave with miscselect": (Forge(qe_misc=0xFFFFFFFF), "misc 0xffffffff"),
    "a key that the quoting enclave does not know": (Forge(bound=bytes(64)), "not the quoting enclave's"),
    "certificates of another type": (Forge(data_type=1), "type 1"),
    "another root": (Forge(who=authority("other")), "Intel's root"),
    "another signer": (Forge(signer=ec.generate_private_key(ec.SECP256R1())), "quote is not signed"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_quote_is_refused_with_its_reason(what: str) -> None:
    forge, words = BAD[what]
    with pytest.raises(EnclaveError, match=words):
        check(forge.bytes())


def test_no_changed_byte_passes() -> None:
    """Every byte of what is signed, of the signatures and of the reports, and some of the certificates."""
    raw = Forge().bytes()
    body = 48 + 384 + 4
    enclave = Forge().enclave
    for place in [*range(0, body + 64 + 64 + 384 + 64, 7), *range(body + 576, len(raw), 97)]:
        bad = bytearray(raw)
        bad[place] ^= 1
        try:
            result = check(bytes(bad))
        except EnclaveError:
            continue
        assert result.raw == enclave, f"byte {place} was changed in the report"
        assert place > body + 576, f"byte {place} was changed and the quote accepted"


def test_cut_quotes_are_refused() -> None:
    raw = Forge().bytes()
    for length in (0, 1, 47, 48, 432, 435, 500, 1100, len(raw) - 1):
        with pytest.raises(EnclaveError):
            check(raw[:length])
    with pytest.raises(EnclaveError):
        check(raw + bytes(quote.MAX_QUOTE))


@pytest.mark.parametrize(
    ("authorities", "pck"),
    [
        ((True, False, False), True),  # an intermediate that may sign nothing
        ((True, True, True), True),
        ((True, True, False, False), True),  # a fourth, which the PCK signed
        ((True, False), True),
        ((True, True, False), False),  # no PCK at all
    ],
)
def test_a_chain_of_other_certificates_is_refused(authorities: tuple[bool, ...], pck: bool) -> None:
    who = authority("test", 3650, authorities, pck)
    with pytest.raises(EnclaveError, match="PCK"):
        quote.verify(Forge(who=who).bytes(), DATA, {MEASUREMENT.hex()}, quote.Trust(raw_point(who.root), SIGNER), NOW)


def test_expired_certificates_are_refused() -> None:
    with pytest.raises(EnclaveError, match="expired"):
        check(Forge().bytes(), now=NOW + timedelta(days=4000))


def test_a_chain_whose_links_do_not_sign_each_other_is_refused() -> None:
    mine, other = authority(), authority("other")
    ends = [one.chain.split(b"-----END CERTIFICATE-----\n") for one in (mine, other)]
    mixed = b"-----END CERTIFICATE-----\n".join([ends[1][0], *ends[0][1:]])
    with pytest.raises(EnclaveError, match="each other"):
        check(replace(Forge(), who=replace(other, chain=mixed)).bytes())


def test_no_changed_bit_of_a_certificate_ends_in_another_error() -> None:
    """The library has errors of its own for many of them, such as for a version that is none."""
    chain = x509.load_pem_x509_certificates(authority().chain)
    draw, expected, accepted, tried = random.Random(5), check(Forge().bytes()), 0, 0
    for place, one in enumerate(chain):
        der = one.public_bytes(Encoding.DER)
        ends = [(at, 1 << bit) for at in range(16) for bit in range(8)]
        for at, bits in ends + [(draw.randrange(len(der)), 1 << draw.randrange(8)) for _ in range(150)]:
            tried += 1
            bad = bytearray(der)
            bad[at] ^= bits
            others = [other.public_bytes(Encoding.PEM) for other in chain]
            others[place] = pem(bytes(bad))
            with suppress(EnclaveError):  # a bit that no signature covers may change, and then the claim is the same
                found = check(replace(Forge(), who=replace(authority(), chain=b"".join(others))).bytes())
                accepted += 1
                assert found == expected
    assert accepted < 0.02 * tried


def pem(der: bytes) -> bytes:
    body = base64.encodebytes(der).decode().replace("\n", "")
    lines = [body[at : at + 64] for at in range(0, len(body), 64)]
    return "\n".join(["-----BEGIN CERTIFICATE-----", *lines, "-----END CERTIFICATE-----", ""]).encode()
