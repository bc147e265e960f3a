"""Recorded evidence gives its named verdict at its named time, and no changed byte changes what it says."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import fields, replace
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milkglass.attest import chains, evidence, intel, nvidia, rim, sev_snp
from milkglass.attest.claims import VerifiedGpu, VerifiedMachine
from milkglass.attest.evidence import HardwareEvidence
from milkglass.attest.sources import EvidenceSource, Software
from milkglass.errors import AttestationError
from tests.attest import samples
from tests.attest.authority import LAST, Authority
from tests.attest.makers import Nvidia
from tests.attest.samples import GPUS, SAMPLES, GpuSample, Sample, content, day

ALWAYS = {"unbound", "not-fresh"}
GPU_ALWAYS = {"relayable-gpu", "no-gpu-revocation"}


# --- what was recorded ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SAMPLES)
def test_a_processors_evidence_gives_its_verdict(name: str) -> None:
    sample = SAMPLES[name]
    if sample.reason:
        with pytest.raises(AttestationError) as refused:
            evidence.verify(sample.evidence, sample.time)
        assert refused.value.reason == sample.reason
        return
    machine, gpus, bound = evidence.verify(sample.evidence, sample.time)
    assert {one.weakness for one in (*machine.claims, *bound) if one.weakness} == sample.weak | ALWAYS
    assert not gpus and all(len(value) in (64, 96) for value in machine.measurements.values())
    assert HardwareEvidence.parse(sample.evidence.document()) == sample.evidence


@pytest.mark.parametrize("name", GPUS)
def test_a_gpus_evidence_gives_its_verdict(name: str) -> None:
    sample = GPUS[name]
    if sample.reason:
        with pytest.raises(AttestationError) as refused:
            sample.verified()
        assert refused.value.reason == sample.reason
        return
    found = sample.verified()
    mode = {"spt": set(), "ppcie": {"ppcie"}, "": {"gpu-mode"}}[sample.mode]
    weak = {one.weakness for one in found.claims if one.weakness}
    assert found.architecture == sample.architecture
    assert found.mode == sample.mode and weak == sample.weak | GPU_ALWAYS | mode
    compared = [one.name for one in found.claims if one.name.startswith("rim-") and not one.weakness]
    assert compared == (["rim-VBIOS"] if samples.VBIOS in sample.references else [])


def test_what_a_processor_states() -> None:
    genoa, *_ = evidence.verify(SAMPLES["Genoa"].evidence, SAMPLES["Genoa"].time)
    assert (genoa.product, genoa.tcb) == ("Genoa", {"bootloader": 10, "tee": 0, "snp": 23, "microcode": 84})
    runtime = bytes(samples.AZURE["report"])[1216 + 20 :]  # Azure signs SHA-256 of a JSON behind the report
    found = runtime[runtime.index(b"{") : runtime.rindex(b"}") + 1]
    import hashlib

    assert genoa.report_data == hashlib.sha256(found).digest() + bytes(32)
    tdx, *_ = evidence.verify(samples.TDX, day("2025-06-25"))
    assert (
        tdx.status == "UpToDate"
        and tdx.measurements["mrtd"].startswith("91eb2b44")
        and tdx.machine_id.startswith("811dca2a")
    )
    sgx, *_ = evidence.verify(samples.SGX, day("2025-06-25"))
    assert sgx.report_data.startswith(b"Hello, world!") and sgx.measurements["mrenclave"].startswith("33d8736d")


@pytest.mark.parametrize("name", samples.PARSED)
def test_quotes_without_collateral_are_parsed_and_refused_for_it(name: str) -> None:
    with pytest.raises(AttestationError) as refused:
        intel.verify(content(name), {}, samples.TODAY)
    assert refused.value.reason == "collateral"


def test_turins_key_ends_at_amds_root_and_has_another_layout() -> None:
    leaf = chains.parse_certificates(content("virtee-sev/vcek_turin.der"), "x")[0]
    chain, product = sev_snp._order_chain(leaf, chains.parse_certificates(content("virtee-sev/cert_chain_turin"), "x"))
    chains.require_chain(chain, sev_snp.ROOT_SPKI_DIGESTS[product], samples.TODAY, "x")
    assert product == "Turin"
    assert sev_snp.tcb_versions(bytes([1, 2, 3, 4, 0, 0, 0, 5]), "Turin") == {
        "fmc": 1, "bootloader": 2, "tee": 3, "snp": 4, "microcode": 5
    }  # fmt: skip
    assert sev_snp.tcb_versions(bytes([1, 2, 0, 0, 0, 0, 3, 4]), "Genoa") == {
        "bootloader": 1, "tee": 2, "snp": 3, "microcode": 4
    }  # fmt: skip


@pytest.mark.parametrize(("name", "chip"), [("a switch", None), ("Hopper", "HOPPER")])
@pytest.mark.parametrize("label", ["HOPPER", "BLACKWELL", "LS10", None])
def test_no_label_beside_evidence_says_what_a_device_is(name: str, chip: str | None, label: str | None) -> None:
    document = json.loads(replace(SAMPLES["Genoa"].evidence, gpus=((GPUS[name].raw, GPUS[name].chain),)).document())
    document["gpus"][0] |= {} if label is None else {"arch": label}
    recording = HardwareEvidence.parse(json.dumps(document).encode())
    if chip is not None:
        _, (gpu,), _ = evidence.verify(recording, samples.TODAY)
        assert gpu.architecture == chip
        return
    with pytest.raises(AttestationError, match="LS_10") as refused:
        evidence.verify(recording, samples.TODAY)
    assert refused.value.reason == "architecture"


def made(*middle: str) -> Nvidia:
    return Nvidia(Authority.make("Device Identity CA", "GH100 Identity", *middle, "FMC"), Nvidia.signers(LAST))


@pytest.mark.parametrize("middle", [
    ("NVIDIA LS_10 Provisioner ICA 1", "NVIDIA GH100 Provisioner ICA 1"),  # a device's own key can sign a second name
    ("NVIDIA LS_10 Provisioner ICA 1", "BROM"), ("NVIDIA GH100 Provisioner ICA 1 of another", "BROM"),
    ("GH100 A01 GSP BROM",), (),
])  # fmt: skip
def test_the_chip_is_what_nvidias_own_authority_is_named_for(
    middle: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    who, nonce = made(*middle).trusted(monkeypatch), bytes(32)
    with pytest.raises(AttestationError) as refused:
        nvidia.verify(who.evidence(nonce), who.gpu.pem, nonce, [], [], samples.TODAY)
    assert refused.value.reason == "architecture"


def test_reference_values_of_another_chip_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    nonce, weak_of = bytes(32), dict[str, set[str]]()
    for chip in ("GH100", "GB100"):
        who = Nvidia.make(chip).trusted(monkeypatch)
        found = nvidia.verify(
            who.evidence(nonce), who.gpu.pem, nonce, [*who.manifests().values()], [], samples.TODAY
        )  # fmt: skip
        weak_of[found.architecture] = {one.weakness for one in found.claims if one.weakness}
    assert "no-rim" not in weak_of["HOPPER"] and "no-rim" in weak_of["BLACKWELL"]


def test_what_is_signed_of_a_manifest_decides_which_chip_and_version_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    who, nonce = Nvidia.make().trusted(monkeypatch), bytes(32)
    driver = nvidia.SignedMeasurements.parse(who.evidence(nonce)).text(nvidia.DRIVER_FIELD)
    other = who.manifest("570.0", {0: bytes(48)})
    monkeypatch.setattr(rim, "read_chip_and_version", lambda raw: ("GH100", driver))
    with pytest.raises(AttestationError, match="another chip or version") as refused:
        nvidia.verify(who.evidence(nonce), who.gpu.pem, nonce, [other], [], samples.TODAY)
    assert refused.value.reason == "rim"


def test_four_gpus_are_four_devices_and_one_twice_is_refused() -> None:
    four = [GPUS[f"one of four, {number}"].verified() for number in range(4)]
    nvidia.require_distinct(four)
    with pytest.raises(AttestationError) as refused:
        nvidia.require_distinct([*four, four[2]])
    assert refused.value.reason == "duplicate"


def test_one_index_of_a_changed_manifest_differs_and_the_real_one_agrees_in_all() -> None:
    real, changed = (
        rim.verify_manifest(content(f"nvidia/{name}"), day("2025-01-01")) for name in (samples.VBIOS, samples.BAD_VBIOS)
    )
    assert real.version == changed.version == "96.00.5E.00.01" and len(real.values) == 12
    assert [at for at in real.values if real.values[at] != changed.values[at]] == [9]


# --- changed bytes ----------------------------------------------------------------------------------------------------
def verified_fields(found: VerifiedMachine | VerifiedGpu) -> tuple[object, ...]:
    return tuple(repr(getattr(found, one.name)) for one in fields(found))


def flips(raw: bytes, tried: list[int], check: object, good: tuple[object, ...]) -> tuple[int, int]:
    """Changes a byte at each place. Returns how many changes were refused, and how many left every field equal."""
    rng, refused, equal = np.random.default_rng(0), 0, 0
    for at in tried:
        changed = bytearray(raw)
        changed[at] ^= 1 << int(rng.integers(8))
        try:
            found = check(bytes(changed))  # type: ignore[operator]
        except AttestationError:
            refused += 1
            continue
        assert verified_fields(found) == good, f"the change of byte {at} was accepted, and changed a field"
        equal += 1
    print(f"{len(tried)} changes of {len(raw)} bytes: refused {refused}, equal {equal}")
    return refused, equal


def test_each_changed_byte_of_a_report_is_refused() -> None:
    sample = SAMPLES["Genoa"].evidence
    good = sev_snp.verify(sample.raw, sample.collateral, samples.TODAY)
    result = flips(
        sample.raw, list(range(len(sample.raw))), lambda raw: sev_snp.verify(raw, sample.collateral, samples.TODAY),
        verified_fields(good),
    )  # fmt: skip
    assert result == (1_184, 0), "also the 368 bytes that nobody signs"


@pytest.mark.parametrize("part", ["key", "chain"])
def test_a_changed_byte_of_a_processors_certificates_changes_no_field(part: str) -> None:
    sample = SAMPLES["Milan"].evidence
    good = sev_snp.verify(sample.raw, sample.collateral, samples.TODAY)
    raw = sample.collateral[part]
    tried = list(range(0, len(raw), 1 if part == "key" else 13))
    refused, equal = flips(
        raw, tried, lambda one: sev_snp.verify(sample.raw, {**sample.collateral, part: one}, samples.TODAY),
        verified_fields(good),
    )  # fmt: skip
    assert refused > 0.9 * len(tried) and refused + equal == len(tried)


@pytest.mark.parametrize("name", ["TDX", "SGX"])
def test_a_changed_byte_of_a_quote_changes_no_field(name: str) -> None:
    sample = SAMPLES[name]
    raw = sample.evidence.raw
    good = intel.verify(raw, sample.evidence.collateral, sample.time)
    signed = 632 if name == "TDX" else 432
    tried = [*range(signed), *range(signed, len(raw), 7)]
    refused, equal = flips(
        raw, tried, lambda one: intel.verify(one, sample.evidence.collateral, sample.time), verified_fields(good)
    )
    assert refused >= signed and refused + equal == len(tried)


def test_each_changed_byte_of_a_gpus_evidence_is_refused() -> None:
    sample = GPUS["Hopper on hold"]
    good = verified_fields(sample.verified())
    tried = list(range(0, len(sample.raw), 7))
    result = flips(sample.raw, tried, lambda raw: replace(sample, raw=raw, nonce=sample.nonce).verified(), good)
    assert result == (len(tried), 0)


def test_a_changed_byte_of_a_manifest_changes_no_value() -> None:
    raw = content(f"nvidia/{samples.VBIOS}")
    good = rim.verify_manifest(raw, day("2025-01-01"))
    rng, refused = np.random.default_rng(1), 0
    tried = range(0, len(raw), 41)
    for at in tried:
        changed = bytearray(raw)
        changed[at] ^= 1 << int(rng.integers(7))
        try:
            assert rim.verify_manifest(bytes(changed), day("2025-01-01")) == good, at
        except AttestationError:
            refused += 1
    print(f"a manifest: {len(tried)} changes of {len(raw)} bytes: refused {refused}, equal {len(tried) - refused}")
    assert refused > 0.95 * len(tried)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in SAMPLES.items() if not one.reason])
def test_every_byte_of_every_sample(name: str) -> None:
    sample = SAMPLES[name]
    good = verified_fields(evidence.verify(sample.evidence, sample.time)[0])
    raw = sample.evidence.raw
    refused, equal = flips(
        raw, list(range(len(raw))), lambda one: evidence.verify(replace(sample.evidence, raw=one), sample.time)[0], good
    )
    print(name, len(raw), "refused", refused, "equal", equal)
    assert refused + equal == len(raw)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in GPUS.items() if not one.reason])
def test_every_byte_of_every_gpus_evidence(name: str) -> None:
    sample = GPUS[name]
    refused, equal = flips(
        sample.raw, list(range(len(sample.raw))), lambda raw: replace(sample, raw=raw).verified(),
        verified_fields(sample.verified()),
    )  # fmt: skip
    print(name, len(sample.raw), "refused", refused, "equal", equal)
    assert equal == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in SAMPLES.items() if not one.reason])
def test_every_byte_of_what_the_maker_signed_beside_every_sample(name: str) -> None:
    """Certificates, revocation lists and levels: a changed byte is refused, or what is verified stays the same."""
    sample = SAMPLES[name]
    found, collateral = sample.evidence, sample.evidence.collateral
    good = verified_fields(evidence.verify(found, sample.time)[0])
    for part, raw in collateral.items():
        refused, equal = flips(
            raw, list(range(len(raw))),
            lambda one, part=part: evidence.verify(  # type: ignore[misc]
                replace(found, collateral={**collateral, part: one}), sample.time
            )[0],
            good,
        )  # fmt: skip
        print(name, part, len(raw), "refused", refused, "equal", equal)
        assert refused + equal == len(raw) and refused > 0.8 * len(raw)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Hopper", "Hopper on hold", "Blackwell"])
def test_every_byte_of_a_gpus_certificates(name: str) -> None:
    sample = GPUS[name]
    refused, equal = flips(
        sample.chain, list(range(len(sample.chain))), lambda raw: replace(sample, chain=raw).verified(),
        verified_fields(sample.verified()),
    )  # fmt: skip
    print(name, len(sample.chain), "refused", refused, "equal", equal)
    assert refused > 0.8 * len(sample.chain)


@pytest.mark.slow
def test_every_byte_of_a_manifest() -> None:
    raw = content(f"nvidia/{samples.VBIOS}")
    good, rng, refused = rim.verify_manifest(raw, day("2025-01-01")), np.random.default_rng(1), 0
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1 << int(rng.integers(8))
        try:
            assert rim.verify_manifest(bytes(changed), day("2025-01-01")) == good, at
        except AttestationError:
            refused += 1
    print("a manifest", len(raw), "refused", refused, "equal", len(raw) - refused)
    assert refused > 0.95 * len(raw)


# --- hostile documents ------------------------------------------------------------------------------------------------
@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=1_400), st.integers(0, 1_184))
def test_no_bytes_do_anything_but_a_refusal(noise: bytes, at: int) -> None:
    genoa, hopper = SAMPLES["Genoa"].evidence, GPUS["Hopper"]
    for raw in (noise, genoa.raw[:at] + noise, genoa.raw[: max(0, at - len(noise))] + noise + genoa.raw[at:]):
        if raw == genoa.raw:
            continue
        for check in (
            lambda one: sev_snp.verify(one, genoa.collateral, samples.TODAY),
            lambda one: intel.verify(one, samples.TDX.collateral, samples.TODAY),
            lambda one: nvidia.verify(hopper.raw[:37] + one, hopper.chain, None, [], [], samples.TODAY),
            lambda one: chains.parse_certificates(one, "noise"),
            lambda one: rim.verify_manifest(one, samples.TODAY),
            HardwareEvidence.parse,
        ):
            with pytest.raises(AttestationError):
                check(raw)


@settings(max_examples=100, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda part: st.lists(part, max_size=4) | st.dictionaries(
        st.sampled_from(["milkglass_evidence", "kind", "evidence", "collateral", "gpus", "spki", "nonce", "form"]), part
    ), max_leaves=12,
))  # fmt: skip
def test_no_json_does_anything_but_a_refusal(document: object) -> None:
    with pytest.raises(AttestationError):
        HardwareEvidence.parse(json.dumps(document).encode())


def test_documents_that_are_too_large_or_too_deep_are_refused() -> None:
    good = json.loads(samples.TDX.document())
    for bad in (
        b"[" * 100_000,
        b'{"milkglass_evidence": 1, "kind": "tdx", "evidence": "' + b"A" * (11 << 20) + b'"}',
        json.dumps({**good, "gpus": [{}] * 65}).encode(),
        json.dumps({**good, "evidence": base64.b64encode(bytes(70 << 10)).decode()}).encode(),
        json.dumps({**good, "collateral": {"intel": base64.b64encode(b"x" * (2 << 20)).decode()}}).encode(),
        gzip.compress(bytes(1 << 20)),
    ):
        with pytest.raises(AttestationError):
            evidence.verify(HardwareEvidence.parse(bad), day("2025-06-25"))
    many = content("virtee-sev/cert_chain_milan") * 20
    with pytest.raises(AttestationError) as refused:
        chains.parse_certificates(many, "a chain")
    assert refused.value.reason == "size"


def test_manifests_with_a_document_type_or_without_end_are_refused() -> None:
    raw = content(f"nvidia/{samples.VBIOS}").decode()
    laughs = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>' + raw
    for bad in (
        laughs,
        '<?xml version="1.0" encoding="utf-16"?>' + raw,
        raw.replace("<ns0:Payload", "<ns0:Payload>" * 5_000 + "<ns0:Payload", 1),
        "<a>" * 100_000,
        raw + "x" * (1 << 20),
        laughs.encode("utf-16").decode("latin-1"),
    ):
        with pytest.raises(AttestationError):
            rim.verify_manifest(bad.encode("utf-8", "replace"), day("2025-01-01"))


def wrapped(raw: str) -> list[str]:
    """Documents in which what is signed stands somewhere else, and forged values where a careless reader looks."""
    forged = raw.replace("c3f65ef79a19", "000000000000", 1)
    body, signature = raw.split("<Signature" if "<Signature" in raw else "<ds:Signature", 1)
    signature = ("<Signature" if "<Signature" in raw else "<ds:Signature") + signature
    signature, tail = signature.rsplit("</SoftwareIdentity>", 1)
    head, rest = forged.split(">", 1)
    inner = rest.rsplit("</SoftwareIdentity>", 1)[0].split(signature[:20], 1)[0]
    return [
        forged,
        f"{head}>{inner}{signature}<Extra>{raw}</Extra></SoftwareIdentity>",
        f"{head}>{inner}<Extra>{raw}</Extra></SoftwareIdentity>",
        f"<Wrap>{raw}</Wrap>",
        f"{head}>{inner}{signature}{signature}</SoftwareIdentity>",
    ]


def test_values_that_the_signature_does_not_cover_are_never_read() -> None:
    raw = content(f"nvidia/{samples.VBIOS}").decode()
    good = rim.verify_manifest(raw.encode(), day("2025-01-01"))
    for number, bad in enumerate(wrapped(raw)):
        try:
            assert rim.verify_manifest(bad.encode(), day("2025-01-01")) == good, number
        except AttestationError:
            continue


# --- revocation -------------------------------------------------------------------------------------------------------
def test_a_revoked_key_is_refused_and_a_current_list_is_said() -> None:
    from tests.attest.authority import Authority

    who = Authority.make("root", "middle", "leaf")
    now = samples.TODAY
    current = [who.revoked(level, [], now) for level in (0, 1)]
    assert chains.require_not_revoked(who.chain, current, now, "it")
    assert not chains.require_not_revoked(who.chain, current[:1], now, "it"), "one authority gave no list"
    assert not chains.require_not_revoked(who.chain, current, now + timedelta(days=90), "it"), "they are too old"
    for level, serial in ((1, who.chain[0].serial_number), (0, who.chain[1].serial_number)):
        with pytest.raises(AttestationError) as refused:
            chains.require_not_revoked(who.chain, [who.revoked(level, [serial], now)], now, "it")
        assert refused.value.reason == "revoked"
    other = Authority.make("root", "middle", "leaf")
    forged = other.revoked(1, [], now)
    assert not chains.require_not_revoked(who.chain, [forged], now, "it"), "another authority of the same name"
    with pytest.raises(AttestationError):
        chains.require_not_revoked(who.chain, [b"noise"], now, "it")


def test_an_answer_of_ocsp_counts_as_a_list() -> None:
    from tests.attest.authority import Authority

    who, now = Authority.make("root", "middle", "leaf"), samples.TODAY
    good = [who.status(level, now) for level in (0, 1)]
    assert chains.require_not_revoked(who.chain, good, now, "it")
    with pytest.raises(AttestationError) as refused:
        chains.require_not_revoked(who.chain, [who.status(1, now, revoked=True)], now, "it")
    assert refused.value.reason == "revoked", "a key on hold as well"
    other = Authority.make("root", "middle", "leaf")
    assert not chains.require_not_revoked(who.chain, [other.status(1, now)], now, "it")


def test_a_sample_says_what_it_is() -> None:
    assert isinstance(SAMPLES["TDX"], Sample) and isinstance(GPUS["Hopper"], GpuSample)


def test_a_recording_of_the_stand_in_is_not_said_to_have_our_nonce() -> None:
    answered = EvidenceSource(Software()).evidence(bytes(32), bytes(32))
    (live,) = evidence.verify(answered, day("2026-11-27"), bytes(32), bytes(32))[2]
    (replayed,) = evidence.verify(answered, day("2026-11-27"))[2]
    assert "our nonce" in live.text and "our nonce" not in replayed.text
