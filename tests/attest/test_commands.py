"""`milkglass attest`: what its commands refuse before they ask anybody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from milkglass.attest.sources import EvidenceSource, Software
from milkglass.errors import AttestationError, UsageError
from tests.attest.samples import NEAR, SGX, TDX
from tests.cli.kit import call, refused


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text('version = 1\nserver = "https://another.example"\nkinds = ["software"]\n')
    return path


@pytest.mark.parametrize("command", ["check", "pin"])
def test_a_policy_of_another_server_says_nothing_of_this_one(command: str, policy: Path) -> None:
    """Nothing listens there: a command that asked would fail in another way."""
    found = call("attest", command, "https://127.0.0.1:9/", "--policy", policy)
    refused(found, UsageError.exit_code, "the policy is for https://another.example")


def test_a_file_is_not_released_by_a_policy_of_another_server(policy: Path) -> None:
    found = call("attest", "release", policy, "--to", "https://127.0.0.1:9", "--policy", policy, "--token-file", policy)
    refused(found, UsageError.exit_code, "the policy is for https://another.example")


@pytest.mark.parametrize("time", ["1969-12-31", "1901-01-01", "0001-01-01", "0001-01-01T00:00+14:00",
                                  "9999-12-31T23:59:59-14:00"])  # fmt: skip
def test_a_time_at_which_no_evidence_can_be_judged_is_refused(time: str, tmp_path: Path) -> None:
    for number, sample in enumerate((TDX, NEAR, SGX)):
        path = tmp_path / f"{number}.json"
        path.write_bytes(sample.document())
        found = call("attest", "--replay", path, "--at", time)
        refused(found, AttestationError.exit_code, "1970")


def replay(path: Path, document: bytes, policy: str) -> str:
    """What a replay says by a policy."""
    path.write_bytes(document)
    rules = path.with_suffix(".toml")
    rules.write_text(policy)
    found = call("attest", "--replay", path, "--policy", rules, "--at", "2025-06-25")
    assert found.exit_code == AttestationError.exit_code
    return " ".join(found.output.split())


def test_a_recording_is_judged_in_the_form_that_the_policy_asks_for(tmp_path: Path) -> None:
    head = 'version = 1\nserver = "https://gpu.example"\n[tdx]\n'
    said = "the evidence has the form 'none', and 'milkglass' is asked for"
    assert said in replay(tmp_path / "a.json", TDX.document(), head)
    accepting = replay(tmp_path / "b.json", TDX.document(), head + '[accept]\nunbound = "a trial"\n')
    assert said not in accepting and "no image of the policy" in accepting


def test_a_recorded_keyset_is_read_for_the_server_of_the_policy(tmp_path: Path) -> None:
    key = bytes(32)
    entry = {"domain": "other.example", "spki_sha256": key.hex()}
    keyset = json.dumps({"not_after": 1_751_000_000, "tls_public_keys": [entry]}, separators=(",", ":")).encode()
    recording = replace(TDX, form="aci", spki_digest=key, nonce=bytes(32), keyset=keyset, host="other.example")
    head = 'version = 1\nserver = "https://gpu.example"\nevidence = "aci"\n[tdx]\n'
    found = replay(tmp_path / "a.json", recording.document(), head)
    assert "does not list the connection's key for gpu.example" in found
    other = replay(tmp_path / "b.json", recording.document(), head.replace("gpu.", "other."))
    assert "did not sign a keyset" in other, "listed for that name; the quote is another one's"


def test_a_recording_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(TDX.document().replace(b'"recorded": ""', b'"recorded": "\\u001b[2J\\u001b]0;x\\u0007"'))
    found = call("attest", "--replay", path)
    assert found.exit_code == AttestationError.exit_code and "is no time" in found.output
    error = AttestationError("quote", "it says \x1b[2J \u202e and \x07")
    assert not {"\x1b", "\x07", "\u202e"} & {*found.output, *error.message}


def test_software_has_no_makers_files(tmp_path: Path) -> None:
    path, out = tmp_path / "a.json", tmp_path / "makers"
    path.write_bytes(EvidenceSource(Software()).evidence(bytes(32), bytes(32)).document())
    refused(call("attest", "fetch", path, "--out", out), AttestationError.exit_code, "no maker signs anything")
    assert not out.exists()
