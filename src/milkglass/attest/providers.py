"""Reads evidence in the formats in which servers give it: Milkglass's document, Tinfoil's, and the report of ACI.

    milkglass  the document that evidence.py parses, asked for with a nonce
    tinfoil    {"format": URL, "body": BASE64 of gzip of a report}; the first half of the report data is SHA-256 of the
               SubjectPublicKeyInfo (SPKI) of the server's certificate; there is no nonce (tinfoilsh/tinfoil-python,
               src/tinfoil/attestation)
    aci        Attested Confidential Inference, aci/1 (Dstack-TEE/private-ai-gateway, spec/aci.md, sections 3 and 4):
               the report data sign a keyset, which lists the SPKI of each name (aci.py)

ACI's event log and source provenance are not read: the policy's registers decide what may run. ACI's receipts are not
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

from milkglass.attest.aci import canonical_json
from milkglass.attest.claims import HardwareKind
from milkglass.attest.evidence import HardwareEvidence
from milkglass.errors import AttestationError

MAX_UNPACKED_BYTES = 64 << 10
TINFOIL_KINDS: Mapping[str, HardwareKind] = {
    "https://tinfoil.sh/predicate/sev-snp-guest/v2": "sev-snp",
    "https://tinfoil.sh/predicate/tdx-guest/v2": "tdx",
}
ACI_KINDS: Mapping[str, HardwareKind] = {"tdx": "tdx", "sev_snp": "sev-snp"}

EVIDENCE_PATH = "/.well-known/milkglass-attestation"  # where a Milkglass server gives its evidence

EvidenceReader = Callable[[bytes, bytes, bytes, str, datetime], HardwareEvidence]


@dataclass(frozen=True)
class Provider:
    """Says how servers of one kind give evidence.

    Attributes:
        path: the path and the query of a request for evidence; {nonce} stands for the nonce in hex.
        read: reads the evidence. It takes the document, SHA-256 of the connection's SPKI, the nonce, the server's name
            and the time, and raises AttestationError.
    """

    path: str
    read: EvidenceReader


def read_milkglass(document: bytes, spki_digest: bytes, nonce: bytes, host: str, now: datetime) -> HardwareEvidence:
    """Reads the document of a Milkglass server. Raises AttestationError if it is not one."""
    return HardwareEvidence.parse(document)


def read_tinfoil(document: bytes, spki_digest: bytes, nonce: bytes, host: str, now: datetime) -> HardwareEvidence:
    """Reads Tinfoil's document, whose evidence is bound to the connection's key and to no nonce.

    Raises:
        AttestationError: the document is no JSON object, its format is not supported, or its body cannot be read or is
            too long.
    """
    fields = _parse_object(document)
    hardware_kind = TINFOIL_KINDS.get(str(fields.get("format")))
    if hardware_kind is None:
        raise AttestationError("kind", f"Tinfoil's format {str(fields.get('format'))[:80]!r} is not supported")
    try:
        packed = base64.b64decode(str(fields.get("body", "")), validate=True)
        unpacker = zlib.decompressobj(wbits=31)
        raw = unpacker.decompress(packed, MAX_UNPACKED_BYTES)
    except (ValueError, zlib.error) as error:
        raise AttestationError("evidence", f"Tinfoil's body cannot be read ({type(error).__name__})") from None
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise AttestationError("size", f"Tinfoil's body has more than {MAX_UNPACKED_BYTES:,} bytes, or is cut off")
    return HardwareEvidence(hardware_kind, raw, {}, "tinfoil", spki_digest, recorded=f"{now:%Y-%m-%dT%H:%M:%SZ}")


def read_aci(document: bytes, spki_digest: bytes, nonce: bytes, host: str, now: datetime) -> HardwareEvidence:
    """Reads a report of ACI. `evidence.verify` checks whether its keyset lists the connection's key.

    Raises:
        AttestationError: the document is no report of aci/1, its TEE is not supported, or it has no quote in hex.
    """
    fields = _parse_object(document)
    report, version = fields.get("attestation"), fields.get("api_version")
    if version != "aci/1" or not isinstance(report, dict):
        raise AttestationError("version", f"this is no report of aci/1 but of {str(version)[:40]!r}")
    keyset, evidence = report.get("workload_keyset"), report.get("evidence")
    hardware_kind = ACI_KINDS.get(str(report.get("tee_type")))
    if hardware_kind is None or not isinstance(keyset, dict) or not isinstance(evidence, dict):
        raise AttestationError("kind", f"the TEE {str(report.get('tee_type'))[:40]!r} is not supported")
    try:
        raw = bytes.fromhex(str(evidence["quote"]).removeprefix("0x"))
    except (KeyError, ValueError):
        raise AttestationError("evidence", "the report of ACI has no quote in hex") from None
    return HardwareEvidence(hardware_kind, raw, {}, "aci", spki_digest, nonce, keyset=canonical_json(keyset), host=host,
                            recorded=f"{now:%Y-%m-%dT%H:%M:%SZ}")  # fmt: skip


def _parse_object(document: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises AttestationError."""
    try:
        fields = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise AttestationError("evidence", f"this is no evidence ({type(error).__name__})") from None
    if not isinstance(fields, dict):
        raise AttestationError("evidence", "this is no evidence: no JSON object")
    return fields


PROVIDERS: Mapping[str, Provider] = {
    "milkglass": Provider(EVIDENCE_PATH + "?nonce={nonce}", read_milkglass),
    "tinfoil": Provider("/.well-known/tinfoil-attestation", read_tinfoil),
    "aci": Provider("/v1/aci/attestation?nonce={nonce}", read_aci),
}


def read_evidence(
    provider: str, document: bytes, spki_digest: bytes, nonce: bytes, host: str, now: datetime
) -> HardwareEvidence:
    """Reads a document that came over a connection.

    Args:
        provider: the form that is asked for, a name in `PROVIDERS`. A peer must not choose what binds its evidence.
        document: what the server answered.
        spki_digest: SHA-256 of the SPKI of the connection's certificate.
        nonce: the nonce with which the client asked.
        host: the name by which the server was asked.
        now: the time at which it answered.

    Raises:
        AttestationError: the document is no evidence, or evidence of another form.
    """
    evidence = PROVIDERS[provider].read(document, spki_digest, nonce, host, now)
    require_form(evidence, provider)
    return evidence


def require_form(evidence: HardwareEvidence, provider: str, accepts_unbound: bool = False) -> None:
    """Raises AttestationError for evidence of another form than the provider's.

    Args:
        accepts_unbound: whether evidence that nothing binds to a connection is accepted, too.
    """
    if evidence.form != provider and not (evidence.form == "none" and accepts_unbound):
        raise AttestationError("form", f"the evidence has the form {evidence.form!r}, and {provider!r} is asked for")
