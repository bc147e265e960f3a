"""Reads policies, and judges verified evidence by them.

A policy is a TOML file that says what a client demands of a server before it sends anything. A lock file beside it
lists pinned machines. An empty list allows nothing. What evidence shows to be weaker than it could be is refused,
unless the policy accepts it by name, with a reason, which every verdict then shows.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from milkglass import files
from milkglass.attest.claims import (
    Claim,
    Verdict,
    VerifiedGpu,
    VerifiedMachine,
    proven_claim,
    unchecked_claim,
    weak_claim,
)
from milkglass.errors import UsageError

# The weaknesses that a policy can accept, by name, and what each means
WEAKNESSES = {
    "milan": "reports of AMD's Milan, which anyone can forge",
    "vlek": "a key of the cloud, which names no machine",
    "debug": "a guest of SEV-SNP that the host may debug",
    "migration": "a guest that may be moved, with its memory",
    "level": "a report for software at another privilege level than 0, which the launch measurement need not cover",
    "no-alias-check": "no check of memory aliases (BadRAM)",
    "rollback": "firmware that the host can take back to an older version",
    "no-revocation": "no current revocation list of the processor's maker (of AMD: of the authorities of its keys)",
    "cached-keys": "keys from a cache of the platform's owner",
    "smt": "hyperthreads",
    "dynamic-platform": "a platform to which packages can be added",
    "attributes": "an enclave with unusual attributes",
    "not-fresh": "evidence without a nonce of ours, as old as the machine's boot",
    "unbound": "evidence that is not bound to the connection's key",
    "relayable-gpu": "a GPU that only the measured software binds to the machine",
    "no-rim": "a GPU that was compared with no reference values",
    "no-gpu-revocation": "no current word of NVIDIA on the authorities of a GPU's or a reference's key",
    "ppcie": "plain text between GPUs (NVLink)",
    "gpu-mode": "a GPU that does not state its mode",
    "first-use": "a machine that is not pinned yet",
}
# The names of weaknesses that Intel states: advisories, and TCB statuses
INTEL_WEAKNESS_PATTERN = re.compile(r"INTEL-SA-\d{5}|status [A-Za-z]+")
SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600}
MAX_POLICY_BYTES = 64 << 10
Hex = Annotated[str, StringConstraints(pattern=r"^(?:[0-9a-f]{2})+$")]
NonEmptyText = Annotated[str, StringConstraints(min_length=1)]
ComponentVersion = Annotated[int, Field(ge=0, le=255)]
EvalDataNumber = Annotated[int, Field(ge=1)]


class _PolicyPart(BaseModel):
    """Refuses unknown names, and values of another type: `true` is no number. All parts of a policy are subclasses."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, strict=True)


class _Image(_PolicyPart):
    """Names an image. A machine runs it if all measurements that the subclasses state, in hex, are equal.

    Attributes:
        name: the image's name in verdicts.
        origin: how its measurements were computed.
    """

    name: NonEmptyText
    origin: NonEmptyText


class SevSnpImage(_Image):
    """Describes an image of SEV-SNP by its launch measurement."""

    launch: Hex


class TdxImage(_Image):
    """Describes an image of TDX by its registers. `config` is MRCONFIGID. A register that is None is not checked."""

    mrtd: Hex
    rtmr0: Hex | None = None
    rtmr1: Hex
    rtmr2: Hex
    rtmr3: Hex | None = None
    config: Hex | None = None


class SgxImage(_Image):
    """Describes an enclave of SGX by its measurement."""

    mrenclave: Hex


# Intel's TCB statuses, without that of revoked platforms
TcbStatus = Literal[
    "UpToDate", "SWHardeningNeeded", "ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded", "OutOfDate",
    "OutOfDateConfigurationNeeded",
]  # fmt: skip


