"""What makers sign beside evidence: whoever hands it over, the newest counts, and it is what makers publish."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp

from milkglass.attest import chains, channel, evidence, intel, nvidia, rim, sev_snp, sources
from milkglass.attest.claims import Claim, VerifiedGpu, VerifiedMachine
from milkglass.attest.evidence import HardwareEvidence, gpu_nonce, report_data
from milkglass.attest.fetch import fetch_collateral
from milkglass.attest.policy import EnclavePolicy, Policy, judge, parse_policy
from milkglass.attest.sources import collateral_reader, read_collateral, with_collateral
from milkglass.enclave.verification import QuoteVerifier
from milkglass.errors import AttestationError, EnclaveError, UsageError
from tests.attest import intel_forger as forger
from tests.attest import samples
from tests.attest.authority import UNKNOWN, Authority
from tests.attest.intel_forger import Collateral, Quote
from tests.attest.makers import PLATFORM, Amd, Makers, Nvidia, rim_answer
from tests.attest.samples import GPUS, SAMPLES, TODAY, content, day

NOW = forger.NOW
SPKI, NONCE = bytes(range(32)), bytes(range(32, 64))
DOCS = Path(__file__).parents[2] / "docs" / "attested.md"


def reason(call: object) -> str:
    with pytest.raises(AttestationError) as refused:
        call()  # type: ignore[operator]
    return refused.value.reason


def weaknesses(claims: tuple[Claim, ...]) -> set[str]:
    return {one.weakness for one in claims if one.weakness}


def in_both_ways(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[dict[str, bytes]]:
    """The collateral of evidence if the server hands over one and the client has the other, and the other way round."""
    bare = HardwareEvidence("software", b"")
    return [
        dict(with_collateral(replace(bare, collateral=servers), clients).collateral)
        for servers, clients in ((old, new), (new, old))
    ]


# --- AMD --------------------------------------------------------------------------------------------------------------
def test_a_list_that_revokes_counts_whoever_hands_over_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    amd = Amd.make().trusted(monkeypatch)
    who = amd.authority
    old, new = (who.revoked(0, serials, TODAY, days) for serials, days in (([], 7), ([who.chain[1].serial_number], 1)))
    assert sev_snp.verify(amd.report(), {**amd.files, "crl": old}, TODAY), "it is still current"
    for collateral in in_both_ways({"crl": old}, {"crl": new}):
        assert reason(lambda one=collateral: sev_snp.verify(amd.report(), {**amd.files, **one}, TODAY)) == "revoked"
    sly = replace(HardwareEvidence("sev-snp", b""), collateral={"x": new, "crl": old})
    found = with_collateral(sly, {"crl": new}).collateral
    assert reason(lambda: sev_snp.verify(amd.report(), {**amd.files, **found}, TODAY)) == "revoked", "a copy elsewhere"
    later = TODAY + timedelta(days=40)
    assert reason(lambda: sev_snp.verify(amd.report(), {**amd.files, "crl": new}, later)) == "revoked", "for good"


@pytest.mark.parametrize(("bits", "on"), [(0x20, False), (0x21, True)])
def test_hyperthreads_are_said_of_amds_processors(bits: int, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    amd = Amd.make().trusted(monkeypatch)
    found = sev_snp.verify(amd.report({PLATFORM: bytes([bits])}), amd.files, TODAY)
    assert any(claim.name == "smt" and claim.state == "warning" for claim in found.claims) == on


def test_amds_one_list_decides_about_the_authority_and_the_verdict_says_that_there_is_none_about_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    amd = Amd.make().trusted(monkeypatch)
    found = sev_snp.verify(amd.report(), {**amd.files, "crl": amd.authority.revoked(0, [], TODAY)}, TODAY)
    assert weaknesses(found.claims) == set()
    words = [str(claim) for claim in found.claims]
    assert any("does not name the authority of its key" in line for line in words)
    assert any(line.startswith("not checked") and "AMD publishes nothing about that" in line for line in words)
    for lists in (
        {},
        {"crl": amd.authority.revoked(0, [], TODAY, days=40)},
        {"crl": Amd.make().authority.revoked(0, [], TODAY)},
    ):
        assert weaknesses(sev_snp.verify(amd.report(), {**amd.files, **lists}, TODAY).claims) == {"no-revocation"}
    some = amd.authority.revoked(0, [], TODAY, critical=x509.IssuingDistributionPoint(
        None, None, only_contains_user_certs=True, only_contains_ca_certs=False, only_some_reasons=None,
        indirect_crl=False, only_contains_attribute_certs=False,
    ))  # fmt: skip
    assert weaknesses(sev_snp.verify(amd.report(), {**amd.files, "crl": some}, TODAY).claims) == {"no-revocation"}


@pytest.mark.parametrize("name", ["key", "chain"])
def test_a_stale_or_damaged_certificate_of_the_hosts_cache_does_not_hide_the_clients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, amd = Amd.make(), Amd.make().trusted(monkeypatch)
    for stale in (old.files[name], b"damaged", SAMPLES["Milan"].evidence.collateral[name]):
        bare = {**amd.files, name: stale}
        with pytest.raises(AttestationError):
            sev_snp.verify(amd.report(), bare, TODAY)
        for collateral in in_both_ways(bare, amd.files):
            assert sev_snp.verify(amd.report(), collateral, TODAY).product == "Genoa"
    revoked = amd.authority.revoked(0, [amd.authority.chain[1].serial_number], TODAY)
    many = {**old.files, "key+1": amd.files["key"], "chain+1": amd.files["chain"]}
    assert sev_snp.verify(amd.report(), many, TODAY)
    assert reason(lambda: sev_snp.verify(amd.report(), {**many, "crl": revoked}, TODAY)) == "revoked", "no other helps"
    none_fits = {**amd.files, name: old.files[name], f"{name}+1": b"damaged"}
    assert reason(lambda: sev_snp.verify(amd.report(), none_fits, TODAY)) == "chain"
    too_many = {**amd.files, **{f"{name}+{number}": b"%d" % number for number in range(16)}}
    assert reason(lambda: sev_snp.verify(amd.report(), too_many, TODAY)) == "size"


def test_a_report_that_no_guest_asked_for_is_refused_and_versions_at_the_start_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    amd = Amd.make().trusted(monkeypatch)
    for level in range(4):
        assert sev_snp.verify(amd.report({0x30: level.to_bytes(4, "little")}), amd.files, TODAY)
    for level in (4, 0xFFFFFFFF):  # the second is what AMD's 56860 has for a report that the host asked for
        raw = amd.report({0x30: level.to_bytes(4, "little")})
        assert reason(lambda one=raw: sev_snp.verify(one, amd.files, TODAY)) == "level"
    floor = b'version = 1\nserver = "https://x"\n[sev-snp]\nproducts = ["Genoa"]\n'
    floor += b"tcb = {bootloader = 10, tee = 0, snp = 23, microcode = 84}\n"
    rules = parse_policy(floor, "p", Policy)
    launched = bytes([10, 0, 0, 0, 0, 0, 22, 84])
    assert "old-tcb" not in judge(rules, sev_snp.verify(amd.report(), amd.files, TODAY)).refusals
    refused = judge(rules, sev_snp.verify(amd.report({0x1F0: launched}), amd.files, TODAY)).refusals
    assert "when the guest was started" in refused["old-tcb"] and "snp" in refused["old-tcb"]


# --- Intel ------------------------------------------------------------------------------------------------------------
def verified(collateral: Mapping[str, bytes], now: datetime = NOW) -> VerifiedMachine:
    return intel.verify(Quote().bytes(), collateral, now, forger.intel().root_der)


OLD = Collateral(now=NOW - timedelta(days=7), number=17)
OUT_OF_DATE = ((forger.SVN + 1, "UpToDate", ()), (forger.SVN, "OutOfDate", ("INTEL-SA-00002",)))


def test_of_intels_levels_the_newer_count_whoever_hands_over_older_ones() -> None:
    new = Collateral(levels=OUT_OF_DATE, number=18)
    assert verified(OLD.files()).status == "UpToDate", "it is still current"
    for collateral in in_both_ways(OLD.files(), new.files()):
        found = verified(collateral)
        assert (found.status, found.eval_data_number) == ("OutOfDate", 18)
    same_number = Collateral(levels=OUT_OF_DATE, now=NOW, number=17)
    for collateral in in_both_ways(OLD.files(), same_number.files()):
        assert verified(collateral).status == "OutOfDate", "by its date"


@pytest.mark.parametrize("part", ["pck_crl", "root_ca_crl", "tcb_info", "qe_identity"])
def test_each_of_intels_answers_is_the_newest_also_in_a_mixture(part: str) -> None:
    """A host has all that is new but one answer: the client's newer one of it counts."""
    bad = {
        "pck_crl": Collateral(revoked=[forger.platform().serial]),
        "root_ca_crl": Collateral(revoked_authorities=[forger.intel().platforms.serial]),
        "tcb_info": Collateral(levels=OUT_OF_DATE),
        "qe_identity": Collateral(qe_levels=((9, "UpToDate"), (0, "OutOfDate"))),
    }[part]  # fmt: skip
    clients = json.loads(replace(bad, now=NOW - timedelta(days=1), number=18).content())
    mixed = json.loads(replace(Collateral(), number=18).content())
    old = json.loads(OLD.content())
    for name in (part, *intel.COLLATERAL_PARTS[part]):
        mixed[name] = old[name]
    servers = {"intel": json.dumps(mixed).encode()}
    assert verified(servers).status == "UpToDate"
    for collateral in in_both_ways(servers, {"intel": json.dumps(clients).encode()}):
        if "crl" in part:
            assert reason(lambda one=collateral: verified(one)) == "revoked"
        else:
            assert verified(collateral).status == "OutOfDate"


