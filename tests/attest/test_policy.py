"""What a policy demands: an empty list allows nothing, and each weakness is refused by name unless it is accepted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from milkglass.attest import policy as policies
from milkglass.attest.claims import Verdict, VerifiedGpu, VerifiedMachine, proven_claim, weak_claim
from milkglass.attest.evidence import verify
from milkglass.attest.policy import WEAKNESSES, Policy, judge, parse_policy
from milkglass.cli.attest import judge_evidence
from milkglass.errors import AttestationError, UsageError
from tests.attest.samples import GPUS, SAMPLES

HEAD = 'version = 1\nserver = "https://gpu.example:8420"\n'
GENOA = (
    HEAD
    + """
[sev-snp]
products = ["Genoa"]
tcb = {bootloader = 10, tee = 0, snp = 23, microcode = 84}
[[sev-snp.image]]
launch = "LAUNCH"
name = "the image"
origin = "recomputed by me"
[machine]
pinned = ["MACHINE"]
[accept]
no-revocation = "no list here"
unbound = "a recording"
not-fresh = "a recording"
"""
)
TDX = (
    HEAD
    + """
[tdx]
image = [{mrtd = "MRTD", rtmr1 = "RTMR1", rtmr2 = "RTMR2", name = "a domain", origin = "seen first today"}]
[machine]
pinned = ["MACHINE"]
[accept]
cached-keys = "the cloud's"
smt = "the cloud's"
dynamic-platform = "the cloud's"
unbound = "a recording"
not-fresh = "a recording"
"""
)


def machine_of(name: str) -> VerifiedMachine:
    return verify(SAMPLES[name].evidence, SAMPLES[name].time)[0]


def bound_of(name: str) -> list[object]:
    return list(verify(SAMPLES[name].evidence, SAMPLES[name].time)[2])


def policy(text: str, machine: VerifiedMachine, **changes: str) -> Policy:
    values = {"LAUNCH": machine.measurements.get("launch", "00"), "MACHINE": machine.machine_id,
              **{name.upper(): value for name, value in machine.measurements.items()}}  # fmt: skip
    for name, value in values.items():
        text = text.replace(f'"{name}"', f'"{value}"')
    for old, new in changes.items():
        text = text.replace(old, new)
    return parse_policy(text.encode(), "p.toml", Policy)


def verdict(name: str, text: str, gpus: list[VerifiedGpu] | None = None, **changes: str) -> Verdict:
    machine = machine_of(name)
    return judge(policy(text, machine, **changes), machine, gpus or [], bound_of(name))  # type: ignore[arg-type]


def test_a_machine_of_the_policy_is_allowed_and_what_was_accepted_is_shown() -> None:
    for name, text in (("Genoa", GENOA), ("TDX", TDX)):
        found = verdict(name, text)
        assert found.holds, found.refusals
        words = "\n".join(found.lines())
        assert "the policy holds" in words and "accepted by the policy: not-fresh (a recording)" in words
        assert "never on live" in words and "undoes the proof: unbound" in words
        assert found.lines()[0] == "THE OPERATOR CAN READ EVERYTHING: the policy accepts unbound"
        assert found.to_json()["holds"] is True and found.to_json()["attested"] is False


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('products = ["Genoa"]', 'products = ["Turin"]', "product"),
        ('products = ["Genoa"]', "products = []", "product"),
        ("snp = 23", "snp = 24", "old-tcb"),
        ("microcode = 84", "microcode = 85", "old-tcb"),
        ("tcb = {bootloader = 10, tee = 0, snp = 23, microcode = 84}", "", "tcb"),
        ("tcb = {bootloader = 10, tee = 0, snp = 23, microcode = 84}", "tcb = {tee = 0}", "tcb"),
        ("bootloader = 10, tee = 0, snp = 23", "bootloader = 10, tee = 0", "tcb"),
        (
            "bootloader = 10, tee = 0, snp = 23, microcode = 84",
            "bootloader = 0, tee = 0, snp = 0, microcode = 0",
            "tcb",
        ),
        ("microcode = 84", "microcode = 84, fmc = 9", ""),
        ('name = "the image"', 'name = "x"\norigin = "y"\n[[sev-snp.image]]\nlaunch = "00"\nname = "z"', ""),
        ('no-revocation = "no list here"', "", "no-revocation"),
        ('unbound = "a recording"', "", "unbound"),
        ('not-fresh = "a recording"', "", "not-fresh"),
    ],
)
def test_each_demand_refuses_by_its_name(old: str, new: str, reason: str) -> None:
    found = verdict("Genoa", GENOA, **{old: new})
    assert set(found.refusals) == ({reason} if reason else set())


def test_no_image_no_machine_and_no_section_allow_nothing() -> None:
    machine = machine_of("Genoa")
    other = replace(machine, measurements={"launch": "00" * 48}, machine_id="11" * 64)
    rules = policy(GENOA, machine)
    assert {"image", "machine"} <= set(judge(rules, other).refusals)
    assert "kind" in judge(parse_policy(HEAD.encode(), "p", Policy), machine).refusals
    assert "image" in judge(parse_policy((HEAD + "[sev-snp]\n").encode(), "p", Policy), machine).refusals
    free = parse_policy(
        GENOA.replace('pinned = ["MACHINE"]', "").replace("LAUNCH", machine.measurements["launch"]).encode(),
        "p",
        Policy,
    )
    assert set(judge(free, machine, [], bound_of("Genoa")).refusals) == {"first-use"}  # type: ignore[arg-type]
    assert judge(free, machine, [], bound_of("Genoa"), {machine.machine_id: "2026-01-01"}).holds  # type: ignore[arg-type]
    nameless = replace(machine, machine_id="")
    assert "machine" in judge(rules, nameless).refusals


def test_intels_words_and_advisories_are_refused_unless_they_are_listed() -> None:
    machine = machine_of("SGX")
    text = HEAD + f'[sgx]\nimage = [{{mrenclave = "{machine.measurements["mrenclave"]}", name = "x", origin = "y"}}]\n'
    found = judge(parse_policy(text.encode(), "p", Policy), machine, pinned={machine.machine_id: "now"})
    status = "ConfigurationAndSWHardeningNeeded"
    assert set(found.refusals) == {"status", f"status {status}", "INTEL-SA-00289", "INTEL-SA-00615"}
    text = text.replace("[sgx]\n", f'[sgx]\nstatus = ["UpToDate", "{status}"]\n')
    text += '[accept]\nINTEL-SA-00289 = "mitigated"\nINTEL-SA-00615 = "mitigated"\n'
    assert judge(parse_policy(text.encode(), "p", Policy), machine, pinned={machine.machine_id: "now"}).holds


WEAK = {
    "milan": "Milan", "debug": "Milan, debug", "vlek": "VLEK", "no-alias-check": "Milan", "smt": "TDX",
    "cached-keys": "TDX", "dynamic-platform": "TDX", "no-revocation": "Genoa",
}  # fmt: skip


@pytest.mark.parametrize("name", WEAKNESSES)
def test_every_weakness_is_refused_by_its_name_and_accepted_with_a_reason(name: str) -> None:
    machine = machine_of(WEAK.get(name, "Genoa"))
    if name not in WEAK:
        machine = replace(machine, claims=(weak_claim("it", "it is weak", name),))
    head = HEAD + ("[sev-snp]\n" if name == "debug" else "")
    bare = parse_policy(head.encode(), "p", Policy)
    assert name in judge(bare, machine).refusals
    accepting = parse_policy((head + f'[accept]\n{name} = "because"\n').encode(), "p", Policy)
    found = judge(accepting, machine)
    assert name not in found.refusals and (name == "first-use" or found.accepted_weaknesses[name] == "because")


def test_debug_of_tdx_and_sgx_cannot_be_accepted_and_a_policy_that_says_so_is_refused() -> None:
    accept = '[accept]\ndebug = "because"\n'
    for section in ("[tdx]\n", "[sgx]\n", ""):
        with pytest.raises(UsageError, match=r"accept\.debug holds for SEV-SNP alone"):
            parse_policy((HEAD + section + accept).encode(), "p", Policy)
    both = parse_policy((HEAD + "[tdx]\n[sev-snp]\n" + accept).encode(), "p", Policy)
    assert "debug" in both.accept
    with pytest.raises(AttestationError) as refused:  # whatever the policy says
        verify(SAMPLES["TDX, debug"].evidence, SAMPLES["TDX, debug"].time)
    assert refused.value.reason == "debug" and "no policy accepts" in refused.value.message


def test_gpus_are_counted_and_their_kinds_and_modes_allowed() -> None:
    text = GENOA.replace("[machine]", '[nvidia]\ncount = 1\narchitectures = ["HOPPER"]\nNVIDIA\n[machine]')
    text += 'relayable-gpu = "known"\n'
    spt, ppcie = GPUS["Hopper on hold"].verified(), GPUS["Hopper"].verified()

    def refused(gpus: list[VerifiedGpu], more: str) -> set[str]:
        return set(verdict("Genoa", text, gpus, NVIDIA=more).refusals)

    assert refused([spt], "") == {"no-rim", "no-gpu-revocation"}
    assert refused([spt], 'rim = "off"\nrevocation = "off"') == set()
    assert refused([], 'rim = "off"\nrevocation = "off"') == {"gpu-count"}
    assert refused([spt, ppcie], 'rim = "off"\nrevocation = "off"') == {"gpu-count", "gpu-mode-of-policy", "ppcie"}
    assert refused([ppcie], 'modes = ["ppcie"]\nrim = "off"\nrevocation = "off"') == set()
    blackwell = GPUS["Blackwell"].verified()
    assert "architecture" in refused([blackwell], 'rim = "off"\nrevocation = "off"')
    assert "gpu" in verdict("Genoa", GENOA, [spt]).refusals, "GPUs without a section"


@pytest.mark.parametrize("name", [name for name, one in GPUS.items() if not one.reason])
def test_a_gpu_whose_every_weakness_is_accepted_is_allowed_and_none_can_be_left_out(name: str) -> None:
    gpu = GPUS[name].verified()
    weaknesses = sorted({claim.weakness for claim in gpu.claims if claim.weakness})
    section = f'[nvidia]\ncount = 1\narchitectures = ["{gpu.architecture}"]\n[machine]'

    def refused(names: list[str]) -> set[str]:
        text = GENOA.replace("[machine]", section) + "".join(f'{one} = "known"\n' for one in names)
        return set(verdict("Genoa", text, [gpu]).refusals)

    assert refused(weaknesses) == set()
    for left_out in weaknesses:
        assert left_out in refused([one for one in weaknesses if one != left_out])
    part_of_one = replace(gpu, mode="mpt")
    text = GENOA.replace("[machine]", section) + "".join(f'{one} = "known"\n' for one in {*weaknesses, "gpu-mode"})
    assert set(verdict("Genoa", text, [part_of_one]).refusals) == {"gpu-mode-of-policy"}, "a part of a GPU is no mode"


@pytest.mark.parametrize(
    "text",
    [
        "", "version = 2", "version = 1", HEAD + "typo = 1", HEAD + "[sev-snp]\nprodcuts = []",
        HEAD + '[sev-snp]\nproducts = ["Rome"]', HEAD + "[nvidia]\n", HEAD + "[nvidia]\ncount = 0",
        HEAD + '[accept]\nmilann = "x"', HEAD + '[accept]\nmilan = ""', HEAD.replace("https", "http"),
        HEAD + 'lease = "0m"', HEAD + 'lease = "15"', HEAD + '[machine]\npinned = ["xyz"]', "\xff", "a" * 70_000,
        HEAD + '[[sev-snp.image]]\nlaunch = "00"\nname = "no origin"', HEAD + "[sev-snp]\ntcb = {snp = -1}",
        HEAD + "[tdx]\neval_data_number = 0", HEAD + "[tdx]\neval_data_number = true", HEAD + "[nvidia]\ncount = true",
        HEAD + '[nvidia]\ncount = "1"', HEAD + "[sev-snp]\ntcb = {snp = true}", "a = " + "[" * 60_000,
        "a = 1" + "0" * 5_000,
    ],
)  # fmt: skip
def test_a_policy_with_a_fault_is_refused_with_the_name_of_the_entry(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_policy(text.encode("latin-1"), "p.toml", Policy)
    assert "p.toml" in refused.value.message


def test_a_policy_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing"):
        policies.read_policy(tmp_path / "missing.toml", Policy)


def test_machines_are_pinned_once_and_a_damaged_lock_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    assert policies.read_lock(path) == {}
    assert (
        policies.pin_machine(path, "aa" * 64)
        and policies.pin_machine(path, "bb" * 64)
        and not policies.pin_machine(path, "aa" * 64)
    )
    assert list(policies.read_lock(path)) == ["aa" * 64, "bb" * 64]
    policies.lock_path(path).write_text("[[machine]\n")
    with pytest.raises(UsageError, match="damaged"):
        policies.read_lock(path)


def test_software_is_allowed_only_by_name_and_is_never_attested() -> None:
    machine = VerifiedMachine("software", "", bytes(64), {}, claims=(proven_claim("x", "y"),))
    assert (
        "kind"
        in judge(
            parse_policy(GENOA.replace("LAUNCH", "00").replace("MACHINE", "00").encode(), "p", Policy), machine
        ).refusals
    )
    found = judge(parse_policy((HEAD + 'kinds = ["software"]\n').encode(), "p", Policy), machine)
    assert found.holds and not found.is_from_hardware and found.lines()[0].startswith("NOT ATTESTED")
    assert found.to_json()["attested"] is False
    words = "\n".join(found.lines())
    assert "sees: everything" in words and "the policy takes software" in words and "the policy holds\n" not in words


@pytest.mark.parametrize("name", ["Milan", "Milan, debug"])
def test_of_a_processor_whose_reports_can_be_forged_the_hardware_proves_no_claim(name: str, tmp_path: Path) -> None:
    machine, gpus, bound = verify(SAMPLES[name].evidence, SAMPLES[name].time)
    accepting = GENOA.replace('["Genoa"]', '["Milan"]') + 'milan = "known"\ndebug = "known"\nno-alias-check = "known"\n'
    image = policy(accepting.replace("LAUNCH", machine.measurements["launch"]), machine)
    for found in (
        judge(image, machine, gpus, [*bound, proven_claim("fresh", "it answered our nonce")]),
        judge_evidence(SAMPLES[name].evidence, None, None, SAMPLES[name].time),
    ):
        assert any("no line of it is proven" in claim.text for claim in found.claims)
        assert [str(claim) for claim in found.claims if claim.source == "hardware proves"] == []
        assert {"machine", "debug"} <= {claim.name for claim in found.claims if claim.source == "operator states"}
    assert any(claim.source == "hardware proves" for claim in verdict("Genoa", GENOA).claims)


def test_of_gpus_beside_software_the_hardware_proves_no_claim() -> None:
    gpu = GPUS["Hopper on hold"].verified()
    machine = VerifiedMachine("software", "", bytes(64), {}, claims=(proven_claim("x", "y"),))
    text = (
        HEAD
        + 'kinds = ["software"]\n[nvidia]\ncount = 1\narchitectures = ["HOPPER"]\nrim = "off"\nrevocation = "off"\n'
    )
    found = judge(parse_policy((text + '[accept]\nrelayable-gpu = "known"\n').encode(), "p", Policy), machine, [gpu])
    assert found.holds and not found.is_from_hardware
    assert any("(HOPPER)" in line for line in found.lines())
    assert [claim.source for claim in gpu.claims if "HOPPER" in claim.text] == ["vendor states"]
    assert "hardware proves" not in "\n".join(found.lines()) + str(found.to_json()["claims"])
    assert found.to_json()["ear.status"] != "affirming"


@pytest.mark.parametrize("weakness", ["debug", "unbound", "migration", "attributes", "milan"])
def test_a_verdict_promises_nothing_where_what_is_accepted_undoes_the_proof(weakness: str) -> None:
    claims = (proven_claim("measurement", "the measured image"), weak_claim("x", "a hole", weakness, undoes_proof=True))
    found = Verdict(claims, accepted_weaknesses={weakness: "a trial"})
    assert found.holds and found.undoing_weaknesses == (weakness,)
    assert "assume everything" in found.still_seen and weakness in found.still_seen
    assert found.to_json()["attested"] is False
    states = [claim.state for claim in found.claims if claim.source == "hardware proves"]
    assert ("affirming" in states) is (weakness not in ("debug", "milan")), "who writes its memory makes its reports"


def test_a_refused_verdict_is_not_attested() -> None:
    claims = (proven_claim("measurement", "the measured image"),)
    assert Verdict(claims).to_json()["attested"] is True
    assert Verdict(claims, refusals={"product": "another"}).to_json()["attested"] is False


@pytest.mark.parametrize("entry", [
    'lease = "25h"', 'lease = "1000m"', 'server = "https://a.example@b.example"', 'server = "https://a.example#b"',
    '[tdx]\nstatus = ["UptoDate"]', '[tdx]\nstatus = ["Revoked"]',
])  # fmt: skip
def test_what_would_never_hold_or_hold_for_long_is_no_policy(entry: str) -> None:
    text = "version = 1\n" + ("" if entry.startswith("server") else 'server = "https://a.example"\n') + entry
    with pytest.raises(UsageError):
        parse_policy(text.encode(), "p", Policy)
