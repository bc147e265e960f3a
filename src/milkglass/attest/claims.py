"""Says what evidence shows, claim by claim, and who vouches for each claim.

The states are the trustworthiness tiers of AR4SI (draft-ietf-rats-ar4si), as EAR (draft-ietf-rats-ear) names them:
"affirming", "warning", "contraindicated", and "none" for what nobody checked. A claim that weakens the proof has the
name by which a policy accepts it. Without such an acceptance the evidence is refused; with it the claim stays in every
verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

State = Literal["affirming", "warning", "contraindicated", "none"]
Source = Literal["hardware proves", "vendor states", "operator states", "not checked"]
HardwareKind = Literal["sev-snp", "tdx", "sgx", "software"]

FORGEABLE_WEAKNESS = "milan"  # the name of the weakness of a processor whose reports anyone can forge
DEBUG_WEAKNESS = "debug"  # the name of the weakness of a machine whose memory its host can read and write
HOLDS, REFUSED = "the policy holds", "REFUSED"
HOLDS_FOR_SOFTWARE = "the policy takes software: NOT ATTESTED"
SEEN_OF_SOFTWARE = "What an operator of the host still sees: everything, also the text. No hardware is involved."
SEEN_IF_UNDONE = (
    "What an operator of the host sees: assume everything, also the text. The policy accepts what undoes the proof: {}."
)
NOTHING_PROTECTS = "THE OPERATOR CAN READ EVERYTHING"
SEEN_IF_REFUSED = "What an operator of the host sees: assume everything, also the text, since the policy does not hold."
NOT_ATTESTED = "NOT ATTESTED: software answered, and nothing proves what runs there"
RECORDED_NOTE = "this verifier was tried on recorded evidence only, and never on live confidential hardware"
SEEN_IF_HOLDS = (
    "What an operator of the host still sees: who asks and when, the sizes and times of requests and answers, and page "
    "faults and traffic to the GPU. What breaks it: probes on the memory bus (the attacks TEE.fail, Battering RAM), a "
    "key that leaves a genuine machine, and whatever the measured software itself gives away."
)


@dataclass(frozen=True)
class Claim:
    """States one thing that a verdict says of a machine or a GPU.

    Attributes:
        name: the subject, such as "debug".
        state: the trustworthiness tier.
        source: who vouches for the claim.
        text: the claim in words.
        weakness: the name by which a policy accepts the claim; "" if nothing needs to be accepted.
    """

    name: str
    state: State
    source: Source
    text: str
    weakness: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.text}"


def proven_claim(name: str, text: str) -> Claim:
    """Returns a claim that the hardware proves."""
    return Claim(name, "affirming", "hardware proves", text)


def weak_claim(
    name: str, text: str, weakness: str, source: Source = "hardware proves", undoes_proof: bool = False
) -> Claim:
    """Returns a claim that a policy must accept by name.

    Args:
        weakness: that name.
        undoes_proof: whether the claim undoes the proof, and does not only weaken it.
    """
    return Claim(name, "contraindicated" if undoes_proof else "warning", source, text, weakness)


def unchecked_claim(name: str, text: str) -> Claim:
    """Returns a claim that says what nobody checked."""
    return Claim(name, "none", "not checked", text)


def _as_operator_statement(claim: Claim) -> Claim:
    """Returns the claim as the operator's statement if it says that the hardware proves it, else the claim itself."""
    if claim.source != "hardware proves":
        return claim
    return replace(claim, source="operator states", state="none" if claim.state == "affirming" else claim.state)


@dataclass(frozen=True)
class VerifiedMachine:
    """Holds what a processor's verified evidence says of the machine.

    Attributes:
        kind: the technology.
        product: AMD's generation of the processor, such as "Genoa"; "" for other makers.
        report_data: the 64 bytes that the measured software chose.
        measurements: the digests of what was measured, in hex, by register ("launch"; "mrtd", "rtmr0" to "rtmr3",
            "config"; "mrenclave", "mrsigner").
        machine_id: what identifies this one processor, in hex: AMD's chip id or Intel's PPID; "" if there is none.
        tcb: the versions of AMD's firmware that the report states (REPORTED_TCB), by component; empty elsewhere.
        launch_tcb: the versions of AMD's firmware when the guest was started, by component; empty elsewhere.
        status: Intel's TCB status of the platform, such as "UpToDate"; "" elsewhere.
        eval_data_number: the smaller TCB evaluation data number of Intel's TCB info and QE identity, by which the
            platform was appraised; a larger number is newer. 0 elsewhere.
        claims: the claims of the verdict.
    """

    kind: HardwareKind
    product: str
    report_data: bytes
    measurements: Mapping[str, str]
    machine_id: str = ""
    tcb: Mapping[str, int] = field(default_factory=dict)
    status: str = ""
    claims: tuple[Claim, ...] = ()
    launch_tcb: Mapping[str, int] = field(default_factory=dict)
    eval_data_number: int = 0