def test_answers_for_another_platform_and_what_cannot_be_read_do_not_count() -> None:
    other = Collateral(fmspc="00906ed50001", levels=OUT_OF_DATE, number=99).files()["intel"]
    good = OLD.files()["intel"]
    for noise in (other, b"", b"[]", b"{}", b"[" * 100_000, b'{"tcb_info": 3, "pck_crl": [], "qe_identity": "[]"}'):
        for files in ({"intel": good, "intel-2": noise}, {"intel": noise, "intel+1": good}):
            if noise == other:
                files = {name: _with_identity_of(one, good) for name, one in files.items()}
            assert verified(files).status == "UpToDate"
    assert reason(lambda: verified({"intel": b"{}", "intel-2": b"["})) == "quote"


@pytest.mark.parametrize(
    "number",
    ["1e999", "-1e999", "NaN", "1e400", "17.5", "1e30", "9" * 30, "9" * 5_000, "-1", "true", '"99"', "[]", "{}"],
)
def test_a_number_that_is_none_of_intels_levels_does_not_count(number: str) -> None:
    good = OLD.files()["intel"]
    bent = json.loads(good)
    for part in ("tcb_info", "qe_identity"):
        bent[part] = re.sub(r'("tcbEvaluationDataNumber": ?)\d+', lambda found: found[1] + number, bent[part])
        assert bent[part] != json.loads(good)[part]
    noise = json.dumps(bent).encode()
    for files in ({"intel": good, "intel+1": noise}, {"intel": noise, "intel+1": good}):
        assert verified(files).status == "UpToDate"
    for files in ({"intel": noise}, {"intel": noise, "intel+1": noise}):
        assert reason(lambda one=files: verified(one)) == "quote"


