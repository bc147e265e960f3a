"""Verifies reports of AMD SEV-SNP, which a key of the processor (VCEK) or of a cloud (VLEK) signs.

    AMD, SEV Secure Nested Paging Firmware ABI Specification 56860, revision 1.58, table 23 (ATTESTATION_REPORT)
    AMD, VCEK Certificate and KDS Interface Specification 57230, revision 1.00, tables 8 and 9 (extensions)

AMD's revocation lists are signed by its root and name authorities (ASK, ASVK) alone: AMD publishes nothing about a
processor's own key. Nobody signs the bytes after the signature, and they must be 0. The versions in the report must be
those for which the key's certificate was made; a VCEK's certificate also names the chip.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from cryptography import x509

from milkglass.attest.chains import parse_certificates, require_chain, require_not_revoked, require_signed
from milkglass.attest.claims import (
    FORGEABLE_WEAKNESS,
    Claim,
    VerifiedMachine,
    proven_claim,
    unchecked_claim,
    weak_claim,
)
from milkglass.errors import AttestationError

REPORT_BYTES, SIGNED_BYTES, SIGNATURE_END = 1_184, 0x2A0, 0x2A0 + 144
REPORT_VERSIONS = (2, 3, 4, 5)
ECDSA_P384 = 1  # the value of SIGNATURE_ALGO: ECDSA P-384 with SHA-384
# SHA-256 of the SPKI of AMD's root keys (ARK), by product
ROOT_SPKI_DIGESTS = {
    "Milan": "9f056bee44377e29308cb5ffa895bdfb62d18881fa6bed8d6f075b0204089cb9",
    "Genoa": "429a69c9422aa258ee4d8db5fcda9c6470ef15f8cd5a9cebd6cbc7d90b863831",
    "Turin": "4f125410563a2ab9a50356f9243f6fe0b6f73de98603f53f90339c70e9d7ad08",
}
POLICY_DEBUG, POLICY_MIGRATION, POLICY_ALWAYS_SET = 1 << 19, 1 << 18, 1 << 17
PLATFORM_SMT, PLATFORM_ALIAS_CHECKED = 1 << 0, 1 << 5
AMD_OID = "1.3.6.1.4.1.3704.1."
COMPONENT_OF_OID = {
    f"{AMD_OID}3.1": "bootloader",
    f"{AMD_OID}3.2": "tee",
    f"{AMD_OID}3.3": "snp",
    f"{AMD_OID}3.8": "microcode",
    f"{AMD_OID}3.9": "fmc",
}
OID_CHIP, OID_CLOUD = f"{AMD_OID}4", f"{AMD_OID}5"
# The byte of each component in a TCB_VERSION of eight bytes
TCB_LAYOUT = {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7}
TCB_LAYOUT_TURIN = {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7}
NO_MIGRATION_AGENT = (bytes(32), b"\xff" * 32)  # the values of REPORT_ID_MA of a guest without a migration agent
SIGNED_BY_VCEK, SIGNED_BY_VLEK = 0, 1  # values of SIGNING_KEY
MAX_VMPL = 3  # the highest level of a guest; a report that the host asked for has 0xffffffff
MAX_FILES = {"key": 16, "chain": 8}  # the most files of each name: each pair of them costs time
FIRST_REVOCABLE_INDEX = 1  # the index of the first certificate in a chain that AMD's revocation lists are about


@dataclass(frozen=True)
class Report:
    """Holds the fields of an attestation report that are appraised.

    Attributes:
        raw: the whole report, 1,184 bytes.
        version: the version of the report's format.
        policy: the bits of GUEST_POLICY.
        vmpl: the privilege level of the software that asked.
        platform: the bits of PLATFORM_INFO.
        signing_key: which key signed: `SIGNED_BY_VCEK` or `SIGNED_BY_VLEK`; a report may name others.
        report_data: the 64 bytes that the guest chose.
        measurement: the launch measurement, 48 bytes.
        chip_id: the 64 bytes of CHIP_ID; all 0 if the host masks it.
        migration_agent: the 32 bytes of REPORT_ID_MA.
        reported_tcb: the eight bytes of the TCB_VERSION for which the key was made (`tcb_versions` reads them).
        committed_tcb: the TCB_VERSION below which the host cannot go back.
        launch_tcb: the TCB_VERSION when the guest was started.
    """

    raw: bytes
    version: int
    policy: int
    vmpl: int
    platform: int
    signing_key: int
    report_data: bytes
    measurement: bytes
    chip_id: bytes
    migration_agent: bytes
    reported_tcb: bytes
    committed_tcb: bytes
    launch_tcb: bytes

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parses the 1,184 bytes of a report. Raises AttestationError for anything else, also what no guest gets."""
        if len(raw) != REPORT_BYTES:
            raise AttestationError("size", f"an SEV-SNP report has {REPORT_BYTES:,} bytes, and this one {len(raw):,}")
        (version,), (policy,), (vmpl, algorithm) = (
            struct.unpack_from(layout, raw, offset) for layout, offset in (("<I", 0), ("<Q", 8), ("<II", 0x30))
        )
        platform, key_flags = struct.unpack_from("<QI", raw, 0x40)
        if version not in REPORT_VERSIONS:
            raise AttestationError("version", f"the report has version {version}; {REPORT_VERSIONS} are supported")
        if algorithm != ECDSA_P384:
            raise AttestationError("signature", f"the report is signed by algorithm {algorithm}, not by ECDSA P-384")
        if vmpl > MAX_VMPL:
            raise AttestationError(
                "level",
                f"the report is for privilege level {vmpl:#x}, and guests have 0 to {MAX_VMPL}: none asked for it",
            )
        if any(raw[SIGNATURE_END:]):
            raise AttestationError("unsigned", "bytes that nobody signs are not 0")
        if not policy & POLICY_ALWAYS_SET:
            raise AttestationError("policy", f"the guest's policy {policy:#x} lacks the bit that is always set")
        return cls(
            raw, version, policy, vmpl, platform, key_flags >> 2 & 7, raw[0x50:0x90], raw[0x90:0xC0],
            raw[0x1A0:0x1E0], raw[0x160:0x180], raw[0x180:0x188], raw[0x1E0:0x1E8],
            raw[0x1F0:0x1F8],
        )  # fmt: skip


