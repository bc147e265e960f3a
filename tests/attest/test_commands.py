"""`milkglass attest`: what its commands refuse before they ask anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

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