def _with_identity_of(document: bytes, good: bytes) -> bytes:
    names = ("qe_identity", "qe_identity_signature", "pck_crl", "root_ca_crl")
    return json.dumps(json.loads(document) | {name: json.loads(good)[name] for name in names}).encode()


def test_a_date_that_was_changed_to_be_the_newest_is_refused_by_its_signature() -> None:
    forged = json.loads(OLD.content())
    forged["tcb_info"] = forged["tcb_info"].replace("2026-10", "2027-10")
    for collateral in in_both_ways({"intel": json.dumps(forged).encode()}, Collateral(levels=OUT_OF_DATE).files()):
        assert reason(lambda one=collateral: verified(one)) == "quote"


def test_a_policy_names_the_least_number_of_intels_levels_and_without_one_the_verdict_says_so() -> None:
    image = f'image = [{{mrenclave = "{forger.MEASUREMENT.hex()}", name = "x", origin = "y"}}]\n'
    rest = '[accept]\nfirst-use = "x"\n'

    def policy(line: str) -> EnclavePolicy:
        return parse_policy(f"version = 1\n[sgx]\n{line}{image}{rest}".encode(), "p", EnclavePolicy)

    machine = verified(OLD.files())
    free = judge(policy(""), machine)
    assert free.holds and any("names no least eval_data_number" in line for line in free.lines())
    assert judge(policy("eval_data_number = 17\n"), machine).holds
    high = judge(policy("eval_data_number = 18\n"), machine)
    assert set(high.refusals) == {"eval-data-number"} and "17" in high.refusals["eval-data-number"]
    gate = QuoteVerifier(policy("eval_data_number = 18\n"), forger.intel().root_der, lambda: NOW)
    with pytest.raises(EnclaveError, match="eval-data-number"):
        gate.verify(Quote().bytes(), forger.DATA, OLD.content())


