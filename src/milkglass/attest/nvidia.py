"""NVIDIA GPUs: a signed answer to a request for measurements, its certificates, and the modes that it states.

    DMTF DSP0274 (SPDM) 1.1, GET_MEASUREMENTS and MEASUREMENTS
    request 37    version, code, parameters, nonce at 4..35, slot
    answer        version, code, parameters, number of blocks, u24 length, blocks, nonce 32, u16 length, opaque data,
                  signature 96 (ECDSA P-384 over request and answer, big-endian)
    block         index, kind 1, u16 size, type, u16 size, value
    opaque data   u16 type, u16 size, value, as NVIDIA's verifier reads them

The chain of certificates must end at NVIDIA's root. Below the root and one authority of NVIDIA's stands the one that
certified this chip, whose name tells a GPU from a switch and one architecture from another: the labels that NVIDIA's
tools write beside evidence are not read. The leaf names the firmware that holds its key, as the answer does. Reference
values are compared by rim.py. NVIDIA's word on revocation is about the authorities above the leaf, which the GPU's
firmware makes for itself, and about the signers of reference values.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from cryptography import x509
from cryptography.x509.oid import NameOID

from milkglass.attest import rim
from milkglass.attest.chains import certificates, require_chain, require_not_revoked, require_signed, spki_of
from milkglass.attest.claims import Claim, VerifiedGpu, proven, unchecked, weak
from milkglass.errors import AttestationError

ROOT = "a90c4eb5acfd3e3d03a25db6a26b84f720ad0503196c627c21ddd48dd85b06a4"  # SHA-256 of NVIDIA's public key
REQUEST_BYTES, SIGNATURE_BYTES, NONCE_BYTES = 37, 96, 32
GET_MEASUREMENTS, MEASUREMENTS, SPDM = 0xE0, 0x60, 0x11
MAX_EVIDENCE, MAX_GPUS = 64 << 10, 64
DRIVER, VBIOS, FWID, PPCIE, FEATURES = 3, 6, 20, 21, 36  # types of opaque data
# TCG: the identity of the firmware that holds the leaf's key, as Hopper's and as Blackwell's certificates give it
DICE = (x509.ObjectIdentifier("2.23.133.5.4.1"), x509.ObjectIdentifier("2.23.133.5.4.1.1"))
ARCHITECTURES = {"GH100": "HOPPER", "GB100": "BLACKWELL"}  # by chip
CHIP_AUTHORITY = re.compile(r"NVIDIA (\w+) Provisioner ICA \d+")
MODES = {0: "spt", 1: "mpt", 2: "ppcie"}  # of the feature flag
AUTHORITY = 1  # in a chain: the first certificate that NVIDIA's service for revocation knows
LINKED_MODE = 0xAA  # of the field for protected PCIe, which drivers before the feature flag have alone


@dataclass(frozen=True)
class Measurements:
    """A GPU's answer.

    Attributes:
        nonce: of the request.
        signed: the bytes that are signed.
        blocks: the measurements by index.
        opaque: what else it states, by type.
    """

    nonce: bytes
    signed: bytes
    signature: bytes
    blocks: Mapping[int, bytes]
    opaque: Mapping[int, bytes]

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parses request and answer. Raises AttestationError for anything else, trailing bytes too."""
        if not REQUEST_BYTES + SIGNATURE_BYTES < len(raw) <= MAX_EVIDENCE:
            raise AttestationError("size", f"a GPU's evidence has {len(raw):,} bytes of at most {MAX_EVIDENCE:,}")
        answer = raw[REQUEST_BYTES:]
        if (raw[0], raw[1]) != (SPDM, GET_MEASUREMENTS) or (answer[0], answer[1]) != (SPDM, MEASUREMENTS):
            raise AttestationError("evidence", "a GPU's evidence is no request and answer of SPDM 1.1")
        try:
            count, length = answer[4], int.from_bytes(answer[5:8], "little")
            start = 8 + length + NONCE_BYTES + 2  # of the opaque data
            (size,) = struct.unpack_from("<H", answer, start - 2)
            blocks = _blocks(answer[8 : 8 + length])
            opaque = _fields(answer[start : start + size])
        except (struct.error, IndexError):
            raise AttestationError("evidence", "a GPU's evidence is cut off") from None
        if excess := len(answer) - (start + size + SIGNATURE_BYTES):
            raise AttestationError("trailing", f"a GPU's evidence has {excess} bytes that do not belong to it")
        if len(blocks) != count:
            raise AttestationError("evidence", f"a GPU states {count} measurements and gives {len(blocks)}")
        return cls(raw[4 : 4 + NONCE_BYTES], raw[:-SIGNATURE_BYTES], raw[-SIGNATURE_BYTES:], blocks, opaque)

    def text(self, field_type: int) -> str:
        """Returns a field of printable ASCII, or "" if there is none."""
        text = self.opaque.get(field_type, b"").rstrip(b"\x00").decode("ascii", "replace")
        return text if text.isprintable() else ""

    @property
    def vbios(self) -> str:
        """Returns the version as NVIDIA writes it, such as "96.00.5E.00.01"."""
        raw = self.opaque.get(VBIOS, b"")
        if len(raw) < 5:
            return ""
        low, high = raw[3::-1].hex().upper(), raw[4:5].hex().upper()
        return ".".join([low[at : at + 2] for at in range(0, 8, 2)] + [high])