class SevSnpDemands(_PolicyPart):
    """Says what is demanded of a machine with SEV-SNP.

    Attributes:
        products: the generations of AMD's processors that are allowed.
        tcb: the least version of each component of the firmware.
        image: the images that are allowed.
    """

    products: list[Literal["Milan", "Genoa", "Turin"]] = []
    tcb: dict[Literal["bootloader", "tee", "snp", "microcode", "fmc"], ComponentVersion] = {}
    image: list[SevSnpImage] = []


class TdxDemands(_PolicyPart):
    """Says what is demanded of a machine with TDX.

    Attributes:
        status: the TCB statuses that are allowed.
        eval_data_number: the least TCB evaluation data number of Intel's collateral. None: any.
        image: the images that are allowed.
    """

    status: list[TcbStatus] = ["UpToDate"]
    eval_data_number: EvalDataNumber | None = None
    image: list[TdxImage] = []


class SgxDemands(_PolicyPart):
    """Says what is demanded of an enclave of SGX. The attributes are those of `TdxDemands`."""

    status: list[TcbStatus] = ["UpToDate"]
    eval_data_number: EvalDataNumber | None = None
    image: list[SgxImage] = []


class NvidiaDemands(_PolicyPart):
    """Says what is demanded of a machine's GPUs.

    Attributes:
        count: how many GPUs there must be.
        architectures: the architectures that are allowed.
        modes: the modes of protection that are allowed (`VerifiedGpu.mode`).
        rim: whether measurements must be compared with NVIDIA's reference values.
        revocation: whether NVIDIA's current revocation status of the keys is needed.
    """

    count: int = Field(ge=1)
    architectures: list[Literal["HOPPER", "BLACKWELL"]] = []
    modes: list[Literal["spt", "ppcie"]] = ["spt"]
    rim: Literal["required", "off"] = "required"
    revocation: Literal["required", "off"] = "required"


class AllowedMachines(_PolicyPart):
    """Lists the machines that are allowed, by their ids in hex (`VerifiedMachine.machine_id`).

    If none is listed here or in the lock file, any machine is allowed where the policy accepts "first-use".
    """

    pinned: list[Hex] = []


class EnclavePolicy(_PolicyPart):
    """Says what is demanded of an SGX enclave, which a provider runs or the user's own machine.

    Attributes:
        accept: accepted weaknesses by name, each with the reason for which it is accepted.
    """

    version: Literal[1]
    sgx: SgxDemands = SgxDemands()
    machine: AllowedMachines = AllowedMachines()
    accept: dict[str, NonEmptyText] = {}
    sev_snp: ClassVar[None] = None
    tdx: ClassVar[None] = None
    nvidia: ClassVar[None] = None
    kinds: ClassVar[tuple[()]] = ()


class Policy(_PolicyPart):
    """Says what is demanded of one server.

    Attributes:
        server: the address that the policy is for.
        evidence: the form in which the server gives its evidence.
        lease: how long requests may be sent to a key after its evidence was verified, such as "15m"; 24 hours at most.
        kinds: ["software"] accepts the software stand-in, which proves nothing. Empty: only kinds with a section here.
        sev_snp, tdx, sgx: what is demanded of a machine of this kind. None: no such machine is allowed.
        nvidia: what is demanded of GPUs. None: no GPU may be shown.
        machine: the machines that are allowed.
        accept: accepted weaknesses by name, each with the reason for which it is accepted.
    """

    version: Literal[1]
    server: Annotated[str, StringConstraints(pattern=r"^https://[^/\s@?#]+$")]
    evidence: Literal["milkglass", "tinfoil", "aci"] = "milkglass"
    lease: Annotated[str, StringConstraints(pattern=r"^([1-9]\d{0,3}s|[1-9]\d{0,2}m|([1-9]|1\d|2[0-4])h)$")] = "15m"
    kinds: list[Literal["software"]] = []
    sev_snp: SevSnpDemands | None = Field(None, alias="sev-snp")
    tdx: TdxDemands | None = None
    sgx: SgxDemands | None = None
    nvidia: NvidiaDemands | None = None
    machine: AllowedMachines = AllowedMachines()
    accept: dict[str, NonEmptyText] = {}

    @property
    def accepts_software(self) -> bool:
        """Returns whether the software stand-in is taken. Verdicts then say NOT ATTESTED."""
        return bool(self.kinds)

    @property
    def lease_seconds(self) -> int:
        """Returns the length of a lease in seconds."""
        return int(self.lease[:-1]) * SECONDS_OF_UNIT[self.lease[-1]]


