"""What evidence shows, claim by claim, and who vouches for each.

The states are those of EAR (draft-ietf-rats-ear, AR4SI): "affirming", "warning", "contraindicated", and "none" for what
nobody checked. A claim that weakens the proof has the name by which a policy accepts it. Without such an acceptance the
evidence is refused; with it the claim stays in every verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

State = Literal["affirming", "warning", "contraindicated", "none"]
Source = Literal["hardware proves", "vendor states", "operator states", "not checked"]
Kind = Literal["sev-snp", "tdx", "sgx", "software"]

FORGEABLE = "milan"  # the weakness of a processor whose reports anyone can make
WRITABLE = "debug"  # the weakness of a machine whose memory its host reads and writes
HOLDS, REFUSED = "the policy holds", "REFUSED"
HOLDS_FOR_SOFTWARE = "the policy takes software: NOT ATTESTED"
ALL_SEEN = "What an operator of the host still sees: everything, also the text. No hardware is involved."
UNDONE = (
    "What an operator of the host sees: assume everything, also the text. The policy accepts what undoes the proof: {}."
)
NOTHING_PROTECTS = "THE OPERATOR CAN READ EVERYTHING"
NOT_SHOWN = "What an operator of the host sees: assume everything, also the text, since the policy does not hold."
NOT_ATTESTED = "NOT ATTESTED: software answered, and nothing proves what runs there"
RECORDED_NOTE = "this verifier was tried on recorded evidence only, and never on live confidential hardware"
STILL_SEEN = (
    "What an operator of the host still sees: who asks and when, the sizes and times of requests and answers, and page "
    "faults and traffic to the GPU. What breaks it: probes on the memory bus (the attacks TEE.fail, Battering RAM), a "
    "key that leaves a genuine machine, and whatever the measured software itself gives away."
)


@dataclass(frozen=True)
class Claim:
    """A line of a verdict.

    Attributes:
        name: what it is about, such as "debug".
        state: how good it is.
        source: who vouches for it.
        text: the line for people.
        weakness: the name by which a policy accepts it; "" if nothing needs to be accepted.
    """

    name: str
    state: State
    source: Source
    text: str
    weakness: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.text}"


def proven(name: str, text: str) -> Claim:
    return Claim(name, "affirming", "hardware proves", text)


def weak(name: str, text: str, weakness: str, source: Source = "hardware proves", bad: bool = False) -> Claim:
    """Returns a claim that a policy must accept by name. `bad`: it undoes the proof, and does not only weaken it."""
    return Claim(name, "contraindicated" if bad else "warning", source, text, weakness)


def unchecked(name: str, text: str) -> Claim:
    return Claim(name, "none", "not checked", text)


def _unproven(claim: Claim) -> Claim:
    """Returns the claim as the word of whoever runs the machine, if it says that the hardware proves it."""
    if claim.source != "hardware proves":
        return claim
    return replace(claim, source="operator states", state="none" if claim.state == "affirming" else claim.state)


@dataclass(frozen=True)
class VerifiedMachine:
    """A processor's evidence whose signatures and certificates are good.

    Attributes:
        kind: of the technology.
        product: the processor's generation, such as "Genoa"; "" if the evidence does not say.
        report_data: 64 bytes that the measured software chose.
        image: what was measured, in hex, by name ("launch"; "mrtd", "rtmr0" to "rtmr3"; "mrenclave").
        machine: the number of this one processor in hex; "" if the evidence has none.
        tcb: versions of the firmware, by component.
        launch_tcb: AMD's versions when the guest was started.
        status: Intel's word for the platform, such as "UpToDate"; "" elsewhere.
        eval_data_number: the number of Intel's TCB data that judged the platform; a larger number is newer.
        claims: lines of the verdict.
    """

    kind: Kind
    product: str
    report_data: bytes
    image: Mapping[str, str]
    machine: str = ""
    tcb: Mapping[str, int] = field(default_factory=dict)
    status: str = ""
    claims: tuple[Claim, ...] = ()
    launch_tcb: Mapping[str, int] = field(default_factory=dict)
    eval_data_number: int = 0


@dataclass(frozen=True)
class VerifiedGpu:
    """A GPU's evidence whose signature and certificates are good.

    Attributes:
        architecture: such as "HOPPER", as NVIDIA certified it.
        device: SHA-256 of the public key of its attestation certificate, in hex.
        nonce: 32 bytes to which it answered.
        driver, vbios: versions.
        mode: as NVIDIA's evidence names it: "spt" (one GPU, its memory protected), "mpt", "ppcie" (several, whose links
            are plain text), or "" if it states none.
        claims: lines of the verdict.
    """

    architecture: str
    device: str
    nonce: bytes
    driver: str
    vbios: str
    mode: str
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What a policy says of evidence.

    Where software answered, or a processor whose reports can be forged, or a machine that its host may debug, the
    hardware proves no claim: neither the machine's, nor those of a GPU, which only the machine's measured software
    binds to what runs.

    Attributes:
        claims: in the order in which they are shown.
        refused: why the policy does not hold, each by its name and in words; empty if it holds.
        accepted: weaknesses that are there and that the policy accepts, with the policy's reasons.
        attested: whether hardware answered, and no software in its place.
    """

    claims: tuple[Claim, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    accepted: Mapping[str, str] = field(default_factory=dict)
    attested: bool = True

    def __post_init__(self) -> None:
        if not self.attested or any(claim.weakness in (FORGEABLE, WRITABLE) for claim in self.claims):
            object.__setattr__(self, "claims", tuple(map(_unproven, self.claims)))

    @property
    def holds(self) -> bool:
        return not self.refused

    @property
    def undone_by(self) -> tuple[str, ...]:
        """Returns the weaknesses that undo the proof, whether or not the policy accepts them."""
        return tuple(claim.weakness for claim in self.claims if claim.state == "contraindicated" and claim.weakness)

    def lines(self) -> list[str]:
        """Returns the verdict for people."""
        width = max(len(claim.source) for claim in self.claims) if self.claims else 0
        lines = [f"  {claim.source:{width}}  {'WEAK: ' * bool(claim.weakness)}{claim.text}" for claim in self.claims]
        lines += [f"  accepted by the policy: {name} ({reason})" for name, reason in self.accepted.items()]
        lines += [f"  {REFUSED}: {reason}" for reason in self.refused.values()]
        holds = HOLDS if self.attested else HOLDS_FOR_SOFTWARE
        if self.accepted:
            holds += f", and accepts what is weak: {', '.join(self.accepted)}"
        verb = "does" if len(self.refused) == 1 else "do"
        head = holds if self.holds else f"{REFUSED}: {len(self.refused)} of the policy's conditions {verb} not hold"
        warnings = [] if self.attested else [NOT_ATTESTED]
        if self.holds and self.undone_by:
            warnings.append(f"{NOTHING_PROTECTS}: the policy accepts {', '.join(self.undone_by)}")
        return [*warnings, head, *lines, self.still_seen, RECORDED_NOTE]

    @property
    def still_seen(self) -> str:
        """Returns what an operator of the host sees."""
        if not self.holds:
            return NOT_SHOWN
        if not self.attested:
            return ALL_SEEN
        return UNDONE.format(", ".join(self.undone_by)) if self.undone_by else STILL_SEEN

    def to_json(self) -> dict[str, Any]:
        states = {claim.state for claim in self.claims}
        status = next((state for state in ("contraindicated", "warning", "affirming") if state in states), "none")
        return {
            "eat_profile": "tag:milkglass,2026:verdict-1",
            "attested": self.attested and self.holds and bool(self.claims) and not self.undone_by,
            "holds": self.holds,
            "ear.status": status if self.holds else "contraindicated",
            "claims": [vars(claim) for claim in self.claims],
            "refused": dict(self.refused),
            "accepted": dict(self.accepted),
            "still_seen": self.still_seen,
            "tried": RECORDED_NOTE,
        }
