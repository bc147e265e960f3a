"""Parses and verifies evidence: one JSON document, which holds all that its verification needs besides the time.

    {"milkglass_evidence": 1, "kind": "sev-snp", "evidence": BASE64, "collateral": {NAME: BASE64}, "form": "milkglass",
     "spki": HEX, "nonce": HEX, "gpus": [{"evidence": BASE64, "certificate": BASE64}],
     "references": [BASE64], "gpu_revocation": [BASE64], "sealing": BASE64, "keyset": BASE64, "host": NAME,
     "recorded": "2026-11-26T12:00:00Z"}

Milkglass's server binds its TLS key, the client's nonce and the GPUs' evidence into the report data ("|" joins bytes):

    report_data = SHA-512("milkglass attest 1" | SHA-256 of the SPKI | nonce | SHA-256 of the GPUs' evidence
                          | SHA-256 of the sealing key)
    nonce of each GPU = SHA-256("milkglass gpu 1" | SHA-256 of the SPKI | nonce)
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, Self, get_args

from milkglass.attest import aci, intel, nvidia, sev_snp
from milkglass.attest.claims import (
    Claim,
    HardwareKind,
    VerifiedGpu,
    VerifiedMachine,
    proven_claim,
    unchecked_claim,
    weak_claim,
)
from milkglass.errors import AttestationError

BindingForm = Literal["milkglass", "tinfoil", "aci", "none"]
MAX_DOCUMENT_BYTES, NONCE_BYTES = 2 << 20, 32
# The most entries of a document's lists, each of which costs time
MAX_ENTRIES = {"gpus": 16, "references": 16, "gpu_revocation": 64, "collateral": 32}
SOFTWARE_PREFIX = b"milkglass software evidence 1"  # begins the software stand-in's report; the report data follow it


@dataclass(frozen=True)
class HardwareEvidence:
    """Holds the evidence of a machine and its GPUs, and the collateral that came with it.

    Attributes:
        kind: the technology.
        raw: the report or the quote.
        collateral: by name, what the maker of the processor signed beside the report.
        form: how the report data are made. "none": nothing binds the evidence to a connection.
        spki_digest: SHA-256 of the SPKI of the server's certificate; empty if the form has none.
        nonce: the client's nonce; empty if the form has none.
        gpus: for each GPU its evidence and its certificates (PEM).
        references: NVIDIA's manifests of reference values (RIM).
        gpu_revocation: NVIDIA's revocation lists and OCSP responses.
        sealing_key: the public key to which files are sealed (sealing.py); empty if the server takes none.
        keyset: ACI's canonical keyset that the hardware signed; empty in other forms.
        host: the host name under which an ACI server was asked; "" in other forms.
        recorded: when the evidence was recorded, such as "2026-11-26T12:00:00Z"; "" if that is not known.
    """

    kind: HardwareKind
    raw: bytes
    collateral: Mapping[str, bytes] = field(default_factory=dict)
    form: BindingForm = "none"
    spki_digest: bytes = b""
    nonce: bytes = b""
    gpus: tuple[tuple[bytes, bytes], ...] = ()
    references: tuple[bytes, ...] = ()
    gpu_revocation: tuple[bytes, ...] = ()
    sealing_key: bytes = b""
    keyset: bytes = b""
    host: str = ""
    recorded: str = ""

    @classmethod
    def parse(cls, document: bytes) -> Self:
        """Parses evidence from its JSON document. Raises AttestationError if the document is not valid."""
        if len(document) > MAX_DOCUMENT_BYTES:
            raise AttestationError(
                "size", f"evidence has {len(document):,} bytes, at most {MAX_DOCUMENT_BYTES:,} are read"
            )
        try:
            raw = json.loads(document)
            if raw["milkglass_evidence"] != 1:
                raise AttestationError("version", "the evidence has another version than 1")
            lists = {name: list(raw.get(name, [])) for name in MAX_ENTRIES}
            if long_list := next((name for name, items in lists.items() if len(items) > MAX_ENTRIES[name]), None):
                raise AttestationError("size", f"evidence with more than {MAX_ENTRIES[long_list]} {long_list}")
            if raw["kind"] not in get_args(HardwareKind) or raw.get("form", "none") not in get_args(BindingForm):
                raise AttestationError("kind", "the evidence is of an unknown kind or form")
            return cls(
                raw["kind"], _from_base64(raw["evidence"]),
                {str(name): _from_base64(value) for name, value in raw.get("collateral", {}).items()},
                raw.get("form", "none"), bytes.fromhex(raw.get("spki", "")), bytes.fromhex(raw.get("nonce", "")),
                tuple(nvidia.decode_gpu_evidence(gpu) for gpu in lists["gpus"]),
                tuple(map(_from_base64, lists["references"])), tuple(map(_from_base64, lists["gpu_revocation"])),
                _from_base64(raw.get("sealing", "")), _from_base64(raw.get("keyset", "")),
                str(raw.get("host", "")), _normalise_time(raw.get("recorded", "")),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise AttestationError("evidence", f"this is no evidence ({type(error).__name__})") from None

    def document(self) -> bytes:
        """Returns the evidence as a document."""
        gpus = [{"evidence": _to_base64(raw), "certificate": _to_base64(pem)} for raw, pem in self.gpus]
        return json.dumps({
            "milkglass_evidence": 1, "kind": self.kind, "evidence": _to_base64(self.raw), "form": self.form,
            "collateral": {name: _to_base64(value) for name, value in self.collateral.items()},
            "spki": self.spki_digest.hex(), "nonce": self.nonce.hex(), "gpus": gpus,
            "references": [*map(_to_base64, self.references)],
            "gpu_revocation": [*map(_to_base64, self.gpu_revocation)],
            "sealing": _to_base64(self.sealing_key), "keyset": _to_base64(self.keyset), "host": self.host,
            "recorded": self.recorded,
        }, indent=1).encode()  # fmt: skip


def _from_base64(text: str) -> bytes:
    """Decodes base64. Raises AttestationError."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise AttestationError("evidence", "a part of the evidence is no base64") from None