def verify(raw: bytes, collateral: Mapping[str, bytes], now: datetime) -> VerifiedMachine:
    """Verifies a report's bytes, signature and certificates. Returns what it proves of the machine.

    Args:
        raw: the report.
        collateral: certificates and revocation lists by name. "key" is the VCEK's or VLEK's certificate, and "chain"
            its authority and AMD's root, in any order. Of several names that begin with these, the first pair that fits
            the report counts. All revocation lists, whose names begin with "crl", count.
        now: the time at which certificates and revocation lists must be valid.

    Raises:
        AttestationError: the report does not verify. The error names the first fault.
    """
    report = Report.parse(raw)
    if report.signing_key not in (SIGNED_BY_VCEK, SIGNED_BY_VLEK):
        raise AttestationError("signature", f"the report is signed by key {report.signing_key}, neither VCEK nor VLEK")
    chain, product, tcb = _find_signers(report, collateral, now)
    revocation_files = [value for name, value in collateral.items() if name.startswith("crl")]
    is_list_current = require_not_revoked(chain, revocation_files, now, "the processor", FIRST_REVOCABLE_INDEX)
    return VerifiedMachine(
        "sev-snp", product, report.report_data, {"launch": report.measurement.hex()},
        report.chip_id.hex() if any(report.chip_id) else "", tcb, "",
        tuple(_claims(report, product, tcb, is_list_current)),
        tcb_versions(report.launch_tcb, product),
    )  # fmt: skip


