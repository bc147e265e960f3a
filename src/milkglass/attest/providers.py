"""The forms in which servers give evidence: Milkglass's, Tinfoil's document, and the report of ACI.

    tinfoil    {"format": URL, "body": BASE64 of gzip of a report}; the first half of the report data is SHA-256 of the
               SPKI; there is no nonce (tinfoilsh/tinfoil-python, src/tinfoil/attestation)
    aci        Attested Confidential Inference, aci/1 (Dstack-TEE/private-ai-gateway, spec/aci.md, sections 3 and 4):
               the report data sign a keyset, which lists the SPKI of each name (aci.py)

ACI's event log and source provenance are not read: the registers of the policy decide what runs. Its receipts are not
checked either.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from milkglass.attest.aci import canonical
from milkglass.attest.claims import Kind
from milkglass.attest.evidence import HardwareEvidence
from milkglass.errors import AttestationError

MAX_UNPACKED = 64 << 10
TINFOIL: Mapping[str, Kind] = {
    "https://tinfoil.sh/predicate/sev-snp-guest/v2": "sev-snp",
    "https://tinfoil.sh/predicate/tdx-guest/v2": "tdx",
}
ACI: Mapping[str, Kind] = {"tdx": "tdx", "sev_snp": "sev-snp"}

PATH = "/.well-known/milkglass-attestation"  # of a Milkglass server

Read = Callable[[bytes, bytes, bytes, str, datetime], HardwareEvidence]


@dataclass(frozen=True)
class Provider:
    """A form of evidence.

    Attributes:
        path: at which it is asked for; {nonce} is filled in.
        read: takes the document, SHA-256 of the connection's SPKI, the nonce, the server's name and the time, and
            returns the evidence. Raises AttestationError.
    """

    path: str
    read: Read


def own(document: bytes, spki: bytes, nonce: bytes, host: str, now: datetime) -> HardwareEvidence:
    """Reads the document of a Milkglass server."""
    return HardwareEvidence.parse(document)


def tinfoil(document: bytes, spki: bytes, nonce: bytes, host: str, now: datetime) -> HardwareEvidence:
    """Reads Tinfoil's document."""
    fields = _object(document)
    hardware_kind = TINFOIL.get(str(fields.get("format")))
    if hardware_kind is None:
        raise AttestationError("kind", f"Tinfoil's format {str(fields.get('format'))[:80]!r} is not supported")
    try:
        packed = base64.b64decode(str(fields.get("body", "")), validate=True)
        unpacker = zlib.decompressobj(wbits=31)
        raw = unpacker.decompress(packed, MAX_UNPACKED)
    except (ValueError, zlib.error) as error:
        raise AttestationError("evidence", f"Tinfoil's body cannot be read ({type(error).__name__})") from None
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise AttestationError("size", f"Tinfoil's body has more than {MAX_UNPACKED:,} bytes, or is cut off")
    return HardwareEvidence(hardware_kind, raw, {}, "tinfoil", spki, recorded=f"{now:%Y-%m-%dT%H:%M:%SZ}")


def aci(document: bytes, spki: bytes, nonce: bytes, host: str, now: datetime) -> HardwareEvidence:
    """Reads a report of ACI. Whether its keyset lists the connection's key is checked with all the rest."""
    fields = _object(document)
    report, version = fields.get("attestation"), fields.get("api_version")
    if version != "aci/1" or not isinstance(report, dict):
        raise AttestationError("version", f"this is no report of aci/1 but of {str(version)[:40]!r}")
    keyset, evidence = report.get("workload_keyset"), report.get("evidence")
    hardware_kind = ACI.get(str(report.get("tee_type")))
    if hardware_kind is None or not isinstance(keyset, dict) or not isinstance(evidence, dict):
        raise AttestationError("kind", f"the TEE {str(report.get('tee_type'))[:40]!r} is not supported")
    try:
        raw = bytes.fromhex(str(evidence["quote"]).removeprefix("0x"))
    except (KeyError, ValueError):
        raise AttestationError("evidence", "the report of ACI has no quote in hex") from None
    return HardwareEvidence(hardware_kind, raw, {}, "aci", spki, nonce, keyset=canonical(keyset), host=host,
                            recorded=f"{now:%Y-%m-%dT%H:%M:%SZ}")  # fmt: skip


def _object(document: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise AttestationError("evidence", f"this is no evidence ({type(error).__name__})") from None
    if not isinstance(fields, dict):
        raise AttestationError("evidence", "this is no evidence: no JSON object")
    return fields


PROVIDERS: Mapping[str, Provider] = {
    "milkglass": Provider(PATH + "?nonce={nonce}", own),
    "tinfoil": Provider("/.well-known/tinfoil-attestation", tinfoil),
    "aci": Provider("/v1/aci/attestation?nonce={nonce}", aci),
}


def read_evidence(
    provider: str, document: bytes, spki: bytes, nonce: bytes, host: str, now: datetime
) -> HardwareEvidence:
    """Reads a document that came over a connection.

    Args:
        provider: the form that is asked for: a peer does not choose what binds its evidence.

    Raises:
        AttestationError: it is no evidence, or of another form.
    """
    hardware = PROVIDERS[provider].read(document, spki, nonce, host, now)
    require_form(hardware, provider)
    return hardware


def require_form(hardware: HardwareEvidence, provider: str, accepts_unbound: bool = False) -> None:
    """Raises AttestationError for evidence of another form than the provider's.

    Args:
        accepts_unbound: whether evidence that nothing binds to a connection may be looked at, as a recording.
    """
    if hardware.form != provider and not (hardware.form == "none" and accepts_unbound):
        raise AttestationError("form", f"the evidence has the form {hardware.form!r}, and {provider!r} is asked for")