def _normalise_time(recorded: str) -> str:
    """Returns a time in UTC as the documents write it, or "" for "". Raises AttestationError for anything else."""
    return recorded and f"{parse_time(recorded):%Y-%m-%dT%H:%M:%SZ}"


def _to_base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def report_data(spki_digest: bytes, nonce: bytes, gpu_digest: bytes, sealing_key: bytes) -> bytes:
    """Returns the 64 bytes that our server's hardware signs.

    Args:
        spki_digest: SHA-256 of the SPKI of the server's certificate.
        nonce: the client's nonce.
        gpu_digest: SHA-256 over the GPUs' evidence (nvidia.gpu_evidence_digest).
        sealing_key: the key to which files are sealed; empty if there is none.
    """
    sealing_digest = hashlib.sha256(sealing_key).digest()
    return hashlib.sha512(b"milkglass attest 1" + spki_digest + nonce + gpu_digest + sealing_digest).digest()


def gpu_nonce(spki_digest: bytes, nonce: bytes) -> bytes:
    """Returns the 32-byte nonce to which each GPU of Milkglass's server answers."""
    return hashlib.sha256(b"milkglass gpu 1" + spki_digest + nonce).digest()


def verify(
    evidence: HardwareEvidence, now: datetime, spki_digest: bytes | None = None, nonce: bytes | None = None
) -> tuple[VerifiedMachine, list[VerifiedGpu], list[Claim]]:
    """Verifies evidence as a whole.

    Args:
        evidence: the evidence, with all collateral that is known.
        now: the time at which certificates and collateral must be valid, with a zone.
        spki_digest: SHA-256 of the SPKI of the connection's certificate. None: the evidence is a recording, and the
            digest in it is taken.
        nonce: the nonce with which the client asked. None: the evidence is a recording, and the nonce in it is taken.

    Returns:
        The machine, its GPUs, and claims on what binds them to the connection.

    Raises:
        AttestationError: the evidence does not verify. The error names the first fault.
    """
    is_live = spki_digest is not None
    if is_live and (nonce is None or len(nonce) != NONCE_BYTES):
        raise AttestationError("nonce", f"a nonce of {NONCE_BYTES} bytes is required")
    _require_form(evidence)
    key_digest = evidence.spki_digest if spki_digest is None else spki_digest
    requested_nonce = evidence.nonce if nonce is None else nonce
    if evidence.kind == "software":
        machine = _read_software_report(evidence.raw)
    elif evidence.kind == "sev-snp":
        machine = sev_snp.verify(evidence.raw, evidence.collateral, now)
    else:
        machine = intel.verify(evidence.raw, evidence.collateral, now)
        if machine.kind != evidence.kind:
            raise AttestationError("kind", f"the evidence says {evidence.kind}, and the quote is of {machine.kind}")
    expected_nonce = gpu_nonce(key_digest, requested_nonce) if evidence.form == "milkglass" else None
    gpus = [
        nvidia.verify(raw, pem, expected_nonce, evidence.references, evidence.gpu_revocation, now)
        for raw, pem in evidence.gpus
    ]
    nvidia.require_distinct(gpus)
    return machine, gpus, _binding_claims(evidence, machine, key_digest, requested_nonce, is_live, now)


