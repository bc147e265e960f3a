"""Evidence as it is recorded and exchanged: one JSON document with all that a verifier needs, but the time.

    {"milkglass_evidence": 1, "kind": "sev-snp", "evidence": BASE64, "collateral": {NAME: BASE64}, "form": "milkglass",
     "spki": HEX, "nonce": HEX, "gpus": [{"evidence": BASE64, "certificate": BASE64}],
     "references": [BASE64], "gpu_revocation": [BASE64], "sealing": BASE64, "keyset": BASE64, "host": NAME,
     "recorded": "2026-11-26T12:00:00Z"}

Our own server binds its TLS key, our nonce and the GPUs' evidence into the report data:

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
from milkglass.attest.claims import Claim, Kind, VerifiedGpu, VerifiedMachine, proven, unchecked, weak
from milkglass.errors import AttestationError

Form = Literal["milkglass", "tinfoil", "aci", "none"]
MAX_DOCUMENT, NONCE = 2 << 20, 32
MAX_LISTED = {
    "gpus": 16,
    "references": 16,
    "gpu_revocation": 64,
    "collateral": 32,
}  # entries of a document, each of which costs time
SOFTWARE = b"milkglass software evidence 1"


@dataclass(frozen=True)
class HardwareEvidence:
    """Evidence of a machine and its GPUs.

    Attributes:
        kind: of the technology.
        raw: the report or the quote.
        collateral: what the maker signed beside it, by name.
        form: how the report data are made. "none": nothing binds the evidence to a connection.
        spki: SHA-256 of the public key of the server's certificate; empty if the form has none.
        nonce: of the client; empty if the form has none.
        gpus: evidence and certificates of each.
        references: manifests of reference values.
        gpu_revocation: NVIDIA's lists and answers on revoked keys.
        sealing: the key to which files are sealed (sealing.py); empty if the server takes none.
        keyset: of ACI, the canonical keyset that the hardware signed.
        host: of ACI, the name by which the server was asked.
        recorded: when it was recorded.
    """

    kind: Kind
    raw: bytes
    collateral: Mapping[str, bytes] = field(default_factory=dict)
    form: Form = "none"
    spki: bytes = b""
    nonce: bytes = b""
    gpus: tuple[tuple[bytes, bytes], ...] = ()
    references: tuple[bytes, ...] = ()
    gpu_revocation: tuple[bytes, ...] = ()
    sealing: bytes = b""
    keyset: bytes = b""
    host: str = ""
    recorded: str = ""

    @classmethod
    def parse(cls, document: bytes) -> Self:
        """Parses a document. Raises AttestationError for anything else."""
        if len(document) > MAX_DOCUMENT:
            raise AttestationError("size", f"evidence has {len(document):,} bytes, at most {MAX_DOCUMENT:,} are read")
        try:
            raw = json.loads(document)
            if raw["milkglass_evidence"] != 1:
                raise AttestationError("version", "the evidence has another version than 1")
            lists = {name: list(raw.get(name, [])) for name in MAX_LISTED}
            if too_many := next((name for name, items in lists.items() if len(items) > MAX_LISTED[name]), None):
                raise AttestationError("size", f"evidence with more than {MAX_LISTED[too_many]} {too_many}")
            if raw["kind"] not in get_args(Kind) or raw.get("form", "none") not in get_args(Form):
                raise AttestationError("kind", "the evidence is of an unknown kind or form")
            return cls(
                raw["kind"], _bytes(raw["evidence"]),
                {str(name): _bytes(value) for name, value in raw.get("collateral", {}).items()},
                raw.get("form", "none"), bytes.fromhex(raw.get("spki", "")), bytes.fromhex(raw.get("nonce", "")),
                tuple(nvidia.decoded(gpu) for gpu in lists["gpus"]),
                tuple(map(_bytes, lists["references"])), tuple(map(_bytes, lists["gpu_revocation"])),
                _bytes(raw.get("sealing", "")), _bytes(raw.get("keyset", "")),
                str(raw.get("host", "")), _time_text(raw.get("recorded", "")),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise AttestationError("evidence", f"this is no evidence ({type(error).__name__})") from None

    def document(self) -> bytes:
        """Returns the evidence as a document."""
        gpus = [{"evidence": _text(raw), "certificate": _text(pem)} for raw, pem in self.gpus]
        return json.dumps({
            "milkglass_evidence": 1, "kind": self.kind, "evidence": _text(self.raw), "form": self.form,
            "collateral": {name: _text(value) for name, value in self.collateral.items()},
            "spki": self.spki.hex(), "nonce": self.nonce.hex(), "gpus": gpus,
            "references": [*map(_text, self.references)], "gpu_revocation": [*map(_text, self.gpu_revocation)],
            "sealing": _text(self.sealing), "keyset": _text(self.keyset), "host": self.host, "recorded": self.recorded,
        }, indent=1).encode()  # fmt: skip


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise AttestationError("evidence", "a part of the evidence is no base64") from None


def _time_text(recorded: str) -> str:
    """Returns when evidence was recorded, as `time_of` reads it. Raises AttestationError."""
    return recorded and f"{time_of(recorded):%Y-%m-%dT%H:%M:%SZ}"


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def report_data(spki: bytes, nonce: bytes, gpus: bytes, sealing: bytes) -> bytes:
    """Returns the 64 bytes that our server's hardware signs.

    Args:
        gpus: SHA-256 over the GPUs' evidence.
        sealing: the key to which files are sealed; empty if there is none.
    """
    return hashlib.sha512(b"milkglass attest 1" + spki + nonce + gpus + hashlib.sha256(sealing).digest()).digest()


def gpu_nonce(spki: bytes, nonce: bytes) -> bytes:
    """Returns the nonce to which each GPU of our server answers."""
    return hashlib.sha256(b"milkglass gpu 1" + spki + nonce).digest()


def verify(
    evidence: HardwareEvidence, now: datetime, spki: bytes | None = None, nonce: bytes | None = None
) -> tuple[VerifiedMachine, list[VerifiedGpu], list[Claim]]:
    """Verifies evidence as a whole.

    Args:
        now: the time, with a zone.
        spki: SHA-256 of the key of the connection. None: of a recording; the evidence's own counts.
        nonce: what the client asked with. None: of a recording; the evidence's own counts.

    Returns:
        The machine, its GPUs, and what binds them to the connection.

    Raises:
        AttestationError: with the first fault.
    """
    live = spki is not None
    if live and (nonce is None or len(nonce) != NONCE):
        raise AttestationError("nonce", f"a nonce of {NONCE} bytes is required")
    _require_form(evidence)
    key, requested_nonce = (evidence.spki if spki is None else spki), (evidence.nonce if nonce is None else nonce)
    if evidence.kind == "software":
        machine = _software(evidence.raw)
    elif evidence.kind == "sev-snp":
        machine = sev_snp.verify(evidence.raw, evidence.collateral, now)
    else:
        machine = intel.verify(evidence.raw, evidence.collateral, now)
        if machine.kind != evidence.kind:
            raise AttestationError("kind", f"the evidence says {evidence.kind}, and the quote is of {machine.kind}")
    expected = gpu_nonce(key, requested_nonce) if evidence.form == "milkglass" else None
    gpus = [
        nvidia.verify(raw, pem, expected, evidence.references, evidence.gpu_revocation, now)
        for raw, pem in evidence.gpus
    ]
    nvidia.require_distinct(gpus)
    return machine, gpus, _binding(evidence, machine, key, requested_nonce, live, now)


def _require_form(evidence: HardwareEvidence) -> None:
    """Raises AttestationError for parts that the evidence's form does not bind, or that no hardware signs."""
    if evidence.kind == "software" and evidence.form != "milkglass":
        raise AttestationError("kind", "the software stand-in answers in our own form alone")
    if evidence.form in ("tinfoil", "aci") and (evidence.gpus or evidence.sealing):
        raise AttestationError("binding", f"the form {evidence.form} binds no GPUs and no sealing key")
    if len({raw for raw, _ in evidence.gpus}) < len(evidence.gpus):
        raise AttestationError("gpu", "one GPU's evidence is given twice")
    if evidence.form == "none" and evidence.sealing:
        raise AttestationError("binding", "nothing binds the sealing key")