def test_a_time_before_1970_is_refused_and_nothing_else() -> None:
    for time in (day("1969-12-31"), day("0001-01-01")):
        assert reason(lambda one=time: verified(OLD.files(), one)) == "time"


# --- NVIDIA -----------------------------------------------------------------------------------------------------------
def gpu(who: Nvidia, lists: list[bytes], manifests: list[bytes] | None = None, now: datetime = TODAY) -> VerifiedGpu:
    references = [*who.manifests().values()] if manifests is None else manifests
    return nvidia.verify(who.evidence(NONCE), who.gpu.pem, NONCE, references, lists, now)


def test_nvidias_word_counts_on_every_certificate_but_the_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    who = Nvidia.make().trusted(monkeypatch)
    good = who.statuses(TODAY)
    found = gpu(who, good)
    assert weaknesses(found.claims) == {"relayable-gpu"}
    assert any(claim.source == "not checked" and "NVIDIA publishes nothing" in claim.text for claim in found.claims)
    unknown = who.gpu.status(3, TODAY, state=UNKNOWN)
    assert weaknesses(gpu(who, [*good, unknown]).claims) == {"relayable-gpu"}, "unknown is no word"
    for at in range(len(good)):
        assert "no-gpu-revocation" in weaknesses(gpu(who, good[:at] + good[at + 1 :]).claims), "each one is needed"
    for authority in (who.gpu, who.signer):
        for level in range(len(authority.chain) - 1):
            bad = authority.status(level, TODAY, revoked=True)
            assert reason(lambda one=bad: gpu(who, [*good, one])) == "revoked", "on hold, also a leaf if it is said"
    unknown_authority = who.gpu.status(1, TODAY, state=UNKNOWN)
    assert "no-gpu-revocation" in weaknesses(gpu(who, [*good[:1], unknown_authority, *good[2:]]).claims)


def test_an_answer_without_an_end_counts_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    who = Nvidia.make().trusted(monkeypatch)
    good = who.statuses(TODAY, end=None)  # made an hour before
    assert weaknesses(gpu(who, good).claims) == {"relayable-gpu"}
    late = gpu(who, good, now=TODAY + timedelta(minutes=1))
    assert "no-gpu-revocation" in weaknesses(late.claims)


def test_signers_of_reference_values_are_asked_about_and_the_verdict_says_if_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    who = Nvidia.make().trusted(monkeypatch)
    found = gpu(who, who.statuses(TODAY, signer=False))
    lines = [claim for claim in found.claims if claim.weakness == "no-gpu-revocation"]
    assert [claim.name for claim in lines] == ["rim-revocation"] and "signed these reference values" in lines[0].text