_AnyPolicy = TypeVar("_AnyPolicy", Policy, EnclavePolicy)


def read_policy(path: Path, policy_type: type[_AnyPolicy]) -> _AnyPolicy:
    """Reads a policy of a type from a file. Raises UsageError, which names the entry at fault."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"the policy {path} cannot be read ({type(error).__name__})", "give a file in TOML") from None
    return parse_policy(raw, path.name, policy_type)


def parse_policy(raw: bytes, name: str, policy_type: type[_AnyPolicy]) -> _AnyPolicy:
    """Parses a policy of a type; errors have `name`, the file's. Raises UsageError, which names the entry at fault."""
    if len(raw) > MAX_POLICY_BYTES:
        raise UsageError(f"{name} has {len(raw):,} bytes, at most {MAX_POLICY_BYTES:,} are read", "give a policy")
    try:
        policy = policy_type.model_validate(tomllib.loads(raw.decode()))
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"])
        value_text = "" if fault["type"] == "missing" else f" is {str(fault['input'])[:80]!r}"
        raise UsageError(
            f"{name}: {field}{value_text}: {fault['msg'].lower()}", "see docs/attested.md for a policy"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is no TOML: {error}", "see docs/attested.md") from None
    if unknown_names := [
        name for name in policy.accept if name not in WEAKNESSES and not INTEL_WEAKNESS_PATTERN.fullmatch(name)
    ]:
        raise UsageError(f"{name}: accept.{unknown_names[0]} is no weakness", f"names: {', '.join(WEAKNESSES)}")
    if "debug" in policy.accept and policy.sev_snp is None:
        raise UsageError(
            f"{name}: accept.debug holds for SEV-SNP alone, and there is no section sev-snp",
            "leave it out: debug of TDX and of SGX is always refused",
        )
    return policy


# --- the lock file ----------------------------------------------------------------------------------------------------
def lock_path(policy: Path) -> Path:
    """Returns the path of a policy's lock file, which lists pinned machines: beside the policy."""
    return policy.with_name(f"{policy.name}.lock")


def read_lock(policy: Path) -> dict[str, str]:
    """Reads when each pinned machine was first seen, by its id; empty without a lock file. Raises UsageError."""
    path = lock_path(policy)
    if not path.is_file():
        return {}
    try:
        machines = tomllib.loads(path.read_text("utf-8"))["machine"]
        return {str(machine["id"]): str(machine["first_seen"]) for machine in machines}
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        raise UsageError(f"{path.name} is damaged", "remove it, and pin the machines again") from None


def pin_machine(policy: Path, machine_id: str) -> bool:
    """Adds a machine to a policy's lock file. Returns False if the file has it already."""
    machines = read_lock(policy)
    if machine_id in machines:
        return False
    machines[machine_id] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    entries = (
        f'[[machine]]\nid = "{pinned_id}"\nfirst_seen = "{first_seen}"\n' for pinned_id, first_seen in machines.items()
    )
    files.write(lock_path(policy), "\n".join(entries))
    return True


# --- the verdict ------------------------------------------------------------------------------------------------------
def judge(
    policy: Policy | EnclavePolicy, machine: VerifiedMachine, gpus: Sequence[VerifiedGpu] = (),
    binding_claims: Sequence[Claim] = (), pinned: Mapping[str, str] | None = None,
) -> Verdict:  # fmt: skip
    """Returns the verdict of a policy on verified evidence.

    Args:
        policy: the policy.
        machine: what the evidence says of the machine.
        gpus: what it says of each GPU.
        binding_claims: claims on what binds the evidence to the connection, and whether it is fresh.
        pinned: when each machine of the lock file was first seen, by its id.
    """
    claims, faults = [*binding_claims, *machine.claims], dict[str, str]()
    sections: dict[str, SevSnpDemands | TdxDemands | SgxDemands | None] = {
        "sev-snp": policy.sev_snp,
        "tdx": policy.tdx,
        "sgx": policy.sgx,
    }
    section = sections.get(machine.kind)
    if section is None and machine.kind not in policy.kinds:
        faults["kind"] = f"the policy has no section for {machine.kind}"
    if isinstance(section, SevSnpDemands):
        faults |= _snp_faults(section, machine)
    elif section is not None:
        faults |= _intel_faults(section, machine)
        if section.eval_data_number is None:
            text = "whether Intel has newer levels than these: the policy names no least eval_data_number"
            claims.append(unchecked_claim("eval-data-number", text))
    if section is not None:
        claims += _image_claims(section, machine, faults)
    claims += _machine_claims(policy, machine, pinned or {}, faults)
    for gpu in gpus:
        claims += gpu.claims
    reasons = _accepted_weaknesses(policy)
    faults |= _gpu_faults(policy.nvidia, gpus, reasons)
    accepted = dict[str, str]()
    for claim in claims:
        if claim.weakness in reasons:
            accepted[claim.weakness] = reasons[claim.weakness]
        elif claim.weakness:
            faults.setdefault(claim.weakness, f"{claim.text} ({claim.weakness!r} is not accepted)")
    return Verdict(tuple(claims), faults, accepted, machine.kind != "software")


def _accepted_weaknesses(policy: Policy | EnclavePolicy) -> dict[str, str]:
    """Returns the reason for each accepted weakness, by its name, also for those that other sections imply."""
    reasons = dict(policy.accept)
    for section in (policy.tdx, policy.sgx):
        for status in [] if section is None else section.status:
            reasons.setdefault(f"status {status}", "the policy lists this status")
    if policy.nvidia is not None:
        implied = {
            "ppcie": "ppcie" in policy.nvidia.modes,
            "no-rim": policy.nvidia.rim == "off",
            "no-gpu-revocation": policy.nvidia.revocation == "off",
        }
        for name, is_implied in implied.items():
            if is_implied:
                reasons.setdefault(name, "the policy's section nvidia says so")
    return reasons


def _snp_faults(section: SevSnpDemands, machine: VerifiedMachine) -> dict[str, str]:
    """Returns the reasons for which a machine is refused by its processor and its firmware, by name."""
    faults = {}
    if machine.product not in section.products:
        faults["product"] = f"the processor is a {machine.product}; allowed: {', '.join(section.products) or 'none'}"
    minimum_versions = {str(name): version for name, version in section.tcb.items()}
    for when, versions in (("is", machine.tcb), ("was, when the guest was started,", machine.launch_tcb)):
        low_components = [name for name, version in versions.items() if version < minimum_versions.get(name, 0)]
        if low_components:
            name = low_components[0]
            faults.setdefault(
                "old-tcb",
                f"the firmware's {name} {when} {versions[name]}, {minimum_versions[name]} or more is required",
            )
    missing_names = [name for name in machine.tcb if name not in minimum_versions]
    if missing_names:
        faults["tcb"] = f"the policy names no least version of the firmware's {', '.join(missing_names)} (sev-snp.tcb)"
    elif not any(minimum_versions[name] for name in machine.tcb):
        faults["tcb"] = "the policy names no least version of the firmware above 0 (sev-snp.tcb)"
    return faults


def _intel_faults(section: TdxDemands | SgxDemands, machine: VerifiedMachine) -> dict[str, str]:
    """Returns the reasons for which a machine is refused by Intel's collateral, by name."""
    faults = {}
    if machine.status not in section.status:
        faults["status"] = f"Intel's status is {machine.status}; allowed: {', '.join(section.status) or 'none'}"
    if machine.eval_data_number < (section.eval_data_number or 0):
        faults["eval-data-number"] = (
            f"Intel's levels have the number {machine.eval_data_number}, {section.eval_data_number} or more is required"
        )
    return faults


def _image_claims(
    section: SevSnpDemands | TdxDemands | SgxDemands, machine: VerifiedMachine, faults: dict[str, str]
) -> list[Claim]:
    """Returns claims on the image that runs. Adds to `faults` if the policy has no such image."""
    for image in section.image:
        registers = image.model_dump(exclude={"name", "origin"}, exclude_none=True)
        if all(machine.measurements.get(register) == measurement for register, measurement in registers.items()):
            names = ", ".join(registers)
            claims = [
                proven_claim(
                    "measurement", f"it started what the policy measures as {image.name!r} ({names}; {image.origin})"
                )
            ]
            if unchecked_registers := sorted(
                set(machine.measurements) & set(type(image).model_fields) - set(registers)
            ):
                claims.append(unchecked_claim("registers", f"what {', '.join(unchecked_registers)} measure"))
            return claims
    measurements = ", ".join(
        f"{register} {digest[:16]}..." for register, digest in machine.measurements.items() if int(digest, 16)
    )
    faults["image"] = f"no image of the policy runs there: {measurements}"
    return []


def _machine_claims(
    policy: Policy | EnclavePolicy, machine: VerifiedMachine, pinned: Mapping[str, str], faults: dict[str, str]
) -> list[Claim]:
    """Returns claims on which machine this is. Adds to `faults` if another one is pinned."""
    allowed_ids = {*policy.machine.pinned, *pinned}
    if not machine.machine_id:
        if allowed_ids:
            faults["machine"] = "machines are pinned, and the evidence does not say which one this is"
        return []
    if machine.machine_id in allowed_ids:
        first_seen = f", first seen {pinned[machine.machine_id]}" if machine.machine_id in pinned else ""
        text = f"the policy pins this machine{first_seen}; who can touch it is the operator's word"
        return [Claim("pinned", "affirming", "operator states", text)]
    if allowed_ids:
        faults["machine"] = (
            f"the machine {machine.machine_id[:16]}... is not one of the {len(allowed_ids)} that are pinned"
        )
        return []
    return [
        weak_claim(
            "pinned", "no machine is pinned yet: `milkglass attest pin` pins this one", "first-use", "not checked"
        )
    ]


def _gpu_faults(
    section: NvidiaDemands | None, gpus: Sequence[VerifiedGpu], accepted: Mapping[str, str]
) -> dict[str, str]:
    """Returns the reasons for which GPUs are refused, by name. `accepted` has the reasons of accepted weaknesses."""
    if section is None:
        return {} if not gpus else {"gpu": f"{len(gpus)} GPUs were shown, and the policy has no section nvidia"}
    faults = {}
    modes = {*section.modes, *(mode for mode, name in {"": "gpu-mode", "ppcie": "ppcie"}.items() if name in accepted)}
    if len(gpus) != section.count:
        faults["gpu-count"] = f"evidence of {len(gpus)} GPUs, the policy demands {section.count}"
    for gpu in gpus:
        if gpu.architecture not in section.architectures:
            allowed = ", ".join(section.architectures) or "none"
            faults["architecture"] = f"a GPU is a {gpu.architecture}; allowed: {allowed}"
        if gpu.mode not in modes:
            faults["gpu-mode-of-policy"] = f"a GPU's mode is {gpu.mode or 'not stated'}; allowed: {section.modes}"
    return faults