def _binding(
    evidence: HardwareEvidence, machine: VerifiedMachine, spki: bytes, nonce: bytes, live: bool, now: datetime
) -> list[Claim]:
    """Returns what binds the evidence to a connection. Raises AttestationError if it is bound to another one."""
    key_name, nonce_name = ("the connection's key", "our nonce") if live else ("the recorded key", "the recorded nonce")
    fresh = (
        proven("fresh", "it answered our nonce")
        if live
        else unchecked(
            "fresh", "nonce and key are the recording's: only its maker knows whether they were new, and whose"
        )
    )
    if evidence.form == "milkglass":
        digest = nvidia.digest(evidence.gpus)
        if len(spki) != 32 or len(nonce) != NONCE:
            raise AttestationError("binding", "the evidence names no key or no nonce")
        if not hmac.compare_digest(machine.report_data, report_data(spki, nonce, digest, evidence.sealing)):
            raise AttestationError("binding", f"the hardware did not sign {key_name}, this nonce and these GPUs")
        if evidence.kind == "software":
            return [Claim("binding", "none", "operator states", f"{key_name} and {nonce_name} are in the answer")]
        return [proven("binding", f"{key_name} belongs to the measured software"), fresh]
    text = "no nonce of ours: the evidence may be as old as the machine's boot, and be shown again by others"
    stale = weak("fresh", text, "not-fresh", "not checked")
    if evidence.form == "tinfoil":
        if len(spki) != 32 or not hmac.compare_digest(machine.report_data[:32], spki):
            raise AttestationError("binding", f"the hardware did not sign {key_name}")
        return [proven("binding", f"{key_name} belongs to the measured software"), stale]
    if evidence.form == "aci":
        aci.require_listed(evidence.keyset, spki, evidence.host, now)
        if not hmac.compare_digest(machine.report_data, aci.signed_report_data(evidence.keyset, nonce)):
            raise AttestationError("binding", f"the hardware did not sign a keyset with {key_name} and this nonce")
        return [proven("binding", f"{key_name} is in the keyset of the measured software"), fresh]
    text = "nothing binds the evidence to a connection: another machine could show it"
    return [weak("binding", text, "unbound", "not checked", bad=True), stale]


def _software(raw: bytes) -> VerifiedMachine:
    """Reads the software stand-in's report: the report data, in a form that no hardware signs."""
    if len(raw) != len(SOFTWARE) + 64 or not raw.startswith(SOFTWARE):
        raise AttestationError("evidence", "this is no evidence of the software stand-in")
    line = unchecked("processor", "software answered: nothing proves what runs there, or where")
    return VerifiedMachine("software", "", raw[len(SOFTWARE) :], {}, claims=(line,))


def time_of(text: str) -> datetime:
    """Returns a time such as "2025-06-25" or "2025-06-25T12:00:00Z". Raises AttestationError."""
    hint = "write 2025-06-25 or 2025-06-25T12:00:00Z"
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise AttestationError("time", f"{text!r} is no time", hint) from None
    if not 1970 <= time.year < 9999:  # so that no clock overflows in any zone
        raise AttestationError("time", f"{text!r} is not between 1970 and 9998", hint)
    return time if time.tzinfo else time.replace(tzinfo=UTC)