def _find_signers(
    report: Report, collateral: Mapping[str, bytes], now: datetime
) -> tuple[list[x509.Certificate], str, dict[str, int]]:
    """Returns the chain that signed a report, its product and its versions.

    The host may hand over an old key from its cache, beside the right one that the client has. So each pair is tried.

    Raises:
        AttestationError: no key and chain fit, files are missing, or there are too many. For pairs that do not fit, the
            error names the fault of the first one.
    """
    files_of_kind = dict[str, list[bytes]]()
    for kind, max_files in MAX_FILES.items():
        files = list(dict.fromkeys(file for name, file in collateral.items() if name.startswith(kind)))
        if not files:
            raise AttestationError(
                "collateral", f"the processor's {kind} is missing", "`milkglass attest fetch` gets it from AMD"
            )
        if len(files) > max_files:
            raise AttestationError("size", f"{len(files)} files {kind}..., at most {max_files} are read")
        files_of_kind[kind] = files
    faults = list[AttestationError]()
    for key, authorities in itertools.product(files_of_kind["key"], files_of_kind["chain"]):
        try:
            return _verify_with(report, key, authorities, now)
        except AttestationError as error:
            faults.append(error)
    raise faults[0]


def _verify_with(
    report: Report, key: bytes, authorities: bytes, now: datetime
) -> tuple[list[x509.Certificate], str, dict[str, int]]:
    """Verifies a report with one key and one chain. Returns as `_find_signers` does. Raises AttestationError."""
    leaf = parse_certificates(key, "the processor's key")[0]
    chain, product = _order_chain(leaf, parse_certificates(authorities, "the processor's chain"))
    require_chain(chain, ROOT_SPKI_DIGESTS[product], now, f"the {product} processor")
    r, s = (int.from_bytes(report.raw[start : start + 72], "little") for start in (SIGNED_BYTES, SIGNED_BYTES + 72))
    require_signed(leaf.public_key(), r, s, report.raw[:SIGNED_BYTES], "the report")
    tcb = tcb_versions(report.reported_tcb, product)
    _require_matching_key(report, leaf, tcb)
    return chain, product, tcb