def _require_form(evidence: HardwareEvidence) -> None:
    """Raises AttestationError for a kind or part that the evidence's form excludes, or a GPU that is given twice."""
    if evidence.kind == "software" and evidence.form != "milkglass":
        raise AttestationError("kind", "the software stand-in answers in our own form alone")
    if evidence.form in ("tinfoil", "aci") and (evidence.gpus or evidence.sealing_key):
        raise AttestationError("binding", f"the form {evidence.form} binds no GPUs and no sealing key")
    if len({raw for raw, _ in evidence.gpus}) < len(evidence.gpus):
        raise AttestationError("gpu", "one GPU's evidence is given twice")
    if evidence.form == "none" and evidence.sealing_key:
        raise AttestationError("binding", "nothing binds the sealing key")


def _binding_claims(
    evidence: HardwareEvidence, machine: VerifiedMachine, spki_digest: bytes, nonce: bytes, is_live: bool, now: datetime
) -> list[Claim]:
    """Returns claims on what binds evidence to a connection. Raises AttestationError if it is bound to another one."""
    key_name, nonce_name = (
        ("the connection's key", "our nonce") if is_live else ("the recorded key", "the recorded nonce")
    )
    fresh_claim = (
        proven_claim("fresh", "it answered our nonce")
        if is_live
        else unchecked_claim(
            "fresh", "nonce and key are the recording's: only its maker knows whether they were new, and whose"
        )
    )
    if evidence.form == "milkglass":
        digest = nvidia.gpu_evidence_digest(evidence.gpus)
        if len(spki_digest) != 32 or len(nonce) != NONCE_BYTES:
            raise AttestationError("binding", "the evidence names no key or no nonce")
        if not hmac.compare_digest(machine.report_data, report_data(spki_digest, nonce, digest, evidence.sealing_key)):
            raise AttestationError("binding", f"the hardware did not sign {key_name}, this nonce and these GPUs")
        if evidence.kind == "software":
            return [Claim("binding", "none", "operator states", f"{key_name} and {nonce_name} are in the answer")]
        return [proven_claim("binding", f"{key_name} belongs to the measured software"), fresh_claim]
    text = "no nonce of ours: the evidence may be as old as the machine's boot, and be shown again by others"
    stale_claim = weak_claim("fresh", text, "not-fresh", "not checked")
    if evidence.form == "tinfoil":
        if len(spki_digest) != 32 or not hmac.compare_digest(machine.report_data[:32], spki_digest):
            raise AttestationError("binding", f"the hardware did not sign {key_name}")
        return [proven_claim("binding", f"{key_name} belongs to the measured software"), stale_claim]
    if evidence.form == "aci":
        aci.require_key_listed(evidence.keyset, spki_digest, evidence.host, now)
        if not hmac.compare_digest(machine.report_data, aci.signed_report_data(evidence.keyset, nonce)):
            raise AttestationError("binding", f"the hardware did not sign a keyset with {key_name} and this nonce")
        return [proven_claim("binding", f"{key_name} is in the keyset of the measured software"), fresh_claim]
    text = "nothing binds the evidence to a connection: another machine could show it"
    return [weak_claim("binding", text, "unbound", "not checked", undoes_proof=True), stale_claim]


def _read_software_report(raw: bytes) -> VerifiedMachine:
    """Reads the software stand-in's report, which no hardware signs. Raises AttestationError for anything else."""
    if len(raw) != len(SOFTWARE_PREFIX) + 64 or not raw.startswith(SOFTWARE_PREFIX):
        raise AttestationError("evidence", "this is no evidence of the software stand-in")
    claim = unchecked_claim("processor", "software answered: nothing proves what runs there, or where")
    return VerifiedMachine("software", "", raw[len(SOFTWARE_PREFIX) :], {}, claims=(claim,))


def parse_time(text: str) -> datetime:
    """Parses a time in ISO 8601, such as "2025-06-25"; without a zone it is in UTC. Raises AttestationError."""
    hint = "write 2025-06-25 or 2025-06-25T12:00:00Z"
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise AttestationError("time", f"{text!r} is no time", hint) from None
    if not 1970 <= time.year < 9999:  # so that no clock overflows in any zone
        raise AttestationError("time", f"{text!r} is not between 1970 and 9998", hint)
    return time if time.tzinfo else time.replace(tzinfo=UTC)
