"""Evidence in the forms of others: Tinfoil's document as it was recorded, and ACI's report after its specification."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from milkglass.attest import evidence, sev_snp
from milkglass.attest.aci import canonical_json, signed_report_data
from milkglass.attest.providers import MAX_UNPACKED_BYTES, PROVIDERS, read_aci, read_tinfoil
from milkglass.errors import AttestationError
from tests.attest.samples import SAMPLES, TDX, TODAY, content, day

NOW = datetime(2026, 11, 26, tzinfo=UTC)
SPKI, NONCE, HOST = bytes(range(32)), bytes(range(32, 64)), "gpu.example"
RECORDED = content("tinfoil/sev_document.json")
BOUND = bytes.fromhex("10ca85437a8e7353494bd4fce763b0aad25107cd8ab5e4a051c28b454f01063e")


def reason(call: Any) -> str:
    with pytest.raises(AttestationError) as refused:
        call()
    return refused.value.reason


# --- Tinfoil ----------------------------------------------------------------------------------------------------------
def test_tinfoils_document_is_unpacked_and_binds_the_key_that_was_recorded() -> None:
    found = read_tinfoil(RECORDED, BOUND, b"", HOST, NOW)
    report = sev_snp.Report.parse(found.raw)
    assert found.kind == "sev-snp" and report.version == 3 and report.report_data[:32] == BOUND
    machine = evidence.VerifiedMachine("sev-snp", "Genoa", report.report_data, {})
    bound = evidence._binding_claims(found, machine, BOUND, b"", True, NOW)
    assert [one.weakness for one in bound] == ["", "not-fresh"]
    assert reason(lambda: evidence._binding_claims(found, machine, SPKI, b"", True, NOW)) == "binding"
    assert reason(lambda: evidence.verify(found, TODAY)) == "collateral", "AMD's certificate is not in it"


@pytest.mark.parametrize(
    "change",
    [
        {"format": "https://tinfoil.sh/predicate/other"}, {"body": "%%%"}, {"body": base64.b64encode(b"x").decode()},
        {"body": base64.b64encode(gzip.compress(bytes(MAX_UNPACKED_BYTES + 1))).decode()},
        {"body": base64.b64encode(gzip.compress(bytes(100 << 20), 9)).decode()},
        {"body": base64.b64encode(gzip.compress(bytes(1_184))[:-6]).decode()}, {"body": None}, {"format": None},
    ],
)  # fmt: skip
def test_a_bent_document_of_tinfoils_is_refused(change: dict[str, Any]) -> None:
    document = json.dumps(json.loads(RECORDED) | change).encode()
    assert reason(lambda: read_tinfoil(document, BOUND, b"", HOST, NOW)) in ("kind", "evidence", "size")


# --- ACI --------------------------------------------------------------------------------------------------------------
def report(**changes: Any) -> dict[str, Any]:
    """A report after the specification, around a recorded quote."""
    keyset = {
        "subject": None, "not_after": int(NOW.timestamp()) + 86_400, "receipt_signing_keys": [], "e2ee_public_keys": [],
        "tls_public_keys": [{"spki_sha256": SPKI.hex(), "domain": HOST}],
    } | changes  # fmt: skip
    inner = {"tee_type": "tdx", "workload_keyset": keyset, "evidence": {"quote": TDX.raw.hex()}}
    return {"api_version": "aci/1", "attestation": inner}


def read(document: dict[str, Any]) -> evidence.HardwareEvidence:
    return read_aci(json.dumps(document).encode(), SPKI, NONCE, HOST, NOW)


def test_acis_statement_has_the_bytes_of_the_specification() -> None:
    found = read(report())
    keyset = report()["attestation"]["workload_keyset"]
    key = SPKI.hex()
    canonical = json.dumps(dict(sorted(keyset.items())), separators=(",", ":")).replace(
        f'{{"spki_sha256":"{key}","domain":"{HOST}"}}', f'{{"domain":"{HOST}","spki_sha256":"{key}"}}'
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    expected = '{"keyset_digest":"sha256:' + digest + '","nonce":"' + NONCE.hex() + '","purpose":"aci.report_data.v1"}'
    assert found.keyset == canonical.encode()
    signed = hashlib.sha256(expected.encode()).digest() + bytes(32)
    machine = evidence.VerifiedMachine("tdx", "", signed, {})
    assert not [
        one.weakness for one in evidence._binding_claims(found, machine, SPKI, NONCE, True, NOW) if one.weakness
    ]
    for bad in (signed[:32] + b"\x01" + bytes(31), bytes(64)):
        other = replace(machine, report_data=bad)
        assert reason(lambda other=other: evidence._binding_claims(found, other, SPKI, NONCE, True, NOW)) == "binding"
    assert reason(lambda: evidence._binding_claims(found, machine, SPKI, bytes(32), True, NOW)) == "binding"
    whole = replace(found, collateral=TDX.collateral)
    at = day("2025-06-25")
    keyset = {**report()["attestation"]["workload_keyset"], "not_after": int(at.timestamp()) + 86_400}
    whole = replace(whole, keyset=canonical_json(keyset))
    assert reason(lambda: evidence.verify(whole, at, SPKI, NONCE)) == "binding", "another quote's data"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tls_public_keys": []}, "binding"), ({"tls_public_keys": None}, "binding"),
        ({"tls_public_keys": [{"spki_sha256": SPKI.hex(), "domain": "other.example"}]}, "binding"),
        ({"tls_public_keys": [{"spki_sha256": bytes(32).hex()}]}, "binding"),
        ({"not_after": int(NOW.timestamp()) - 1}, "expired"), ({"not_after": 10**12}, "expired"),
        ({"not_after": "tomorrow"}, "expired"),
    ],
)  # fmt: skip
def test_a_keyset_without_our_key_or_out_of_date_is_refused(changes: dict[str, Any], expected: str) -> None:
    found = replace(read(report(**changes)), collateral=TDX.collateral)
    signed = signed_report_data(found.keyset, NONCE)
    machine = evidence.VerifiedMachine("tdx", "", signed, {})
    assert reason(lambda: evidence._binding_claims(found, machine, SPKI, NONCE, True, NOW)) == expected


@pytest.mark.parametrize("keyset", [b"", b"[]", b"{}", b'{"not_after": 1}', b"[" * 100_000, b"\xff"])
def test_a_recorded_keyset_that_is_none_is_refused(keyset: bytes) -> None:
    found = replace(read(report()), keyset=keyset)
    machine = evidence.VerifiedMachine("tdx", "", signed_report_data(keyset, NONCE), {})
    assert reason(lambda: evidence._binding_claims(found, machine, SPKI, NONCE, True, NOW)) in ("evidence", "expired")


@pytest.mark.parametrize("spki", [bytes(32), b""])
def test_another_key_than_the_keysets_is_refused_of_a_recording_too(spki: bytes) -> None:
    found = read(report())
    machine = evidence.VerifiedMachine("tdx", "", signed_report_data(found.keyset, NONCE), {})
    assert reason(lambda: evidence._binding_claims(found, machine, spki, NONCE, False, NOW)) == "binding"


def test_a_report_of_another_version_or_hardware_is_refused() -> None:
    good = report()
    inner = good["attestation"]
    for bad, expected in (
        ({**good, "api_version": "aci/2"}, "version"), ({"api_version": "aci/1"}, "version"),
        ({**good, "attestation": {**inner, "tee_type": "nitro"}}, "kind"),
        ({**good, "attestation": {**inner, "evidence": {}}}, "evidence"),
        ({**good, "attestation": {**inner, "evidence": {"quote": "xyz"}}}, "evidence"),
        ({**good, "attestation": {**inner, "workload_keyset": []}}, "kind"),
    ):  # fmt: skip
        assert reason(lambda bad=bad: read(bad)) == expected
    for noise in (b"", b"[]", b"{", b"[" * 100_000):
        for provider in PROVIDERS.values():
            assert reason(lambda noise=noise, one=provider: one.read(noise, SPKI, NONCE, HOST, NOW))


def test_a_recording_of_each_form_can_be_read_again() -> None:
    for found in (read(report()), read_tinfoil(RECORDED, BOUND, b"", HOST, NOW), SAMPLES["Genoa"].evidence):
        assert evidence.HardwareEvidence.parse(found.document()) == found