def test_an_answers_signer_may_answer_and_is_itself_valid() -> None:
    who = Authority.make("root", "middle", "leaf")
    other = Authority.make("root", "middle", "leaf")
    rest = who.status(0, TODAY)
    expired = who.responder(1, until=TODAY.replace(tzinfo=None) - timedelta(days=1))
    cases = {
        "good": (who.responder(1), True), "expired": (expired, False),
        "not for it": (who.responder(1, may=False), False),
        "of the root": (who.responder(0), False), "of a stranger": (other.responder(1), False),
    }  # fmt: skip
    for name, (responder, counts) in cases.items():
        answer = who.status(1, TODAY, responder=responder)
        assert chains.require_not_revoked(who.chain, [rest, answer], TODAY, "it") == counts, name


def test_lists_without_number_are_refused() -> None:
    who = Authority.make("root", "middle", "leaf")
    assert reason(lambda: chains.require_not_revoked(who.chain, [b""] * 513, TODAY, "it")) == "size"


def test_an_answer_about_another_authoritys_certificate_of_the_same_number_is_no_word() -> None:
    who, when = Authority.make("root", "middle", "leaf"), TODAY.replace(tzinfo=None)

    def answer(issuer: x509.Certificate) -> bytes:
        builder = ocsp.OCSPResponseBuilder().add_response(
            who.chain[0], issuer, SHA256(), ocsp.OCSPCertStatus.GOOD, when, when + timedelta(days=1), None, None
        ).responder_id(ocsp.OCSPResponderEncoding.NAME, who.chain[1])  # fmt: skip
        return builder.sign(who.keys[1], SHA256()).public_bytes(Encoding.DER)

    rest = who.status(0, TODAY)
    assert chains.require_not_revoked(who.chain, [rest, answer(who.chain[1])], TODAY, "it")
    assert not chains.require_not_revoked(who.chain, [rest, answer(who.chain[2])], TODAY, "it")


@pytest.mark.parametrize("name", [name for name, one in GPUS.items() if not one.reason and not one.references])
def test_manifests_of_other_versions_do_not_matter_whatever_is_wrong_with_them(name: str) -> None:
    sample = replace(GPUS[name], time=TODAY)
    files = [
        content(f"nvidia/{one}") for one in (samples.VBIOS, samples.BAD_VBIOS, "incorrect_signature_driver_rim.xml")
    ]
    measurements = nvidia.SignedMeasurements.parse(sample.raw)
    versions = {measurements.text(nvidia.DRIVER_FIELD), measurements.vbios_version}
    others = [one for one in files if rim.read_chip_and_version(one)[1] not in versions]
    assert others
    found = nvidia.verify(sample.raw, sample.chain, sample.nonce, others, [], TODAY)
    assert found == sample.verified()


def test_an_expired_manifest_is_replaced_by_one_of_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    who = Nvidia.make().trusted(monkeypatch)
    old = who.renewed(TODAY.replace(tzinfo=None) - timedelta(days=1))
    expired, good = [*old.manifests().values()], [*who.manifests().values()]
    assert reason(lambda: gpu(who, who.statuses(TODAY), expired)) == "expired"
    for references in (expired + good, good + expired):
        assert weaknesses(gpu(who, who.statuses(TODAY), references).claims) == {"relayable-gpu"}
    found = nvidia.SignedMeasurements.parse(GPUS["Hopper on hold"].raw)
    wrong = who.manifest(found.vbios_version, {0: b"\xff" * 48})
    assert reason(lambda: gpu(who, [], [*good, wrong])) == "measurement", "all of one version count"


