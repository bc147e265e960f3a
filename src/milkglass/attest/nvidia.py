"""Verifies the evidence of NVIDIA GPUs: a request for measurements with its signed response, and certificates.

    DMTF DSP0274 (SPDM) 1.1, GET_MEASUREMENTS and MEASUREMENTS
    request 37    version, code, parameters, nonce at 4..35, slot
    response      version, code, parameters, number of blocks, u24 length, blocks, nonce 32, u16 length, opaque data,
                  signature 96 (ECDSA P-384 over request and response, big-endian)
    block         index, kind 1, u16 size, type, u16 size, value
    opaque data   u16 type, u16 size, value, as NVIDIA's verifier reads them

The chain of certificates must end at NVIDIA's root. The third certificate from the end, the root being the last,
belongs to the authority that certified this chip. The authority's name says whether the device is a GPU or a switch,
and of which architecture. Labels that NVIDIA's tools write beside evidence are not read. The leaf names the firmware
that holds its key, as the response does. rim.py reads the reference values. NVIDIA publishes the revocation status of
the authorities above the leaf and of the signers of reference values, but not of the leaf, which the GPU's firmware
makes for itself.
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
from milkglass.attest.chains import (
    parse_certificates,
    require_chain,
    require_not_revoked,
    require_signed,
    spki_digest_of,
)
from milkglass.attest.claims import Claim, VerifiedGpu, proven_claim, unchecked_claim, weak_claim
from milkglass.errors import AttestationError

# SHA-256 of the SPKI of NVIDIA's root
ROOT_SPKI_DIGEST = "a90c4eb5acfd3e3d03a25db6a26b84f720ad0503196c627c21ddd48dd85b06a4"
REQUEST_BYTES, SIGNATURE_BYTES, NONCE_BYTES = 37, 96, 32
GET_MEASUREMENTS_CODE, MEASUREMENTS_CODE, SPDM_VERSION = 0xE0, 0x60, 0x11
MAX_EVIDENCE_BYTES, MAX_GPUS = 64 << 10, 64
DRIVER_FIELD, VBIOS_FIELD, FWID_FIELD, PPCIE_FIELD, FEATURES_FIELD = 3, 6, 20, 21, 36  # types of opaque data
# TCG DICE: the extensions in which Hopper's and Blackwell's certificates name the firmware that holds the leaf's key
DICE_OIDS = (x509.ObjectIdentifier("2.23.133.5.4.1"), x509.ObjectIdentifier("2.23.133.5.4.1.1"))
ARCHITECTURES = {"GH100": "HOPPER", "GB100": "BLACKWELL"}  # by the chip's name
CHIP_AUTHORITY_PATTERN = re.compile(r"NVIDIA (\w+) Provisioner ICA \d+")
MODE_BY_FLAG = {0: "spt", 1: "mpt", 2: "ppcie"}  # the mode (`VerifiedGpu.mode`) by the value of the feature flag
FIRST_REVOCABLE_INDEX = 1  # the index of the first certificate in a chain that NVIDIA's OCSP service knows
PPCIE_ENABLED = 0xAA  # a value of the field for protected PCIe; older drivers give no feature flag


@dataclass(frozen=True)
class SignedMeasurements:
    """Holds what a GPU signed in answer to a request for measurements.

    Attributes:
        nonce: the 32 bytes of the request's nonce.
        signed_bytes: the request and the response without its signature.
        signature: the signature (r, s) of these bytes, 48 bytes each, big-endian.
        blocks: the measurements, by index from 1.
        opaque_fields: the values of the other fields that the GPU states, by type.
    """

    nonce: bytes
    signed_bytes: bytes
    signature: bytes
    blocks: Mapping[int, bytes]
    opaque_fields: Mapping[int, bytes]

    @classmethod
    def parse(cls, exchange: bytes) -> Self:
        """Parses a request and its response. Raises AttestationError for anything else, also for trailing bytes."""
        if not REQUEST_BYTES + SIGNATURE_BYTES < len(exchange) <= MAX_EVIDENCE_BYTES:
            raise AttestationError(
                "size", f"a GPU's evidence has {len(exchange):,} bytes of at most {MAX_EVIDENCE_BYTES:,}"
            )
        response = exchange[REQUEST_BYTES:]
        codes = (exchange[0], exchange[1], response[0], response[1])
        if codes != (SPDM_VERSION, GET_MEASUREMENTS_CODE, SPDM_VERSION, MEASUREMENTS_CODE):
            raise AttestationError("evidence", "a GPU's evidence is no request and response of SPDM 1.1")
        try:
            count, length = response[4], int.from_bytes(response[5:8], "little")
            start = 8 + length + NONCE_BYTES + 2  # where the opaque data begin
            (size,) = struct.unpack_from("<H", response, start - 2)
            blocks = _parse_blocks(response[8 : 8 + length])
            opaque_fields = _parse_opaque_fields(response[start : start + size])
        except (struct.error, IndexError):
            raise AttestationError("evidence", "a GPU's evidence is cut off") from None
        excess = len(response) - (start + size + SIGNATURE_BYTES)
        if excess < 0:
            raise AttestationError("evidence", "a GPU's evidence is cut off")
        if excess:
            raise AttestationError("trailing", f"a GPU's evidence has {excess} bytes that do not belong to it")
        if len(blocks) != count:
            raise AttestationError("evidence", f"a GPU states {count} measurements and gives {len(blocks)}")
        return cls(
            exchange[4 : 4 + NONCE_BYTES],
            exchange[:-SIGNATURE_BYTES],
            exchange[-SIGNATURE_BYTES:],
            blocks,
            opaque_fields,
        )

    def text(self, field_type: int) -> str:
        """Returns the text of an opaque field, or "" if there is none or it is not printable."""
        text = self.opaque_fields.get(field_type, b"").rstrip(b"\x00").decode("ascii", "replace")
        return text if text.isprintable() else ""

    @property
    def vbios_version(self) -> str:
        """Returns the VBIOS's version as NVIDIA writes it, such as "96.00.5E.00.01", or "" if there is none."""
        version_bytes = self.opaque_fields.get(VBIOS_FIELD, b"")
        if len(version_bytes) < 5:
            return ""
        low, high = version_bytes[3::-1].hex().upper(), version_bytes[4:5].hex().upper()
        return ".".join([low[start : start + 2] for start in range(0, 8, 2)] + [high])