def _blocks(raw: bytes) -> dict[int, bytes]:
    blocks, at = dict[int, bytes](), 0
    while at < len(raw):
        index, specification, size, _, length = struct.unpack_from("<BBHBH", raw, at)
        measurement = raw[at + 7 : at + 7 + length]
        if specification != 1 or size != length + 3 or len(measurement) != length or index in blocks:
            raise AttestationError("evidence", f"measurement {index} of a GPU is malformed")
        blocks[index] = measurement
        at += 4 + size
    return blocks


def _fields(raw: bytes) -> dict[int, bytes]:
    fields, at = dict[int, bytes](), 0
    while at < len(raw):
        field_type, size = struct.unpack_from("<HH", raw, at)
        content = raw[at + 4 : at + 4 + size]
        if len(content) != size or field_type in fields:
            raise AttestationError("evidence", f"field {field_type} of a GPU's evidence is malformed")
        fields[field_type] = content
        at += 4 + size
    return fields


def decoded(entry: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Returns evidence and certificates of an entry as NVIDIA's tools write it. Raises AttestationError.

    Args:
        entry: "evidence" and "certificate" in base64.
    """
    try:
        raw, pem = (base64.b64decode(str(entry[name]), validate=True) for name in ("evidence", "certificate"))
    except (KeyError, ValueError) as error:
        raise AttestationError("evidence", f"a GPU's evidence is not as expected ({type(error).__name__})") from None
    return raw, pem


def verify(
    raw: bytes, pem: bytes, nonce: bytes | None, references: Sequence[bytes], lists: Sequence[bytes], now: datetime,
) -> VerifiedGpu:  # fmt: skip
    """Verifies a GPU's evidence.

    Args:
        raw: the request and the answer.
        pem: its certificates, leaf first.
        nonce: what it must have answered to. None: anything, and the caller says that it is not fresh.
        references: reference manifests (RIM) of driver and VBIOS in XML; those of other versions are left out.
        lists: revocation lists, or answers of OCSP.
        now: the time.

    Raises:
        AttestationError: with the first fault.
    """
    measurements = Measurements.parse(raw)
    chain = certificates(pem, "a GPU's chain")
    require_chain(chain, ROOT, now, "a GPU")
    chip = chip_of(chain)
    if chip not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise AttestationError("architecture", f"NVIDIA certified a device as {chip}, which is none of {allowed}")
    leaf = chain[0]
    r, s = (int.from_bytes(measurements.signature[at : at + 48], "big") for at in (0, 48))
    require_signed(leaf.public_key(), r, s, measurements.signed, "a GPU's evidence")
    if nonce is not None and measurements.nonce != nonce:
        raise AttestationError("nonce", "a GPU answered to another nonce")
    _require_firmware(measurements, leaf)
    current = require_not_revoked(chain, lists, now, "a GPU", AUTHORITY)
    architecture, device = ARCHITECTURES[chip], spki_of(leaf).hex()
    driver, vbios = measurements.text(DRIVER), measurements.vbios
    lines = [
        proven("gpu", f"a device of NVIDIA's, driver {driver}, VBIOS {vbios}, device {device[:16]}..."),
        Claim("architecture", "affirming", "vendor states", f"NVIDIA certified it as a {chip} ({architecture})"),
        weak(
            "gpu-binding", "this GPU is bound to the machine by its measured software alone: evidence can be relayed "
            "if that code is wrong", "relayable-gpu", "operator states",
        ),
        *_reference_claims(measurements, chip, references, lists, now),
        *_revocation_claims(current),
    ]  # fmt: skip
    text = (
        "whether it is in developer mode (DevTools), in which its memory is open: only the measured software can see it"
    )
    lines.append(unchecked("gpu-devtools", text))
    mode = _mode(measurements)
    if mode == "spt":
        lines.append(proven("gpu-mode", "it is in the mode of one protected GPU"))
    elif mode == "ppcie":
        lines.append(weak("gpu-mode", "protected PCIe: traffic between GPUs (NVLink) is plain text", "ppcie"))
    else:
        lines.append(weak("gpu-mode", "the GPU does not state the mode of one protected GPU", "gpu-mode"))
    return VerifiedGpu(architecture, device, measurements.nonce, driver, vbios, mode, tuple(lines))


def chip_of(chain: Sequence[x509.Certificate]) -> str:
    """Returns the chip for which NVIDIA's authority certified a device, such as "GH100".

    Args:
        chain: leaf first. Whoever owns a device may extend its lower end, so that the authority's place is counted
            from the root.

    Raises:
        AttestationError: no such authority stands there.
    """
    names = chain[-3].subject.get_attributes_for_oid(NameOID.COMMON_NAME) if len(chain) > 3 else []
    if len(names) == 1 and (match := CHIP_AUTHORITY.fullmatch(str(names[0].value))):
        return match[1]
    raise AttestationError("architecture", "a GPU's chain does not name the chip that NVIDIA certified")


def _mode(measurements: Measurements) -> str:
    """Returns the mode that a GPU states, or "" if it states none."""
    if FEATURES in measurements.opaque:
        return MODES.get(int.from_bytes(measurements.opaque[FEATURES], "little"), "")
    if PPCIE in measurements.opaque:
        return "ppcie" if LINKED_MODE in measurements.opaque[PPCIE] else "spt"
    return ""


def _require_firmware(measurements: Measurements, leaf: x509.Certificate) -> None:
    """Checks that the firmware that holds the leaf's key is the one that answered, where both say it."""
    stated = measurements.opaque.get(FWID, b"")
    extensions = [
        extension.value.value
        for extension in leaf.extensions
        if isinstance(extension.value, x509.UnrecognizedExtension) and extension.oid in DICE
    ]
    if any(stated) and extensions and stated not in extensions[0]:
        raise AttestationError("firmware", "a GPU states another firmware than its certificate")


def _reference_claims(
    measurements: Measurements, chip: str, references: Sequence[bytes], lists: Sequence[bytes], now: datetime
) -> list[Claim]:
    """Compares the measurements with the references of its driver and its VBIOS.

    References of other chips and versions are left out.

    All of one version count, but those that have expired, if another one has not.
    """
    versions = {"driver": measurements.text(DRIVER), "VBIOS": measurements.vbios}
    lines, expired = dict[str, Claim](), dict[str, AttestationError]()
    all_checked = True
    for raw in references:
        stated_chip, stated_version = rim.read_chip_and_version(raw)
        part = next((name for name, version in versions.items() if version and version == stated_version), None)
        if part is None or stated_chip != chip:
            continue
        try:
            reference = rim.read(raw, now, lists)
        except AttestationError as error:
            if error.reason != "expired":
                raise
            expired[part] = error
            continue
        if (reference.product, reference.version) != (chip, versions[part]):
            raise AttestationError("rim", "what is signed of a reference manifest is for another chip or version")
        # Manifests count from 0, and SPDM's measurements from 1
        differing = [at for at, values in reference.values.items() if measurements.blocks.get(at + 1) not in values]
        if differing:
            raise AttestationError(
                "measurement",
                f"{len(differing)} of {len(reference.values)} measurements of a GPU's {part} differ from NVIDIA's "
                f"reference (index {differing[0]})",
            )
        all_checked &= reference.revocation_checked
        text = f"all {len(reference.values)} measurements of its {part} are NVIDIA's reference values"
        lines[part] = Claim(f"rim-{part}", "affirming", "vendor states", text)
    if unreplaced := [fault for part, fault in expired.items() if part not in lines]:
        raise unreplaced[0]
    claims = [*lines.values()]
    if not all_checked:
        text = "no current word of NVIDIA on the keys that signed these reference values was given"
        claims.append(weak("rim-revocation", text, "no-gpu-revocation", "not checked"))
    claims += [
        weak(f"rim-{part}", f"its {part} was compared with no reference values", "no-rim", "not checked")
        for part in versions if part not in lines
    ]  # fmt: skip
    return claims


def _revocation_claims(current: bool) -> list[Claim]:
    text = "whether this one GPU's own key was revoked: NVIDIA publishes nothing about that"
    own_key = unchecked("gpu-key-revocation", text)
    if current:
        text = "NVIDIA does not revoke the authorities of the GPU's key"
        return [Claim("gpu-revocation", "affirming", "vendor states", text), own_key]
    text = "no current word of NVIDIA on the authorities of the GPU's key was given"
    return [weak("gpu-revocation", text, "no-gpu-revocation", "not checked"), own_key]


def require_distinct(gpus: Sequence[VerifiedGpu]) -> None:
    """Raises AttestationError if one GPU answers twice, or there are too many."""
    if len(gpus) > MAX_GPUS:
        raise AttestationError("size", f"evidence of {len(gpus)} GPUs, at most {MAX_GPUS} are read")
    if len({gpu.device for gpu in gpus}) < len(gpus):
        raise AttestationError("duplicate", f"{len(gpus)} GPUs were shown, and two of them are one device")


def digest(evidence: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Returns SHA-256 over all evidence and certificates of GPUs, which our server puts into the report data."""
    hasher = hashlib.sha256(b"milkglass gpus 1")
    for raw, pem in evidence:
        for part in (raw, pem):
            hasher.update(struct.pack("<Q", len(part)) + part)
    return hasher.digest()