def test_a_manifest_without_active_values_or_with_many_certificates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = content("nvidia/incorrect_signature_driver_rim.xml")
    assert reason(lambda: rim.verify_manifest(changed, day("2026-01-01"))) == "rim-signature"
    who = Nvidia.make().trusted(monkeypatch)
    found = nvidia.SignedMeasurements.parse(GPUS["Hopper on hold"].raw)
    for empty in (
        who.manifest(found.vbios_version, {}),
        who.manifest(found.vbios_version, {0: bytes(48)}, active="False"),
    ):
        assert reason(lambda one=empty: gpu(who, [], [one])) == "rim"
    many = replace(who, signer=replace(who.signer, chain=who.signer.chain * 3))
    assert reason(lambda: rim.verify_manifest(many.manifest("1", {0: bytes(48)}), TODAY)) == "size"


def test_a_name_that_nobody_signed_is_cut_in_a_message() -> None:
    amd = Amd.make()
    strange = replace(amd, authority=Authority.make("ARK-" + "y" * 60, "SEV-Genoa", "SEV-VCEK"))
    with pytest.raises(AttestationError) as refused:
        sev_snp.verify(strange.report(), strange.files, TODAY)
    assert refused.value.reason == "root" and "y" * 41 not in refused.value.message


# --- the whole way: fetched files, a folder, the policy of the docs ---------------------------------------------------
def docs_policy(launch: str) -> Policy:
    text = DOCS.read_text("utf-8").split("## A policy\n```\n", 1)[1].split("```", 1)[0]
    assert '"f57dc09a..."' in text
    return parse_policy(text.replace("f57dc09a...", launch).encode(), "docs", Policy)


def test_the_docs_policy_holds_for_a_good_machine_with_the_files_that_fetch_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    amd, who = Amd.make().trusted(monkeypatch), Nvidia.make().trusted(monkeypatch)
    gpus = ((who.evidence(gpu_nonce(SPKI, NONCE)), who.gpu.pem),)
    data = report_data(SPKI, NONCE, nvidia.gpu_evidence_digest(gpus), b"")
    bare = HardwareEvidence("sev-snp", amd.report({0x50: data}), {}, "milkglass", SPKI, NONCE, gpus)
    manifests = who.manifests()
    makers = Makers({
        "/vcek/v1/Genoa/cert_chain": (200, amd.files["chain"]),
        "/vcek/v1/Genoa/crl": (200, amd.authority.revoked(0, [], TODAY)),
        "/vcek/v1/Genoa/": (200, amd.files["key"]), "/v1/rim/NV_GPU_DRIVER": (200, rim_answer(manifests["DRIVER"])),
        "/v1/rim/NV_GPU_VBIOS": (200, rim_answer(manifests["VBIOS"])), "/ocsp": (200, who.ocsp(TODAY, end=None)),
    })  # fmt: skip

    async def work() -> dict[str, bytes]:
        async with makers.running() as services:
            return await fetch_collateral(bare, None, services)

    for name, file in asyncio.run(work()).items():
        (tmp_path / name).write_bytes(file)
    whole = with_collateral(bare, read_collateral(tmp_path))
    machine, found, bound = evidence.verify(whole, TODAY, SPKI, NONCE)
    verdict = judge(
        docs_policy(machine.measurements["launch"]), machine, found, bound, {machine.machine_id: "2026-11-26"}
    )
    assert verdict.holds, verdict.refusals
    assert set(verdict.accepted_weaknesses) == {"relayable-gpu"}
    assert "hardware proves: it answered our nonce" in map(str, bound)
    (binding, fresh) = evidence.verify(whole, TODAY)[2]
    assert fresh.state == "none" and fresh.source == "not checked", "only who made a recording knows its nonce"
    assert "recorded key" in binding.text
    assert len(re.findall("publishes nothing about that", "\n".join(verdict.lines()))) == 2
    missing = with_collateral(bare, {name: file for name, file in read_collateral(tmp_path).items() if name != "crl"})
    machine, found, bound = evidence.verify(missing, TODAY, SPKI, NONCE)
    refused = judge(
        docs_policy(machine.measurements["launch"]), machine, found, bound, {machine.machine_id: "2026-11-26"}
    ).refusals
    assert set(refused) == {"no-revocation"}