@dataclass(frozen=True)
class VerifiedGpu:
    """Holds what a GPU's verified evidence says of it.

    Attributes:
        architecture: the architecture that NVIDIA certified, such as "HOPPER".
        device_id: SHA-256 of the public key of the GPU's attestation certificate, in hex.
        nonce: the 32 bytes to which the GPU answered.
        driver: the driver's version.
        vbios: the VBIOS's version.
        mode: as NVIDIA's evidence names it: "spt" (one GPU, its memory protected), "mpt", "ppcie" (several, whose links
            are plain text), or "" if the GPU states none of these.
        claims: the claims of the verdict.
    """

    architecture: str
    device_id: str
    nonce: bytes
    driver: str
    vbios: str
    mode: str
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Says whether a policy allows evidence, and why.

    Where software answered, or a processor whose reports can be forged, or a machine that its host may debug, the
    hardware proves no claim: neither the machine's, nor those of a GPU, which only the machine's measured software
    binds to what runs.

    Attributes:
        claims: all claims, in the order in which they are shown.
        refusals: the reasons for which the policy does not hold, in words, by name; empty if it holds.
        accepted_weaknesses: the policy's reason for each weakness that is there and accepted, by the weakness's name.
        is_from_hardware: whether hardware answered, and not the software stand-in.
    """

    claims: tuple[Claim, ...]
    refusals: Mapping[str, str] = field(default_factory=dict)
    accepted_weaknesses: Mapping[str, str] = field(default_factory=dict)
    is_from_hardware: bool = True

    def __post_init__(self) -> None:
        if not self.is_from_hardware or any(
            claim.weakness in (FORGEABLE_WEAKNESS, DEBUG_WEAKNESS) for claim in self.claims
        ):
            object.__setattr__(self, "claims", tuple(map(_as_operator_statement, self.claims)))

    @property
    def holds(self) -> bool:
        """Returns whether the policy allows the evidence."""
        return not self.refusals

    @property
    def undoing_weaknesses(self) -> tuple[str, ...]:
        """Returns the weaknesses that undo the proof, whether or not the policy accepts them."""
        return tuple(claim.weakness for claim in self.claims if claim.state == "contraindicated" and claim.weakness)

    def lines(self) -> list[str]:
        """Returns the verdict as lines of text."""
        width = max(len(claim.source) for claim in self.claims) if self.claims else 0
        lines = [f"  {claim.source:{width}}  {'WEAK: ' * bool(claim.weakness)}{claim.text}" for claim in self.claims]
        lines += [f"  accepted by the policy: {name} ({reason})" for name, reason in self.accepted_weaknesses.items()]
        lines += [f"  {REFUSED}: {reason}" for reason in self.refusals.values()]
        headline = HOLDS if self.is_from_hardware else HOLDS_FOR_SOFTWARE
        if self.accepted_weaknesses:
            headline += f", and accepts what is weak: {', '.join(self.accepted_weaknesses)}"
        if not self.holds:
            verb = "does" if len(self.refusals) == 1 else "do"
            headline = f"{REFUSED}: {len(self.refusals)} of the policy's conditions {verb} not hold"
        warnings = [] if self.is_from_hardware else [NOT_ATTESTED]
        if self.holds and self.undoing_weaknesses:
            warnings.append(f"{NOTHING_PROTECTS}: the policy accepts {', '.join(self.undoing_weaknesses)}")
        return [*warnings, headline, *lines, self.still_seen, RECORDED_NOTE]

    @property
    def still_seen(self) -> str:
        """Returns a sentence on what an operator of the host sees."""
        if not self.holds:
            return SEEN_IF_REFUSED
        if not self.is_from_hardware:
            return SEEN_OF_SOFTWARE
        return SEEN_IF_UNDONE.format(", ".join(self.undoing_weaknesses)) if self.undoing_weaknesses else SEEN_IF_HOLDS

    def to_json(self) -> dict[str, Any]:
        """Returns the verdict as a JSON object, whose `ear.status` is the tier of the whole verdict as in EAR."""
        states = {claim.state for claim in self.claims}
        status = next((state for state in ("contraindicated", "warning", "affirming") if state in states), "none")
        return {
            "eat_profile": "tag:milkglass,2026:verdict-1",
            "attested": self.is_from_hardware and self.holds and bool(self.claims) and not self.undoing_weaknesses,
            "holds": self.holds,
            "ear.status": status if self.holds else "contraindicated",
            "claims": [vars(claim) for claim in self.claims],
            "refused": dict(self.refusals),
            "accepted": dict(self.accepted_weaknesses),
            "still_seen": self.still_seen,
            "tried": RECORDED_NOTE,
        }