def _order_chain(leaf: x509.Certificate, issuers: list[x509.Certificate]) -> tuple[list[x509.Certificate], str]:
    """Returns a leaf, its authority and the root in this order, and the product that the root's name states.

    Raises AttestationError if they are not among the issuers, or the root is not AMD's by its name.
    """
    issuer = next((cert for cert in issuers if cert.subject == leaf.issuer and cert.subject != cert.issuer), None)
    root = None if issuer is None else next((cert for cert in issuers if cert.subject == issuer.issuer), None)
    if issuer is None or root is None:
        raise AttestationError("chain", "the processor's key is not issued by one of the given certificates")
    names = [item.value for item in root.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    product = str(names[0]).removeprefix("ARK-") if names else ""
    if product not in ROOT_SPKI_DIGESTS:
        raise AttestationError("root", f"the root {product[:40]!r} is none of AMD's: {', '.join(ROOT_SPKI_DIGESTS)}")
    return [leaf, issuer, root], product


def tcb_versions(raw: bytes, product: str) -> dict[str, int]:
    """Returns the version of each component of the firmware, from a TCB_VERSION of eight bytes."""
    return {name: raw[index] for name, index in (TCB_LAYOUT_TURIN if product == "Turin" else TCB_LAYOUT).items()}


def _require_matching_key(report: Report, leaf: x509.Certificate, tcb: Mapping[str, int]) -> None:
    """Checks that the key was made for this chip and these versions. Raises AttestationError."""
    extension_values = {extension.oid.dotted_string: extension.value for extension in leaf.extensions}
    values = {
        name: value.value for name, value in extension_values.items() if isinstance(value, x509.UnrecognizedExtension)
    }
    stated_versions = {
        name: _parse_small_integer(values[oid]) for oid, name in COMPONENT_OF_OID.items() if oid in values
    }
    if {name: stated_versions.get(name) for name in tcb} != dict(tcb):
        raise AttestationError(
            "tcb", f"the report states the versions {dict(tcb)}, and its key is for {stated_versions}"
        )
    if report.signing_key == SIGNED_BY_VLEK:
        if OID_CHIP in values or OID_CLOUD not in values:
            raise AttestationError("key", "the report says that a VLEK signed it, and the certificate is none")
        return
    chip = values.get(OID_CHIP, b"")
    if not chip or report.chip_id[: len(chip)] != chip or any(report.chip_id[len(chip) :]):
        raise AttestationError("key", "the report names another chip than its key's certificate")


def _parse_small_integer(raw: bytes) -> int | None:
    """Returns the value of a DER INTEGER of one or two bytes, or None for anything else."""
    return int.from_bytes(raw[2:], "big") if raw[:1] == b"\x02" and len(raw) in (3, 4) else None


def _claims(report: Report, product: str, tcb: Mapping[str, int], is_list_current: bool) -> list[Claim]:
    """Returns what a verified report shows, claim by claim."""
    firmware = ", ".join(f"{name} {number}" for name, number in tcb.items())
    claims = [proven_claim("processor", f"an AMD {product} with SEV-SNP, firmware {firmware}")]
    if product == "Milan":
        text = "keys of Milan were extracted: anyone can forge this report, and no line of it is proven"
        claims.append(weak_claim("processor", text, FORGEABLE_WEAKNESS, "not checked", undoes_proof=True))
    if report.signing_key == SIGNED_BY_VLEK:
        claims.append(
            weak_claim("machine", "a key of the cloud signed (VLEK): nothing says which machine this is", "vlek")
        )
    elif any(report.chip_id):
        claims.append(proven_claim("machine", f"the chip {report.chip_id.hex()[:16]}..."))
    if report.policy & POLICY_DEBUG:
        claims.append(
            weak_claim("debug", "the host may debug the guest, and read its memory", "debug", undoes_proof=True)
        )
    else:
        claims.append(proven_claim("debug", "the host cannot debug the guest"))
    if report.policy & POLICY_MIGRATION or report.migration_agent not in NO_MIGRATION_AGENT:
        claims.append(
            weak_claim(
                "migration", "a migration agent may move the guest, with its memory", "migration", undoes_proof=True
            )
        )
    if report.vmpl:
        text = f"the software that asked runs at privilege level {report.vmpl}, which the measurement need not cover"
        claims.append(weak_claim("level", text, "level"))
    if report.platform & PLATFORM_SMT:
        claims.append(Claim("smt", "warning", "hardware proves", "hyperthreads are on: another guest may share a core"))
    if report.platform & PLATFORM_ALIAS_CHECKED:
        claims.append(proven_claim("alias-check", "memory aliases were checked at boot (BadRAM)"))
    else:
        text = "the firmware states no check of memory aliases at boot (BadRAM, CVE-2024-21944)"
        claims.append(weak_claim("alias-check", text, "no-alias-check", "not checked"))
    committed = tcb_versions(report.committed_tcb, product)
    if any(committed[name] < tcb[name] for name in tcb):
        claims.append(weak_claim("rollback", f"the host can go back to the firmware {committed}", "rollback"))
    if is_list_current:
        text = "AMD's revocation list does not name the authority of its key"
        claims.append(Claim("revocation", "affirming", "vendor states", text))
    else:
        text = "no current revocation list of AMD was given, and a revoked authority is not noticed"
        claims.append(weak_claim("revocation", text, "no-revocation", "not checked"))
    text = "whether this one processor's key was revoked: AMD publishes nothing about that"
    claims.append(unchecked_claim("key-revocation", text))
    claims.append(unchecked_claim("image", "who built the measured image, and what it gives away"))
    return claims