def test_a_folder_is_read_again_when_a_lease_is_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(evidence.intel, "verify", partial(intel.verify, root=forger.intel().root_der))
    quote = Quote(enclave=forger.report(data=report_data(SPKI, NONCE, nvidia.gpu_evidence_digest([]), b""))).bytes()
    document = HardwareEvidence("sgx", quote, {}, "milkglass", SPKI, NONCE).document()
    text = (
        f'image = [{{mrenclave = "{forger.MEASUREMENT.hex()}", name = "x", origin = "y"}}]\n[accept]\nfirst-use = "x"\n'
    )
    rules = parse_policy(f'version = 1\nserver = "https://x"\n[sgx]\n{text}'.encode(), "p", Policy)
    clock = [NOW]
    (tmp_path / "intel.json").write_bytes(Collateral().content())
    verify = channel.make_verifier(rules, {}, collateral_reader(tmp_path), lambda: clock[0])
    assert verify(document, SPKI, NONCE).holds
    clock[0] = NOW + timedelta(days=40)
    assert reason(lambda: verify(document, SPKI, NONCE)) == "expired"
    (tmp_path / "intel.json").write_bytes(Collateral(now=clock[0]).content())
    assert verify(document, SPKI, NONCE).holds, "without a restart"
    (tmp_path / "intel.json").write_bytes(bytes((4 << 20) + 1))
    assert reason(lambda: verify(document, SPKI, NONCE)) == "size"
    (tmp_path / "intel.json").unlink()
    tmp_path.rmdir()
    assert reason(lambda: verify(document, SPKI, NONCE)) == "collateral"
    with pytest.raises(UsageError, match="no folder"):
        collateral_reader(tmp_path)
    assert collateral_reader(None)() == {}


def test_two_files_that_differ_in_their_ending_are_both_read(tmp_path: Path) -> None:
    (tmp_path / "key.der").write_bytes(b"old")
    (tmp_path / "key.pem").write_bytes(b"new")
    files = read_collateral(tmp_path)
    assert sorted(files.values()) == [b"new", b"old"]
    assert all(name.startswith("key") for name in files)


def test_a_file_that_vanishes_or_begins_with_a_dot_refuses_no_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("key.der", "chain.pem", ".crl.der.new", ".DS_Store"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / ".large").write_bytes(bytes((4 << 20) + 1))
    read = collateral_reader(tmp_path)
    assert read() == {"key": b"key.der", "chain": b"chain.pem"}
    is_file = Path.is_file
    for vanishing_before in (True, False):
        (tmp_path / "crl.der").write_bytes(b"crl")

        def vanish(self: Path, before: bool = vanishing_before) -> bool:
            if self.name == "crl.der" and before:
                self.unlink()
            answer = is_file(self)
            if self.name == "crl.der" and not before:
                self.unlink()
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(Path, "is_file", vanish)
            assert set(read()) == {"key", "chain"}
        assert not (tmp_path / "crl.der").exists()


def test_a_use_reads_the_folder_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(evidence.intel, "verify", partial(intel.verify, root=forger.intel().root_der))
    quote = Quote(enclave=forger.report(data=report_data(SPKI, NONCE, nvidia.gpu_evidence_digest([]), b""))).bytes()
    document = HardwareEvidence("sgx", quote, {}, "milkglass", SPKI, NONCE).document()
    (tmp_path / "intel.json").write_bytes(Collateral().content())
    rules = parse_policy(b'version = 1\nserver = "https://x"\n[sgx]\n', "p", Policy)
    reads = list[Path]()

    def counted(folder: Path) -> dict[str, bytes]:
        reads.append(folder)
        return read_collateral(folder)

    monkeypatch.setattr(sources, "read_collateral", counted)
    verify = channel.make_verifier(rules, {}, collateral_reader(tmp_path), lambda: NOW)
    assert "image" in verify(document, SPKI, NONCE).refusals
    assert reads == [tmp_path]