def _parse_blocks(block_bytes: bytes) -> dict[int, bytes]:
    """Returns the measurements by index. Raises AttestationError, and struct.error where a block is cut off."""
    blocks, offset = dict[int, bytes](), 0
    while offset < len(block_bytes):
        index, specification, size, _, length = struct.unpack_from("<BBHBH", block_bytes, offset)
        measurement = block_bytes[offset + 7 : offset + 7 + length]
        if specification != 1 or size != length + 3 or len(measurement) != length or index in blocks:
            raise AttestationError("evidence", f"measurement {index} of a GPU is malformed")
        blocks[index] = measurement
        offset += 4 + size
    return blocks


def _parse_opaque_fields(field_bytes: bytes) -> dict[int, bytes]:
    """Returns the opaque fields by type. Raises AttestationError, and struct.error where a field is cut off."""
    fields, offset = dict[int, bytes](), 0
    while offset < len(field_bytes):
        field_type, size = struct.unpack_from("<HH", field_bytes, offset)
        content = field_bytes[offset + 4 : offset + 4 + size]
        if len(content) != size or field_type in fields:
            raise AttestationError("evidence", f"field {field_type} of a GPU's evidence is malformed")
        fields[field_type] = content
        offset += 4 + size
    return fields


def decode_gpu_evidence(entry: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Decodes the evidence and the certificates of a GPU from an entry as NVIDIA's tools write it.

    Args:
        entry: "evidence" and "certificate" in base64.

    Raises:
        AttestationError: an entry is missing, or is no base64.
    """
    try:
        evidence, chain_pem = (
            base64.b64decode(str(entry[name]), validate=True) for name in ("evidence", "certificate")
        )
    except (KeyError, ValueError) as error:
        raise AttestationError("evidence", f"a GPU's evidence is not as expected ({type(error).__name__})") from None
    return evidence, chain_pem


def verify(
    evidence: bytes,
    chain_pem: bytes,
    nonce: bytes | None,
    manifests: Sequence[bytes],
    revocation_files: Sequence[bytes],
    now: datetime,
) -> VerifiedGpu:
    """Verifies a GPU's evidence.

    Args:
        evidence: the bytes of a request for measurements, and of the GPU's response.
        chain_pem: the GPU's certificates in PEM, leaf first.
        nonce: the nonce to which the GPU must have answered. None: any nonce is accepted, and the
            caller must report that the evidence may be old.
        manifests: reference manifests (RIM) of driver and VBIOS in XML; those of other versions are left out.
        revocation_files: revocation lists and OCSP responses.
        now: the time at which certificates, manifests and revocation files must be valid.

    Returns:
        The device, its versions and mode, and claims on what is proven, what is weak, and what was not checked.

    Raises:
        AttestationError: the evidence does not verify. The error names the first fault.
    """
    measurements = SignedMeasurements.parse(evidence)
    chain = parse_certificates(chain_pem, "a GPU's chain")
    require_chain(chain, ROOT_SPKI_DIGEST, now, "a GPU")
    chip = chip_of(chain)
    if chip not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise AttestationError("architecture", f"NVIDIA certified a device as {chip}, which is none of {allowed}")
    leaf = chain[0]
    r, s = (int.from_bytes(measurements.signature[start : start + 48], "big") for start in (0, 48))
    require_signed(leaf.public_key(), r, s, measurements.signed_bytes, "a GPU's evidence")
    if nonce is not None and measurements.nonce != nonce:
        raise AttestationError("nonce", "a GPU answered to another nonce")
    _require_firmware(measurements, leaf)
    is_current = require_not_revoked(chain, revocation_files, now, "a GPU", FIRST_REVOCABLE_INDEX)
    architecture, device_id = ARCHITECTURES[chip], spki_digest_of(leaf).hex()
    driver, vbios = measurements.text(DRIVER_FIELD), measurements.vbios_version
    claims = [
        proven_claim("gpu", f"a device of NVIDIA's, driver {driver}, VBIOS {vbios}, device {device_id[:16]}..."),
        Claim("architecture", "affirming", "vendor states", f"NVIDIA certified it as a {chip} ({architecture})"),
        weak_claim(
            "gpu-binding", "this GPU is bound to the machine by its measured software alone: evidence can be relayed "
            "if that code is wrong", "relayable-gpu", "operator states",
        ),
        *_reference_claims(measurements, chip, manifests, revocation_files, now),
        *_revocation_claims(is_current),
    ]  # fmt: skip
    text = (
        "whether it is in developer mode (DevTools), in which its memory is open: only the measured software can see it"
    )
    claims.append(unchecked_claim("gpu-devtools", text))
    mode = _mode(measurements)
    if mode == "spt":
        claims.append(proven_claim("gpu-mode", "it is in the mode of one protected GPU"))
    elif mode == "ppcie":
        claims.append(weak_claim("gpu-mode", "protected PCIe: traffic between GPUs (NVLink) is plain text", "ppcie"))
    else:
        claims.append(weak_claim("gpu-mode", "the GPU does not state the mode of one protected GPU", "gpu-mode"))
    return VerifiedGpu(architecture, device_id, measurements.nonce, driver, vbios, mode, tuple(claims))


def chip_of(chain: Sequence[x509.Certificate]) -> str:
    """Returns the chip for which NVIDIA's authority certified a device, such as "GH100".

    Args:
        chain: the device's certificates, leaf first. The owner of a device may add certificates at the leaf's end, so
            that the authority's place is counted from the root.

    Raises:
        AttestationError: no such authority stands in that place.
    """
    names = chain[-3].subject.get_attributes_for_oid(NameOID.COMMON_NAME) if len(chain) > 3 else []
    if len(names) == 1 and (match := CHIP_AUTHORITY_PATTERN.fullmatch(str(names[0].value))):
        return match[1]
    raise AttestationError("architecture", "a GPU's chain does not name the chip that NVIDIA certified")


def _mode(measurements: SignedMeasurements) -> str:
    """Returns the mode that a GPU states (`VerifiedGpu.mode`), or "" if it states none."""
    if FEATURES_FIELD in measurements.opaque_fields:
        return MODE_BY_FLAG.get(int.from_bytes(measurements.opaque_fields[FEATURES_FIELD], "little"), "")
    if PPCIE_FIELD in measurements.opaque_fields:
        return "ppcie" if PPCIE_ENABLED in measurements.opaque_fields[PPCIE_FIELD] else "spt"
    return ""


def _require_firmware(measurements: SignedMeasurements, leaf: x509.Certificate) -> None:
    """Raises AttestationError if the firmware that answered is not the one that the leaf's certificate names.

    Nothing is compared if the GPU or the certificate names no firmware.
    """
    firmware_id = measurements.opaque_fields.get(FWID_FIELD, b"")
    extensions = [
        extension.value.value
        for extension in leaf.extensions
        if isinstance(extension.value, x509.UnrecognizedExtension) and extension.oid in DICE_OIDS
    ]
    if any(firmware_id) and extensions and firmware_id not in extensions[0]:
        raise AttestationError("firmware", "a GPU states another firmware than its certificate")


def _reference_claims(
    measurements: SignedMeasurements,
    chip: str,
    manifests: Sequence[bytes],
    revocation_files: Sequence[bytes],
    now: datetime,
) -> list[Claim]:
    """Compares a GPU's measurements with the reference values of its driver and its VBIOS.

    Manifests of other chips and versions are left out. All manifests of one version count. An expired one is left out
    if another of its version has not expired.

    Returns:
        A claim on the driver, one on the VBIOS, and one on the manifests' signers if their revocation was not checked.

    Raises:
        AttestationError: a measurement differs, or a manifest does not verify.
    """
    versions = {"driver": measurements.text(DRIVER_FIELD), "VBIOS": measurements.vbios_version}
    claim_of_component, expired = dict[str, Claim](), dict[str, AttestationError]()
    are_signers_checked = True
    for manifest in manifests:
        stated_chip, stated_version = rim.read_chip_and_version(manifest)
        component = next((name for name, version in versions.items() if version and version == stated_version), None)
        if component is None or stated_chip != chip:
            continue
        try:
            reference = rim.verify_manifest(manifest, now, revocation_files)
        except AttestationError as error:
            if error.reason != "expired":
                raise
            expired[component] = error
            continue
        if (reference.product, reference.version) != (chip, versions[component]):
            raise AttestationError("rim", "what is signed of a reference manifest is for another chip or version")
        # Manifests count from 0, and SPDM's measurements from 1
        differing_indices = [
            index for index, values in reference.values.items() if measurements.blocks.get(index + 1) not in values
        ]
        if differing_indices:
            raise AttestationError(
                "measurement",
                f"{len(differing_indices)} of {len(reference.values)} measurements of a GPU's {component} differ from "
                f"NVIDIA's reference (index {differing_indices[0]})",
            )
        are_signers_checked &= reference.is_revocation_checked
        text = f"all {len(reference.values)} measurements of its {component} are NVIDIA's reference values"
        claim_of_component[component] = Claim(f"rim-{component}", "affirming", "vendor states", text)
    if faults := [fault for component, fault in expired.items() if component not in claim_of_component]:
        raise faults[0]
    claims = [*claim_of_component.values()]
    if not are_signers_checked:
        text = "no current word of NVIDIA on the keys that signed these reference values was given"
        claims.append(weak_claim("rim-revocation", text, "no-gpu-revocation", "not checked"))
    claims += [
        weak_claim(
            f"rim-{component}", f"its {component} was compared with no reference values", "no-rim", "not checked"
        )
        for component in versions
        if component not in claim_of_component
    ]
    return claims


def _revocation_claims(is_current: bool) -> list[Claim]:
    """Returns claims on the revocation of a GPU's key.

    Args:
        is_current: whether the authorities of the key have a current revocation status.
    """
    text = "whether this one GPU's own key was revoked: NVIDIA publishes nothing about that"
    own_key_claim = unchecked_claim("gpu-key-revocation", text)
    if is_current:
        text = "NVIDIA does not revoke the authorities of the GPU's key"
        return [Claim("gpu-revocation", "affirming", "vendor states", text), own_key_claim]
    text = "no current word of NVIDIA on the authorities of the GPU's key was given"
    return [weak_claim("gpu-revocation", text, "no-gpu-revocation", "not checked"), own_key_claim]


def require_distinct(gpus: Sequence[VerifiedGpu]) -> None:
    """Raises AttestationError if one GPU answers twice, or more than MAX_GPUS answer."""
    if len(gpus) > MAX_GPUS:
        raise AttestationError("size", f"evidence of {len(gpus)} GPUs, at most {MAX_GPUS} are read")
    if len({gpu.device_id for gpu in gpus}) < len(gpus):
        raise AttestationError("duplicate", f"{len(gpus)} GPUs were shown, and two of them are one device")


def gpu_evidence_digest(evidence: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Returns SHA-256 over all evidence and certificates of GPUs, which our server puts into the report data."""
    hasher = hashlib.sha256(b"milkglass gpus 1")
    for gpu_evidence, chain_pem in evidence:
        for content in (gpu_evidence, chain_pem):
            hasher.update(struct.pack("<Q", len(content)) + content)
    return hasher.digest()
