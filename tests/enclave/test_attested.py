"""What an enclave proves of itself to its host: a word is no proof, and a quote is checked each time it is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from milkglass.enclave import folder as at_rest
from milkglass.enclave import gramine, release
from milkglass.enclave.attestation import ATTESTED_KIND, NOT_ATTESTED, make_software_quote
from milkglass.enclave.enclave import Enclave
from milkglass.enclave.verification import COLLATERAL_FILE, QuoteVerifier
from milkglass.errors import EnclaveError
from tests.attest.intel_forger import DATA, MEASUREMENT, NOW, Collateral, Quote, intel, platform, report
from tests.cli.kit import call, document

PUBLIC = bytes(range(32))
HELLO = """
import sys
from milkglass.enclave import program
program.write_message(sys.stdout.buffer, {"kind": "KIND", "measurement": "MEASUREMENT", "holds": []})
sys.stdin.buffer.read()
"""


class QuotedEnclave(Enclave):
    """Its quotes are made here, as the processor would make them."""

    quoted: Callable[[bytes], bytes]

    def challenge(self, nonce: bytes) -> tuple[bytes, bytes]:
        return PUBLIC, self.quoted(release.report_data(PUBLIC, nonce))


def starter(folder: Path, kind: str) -> None:
    """A program `gramine-sgx` whose enclave says that it is of `kind`."""
    path = folder / ATTESTED_KIND
    path.write_text(f"#!{sys.executable}\n{HELLO.replace('KIND', kind).replace('MEASUREMENT', MEASUREMENT.hex())}")
    path.chmod(0o700)


@pytest.fixture
def enclave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QuotedEnclave]:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    starter(tmp_path, ATTESTED_KIND)
    (tmp_path / COLLATERAL_FILE).write_bytes(Collateral().content())
    with QuotedEnclave(ATTESTED_KIND, tmp_path) as running:
        yield running


def of(folder: Path) -> QuoteVerifier:
    """The host's own verifier, with the root of the tests."""
    return replace(QuoteVerifier.of_folder(folder), root=intel().root_der, now=lambda: NOW)


def forged(data: bytes, measurement: bytes = MEASUREMENT) -> bytes:
    return Quote(enclave=report(measurement, data=data)).bytes()


def test_a_program_that_says_it_is_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    starter(tmp_path, "process")
    with pytest.raises(EnclaveError, match="gramine-sgx .*'process'"):
        Enclave(ATTESTED_KIND, tmp_path)


def test_a_word_proves_nothing_and_a_quote_does(enclave: QuotedEnclave) -> None:
    assert not enclave.is_attested and NOT_ATTESTED in enclave.notice
    enclave.quoted = forged
    enclave.attest(MEASUREMENT.hex(), of(enclave.folder))
    assert enclave.is_attested and NOT_ATTESTED not in enclave.notice and "a quote of SGX" in enclave.notice


@pytest.mark.parametrize(
    ("quoted", "words"),
    [
        (lambda data: make_software_quote(ATTESTED_KIND, MEASUREMENT.hex(), data), "no quote"),
        (lambda data: forged(bytes(64)), "another question"),
        (lambda data: forged(data, b"x" * 32), "mrenclave 7878"),
    ],
)
def test_no_other_quote_does(enclave: QuotedEnclave, quoted: Callable[[bytes], bytes], words: str) -> None:
    enclave.quoted = quoted
    with pytest.raises(EnclaveError, match=words):
        enclave.attest(MEASUREMENT.hex(), of(enclave.folder))
    assert not enclave.is_attested


def test_another_measurement_than_the_expected_one_is_refused(enclave: QuotedEnclave) -> None:
    enclave.quoted = forged
    with pytest.raises(EnclaveError, match=f"{MEASUREMENT.hex()}.*{'ab' * 32}"):
        enclave.attest("ab" * 32, of(enclave.folder))
    assert not enclave.is_attested


def test_a_quote_that_ends_at_another_root_than_intels_is_refused(enclave: QuotedEnclave) -> None:
    enclave.quoted = forged
    with pytest.raises(EnclaveError, match="the quote is refused"):
        enclave.attest(MEASUREMENT.hex(), replace(of(enclave.folder), root=None))
    assert not enclave.is_attested


def test_an_enclave_whose_processor_was_revoked_or_that_has_no_collateral_stays_closed(enclave: QuotedEnclave) -> None:
    enclave.quoted = forged
    (enclave.folder / COLLATERAL_FILE).write_bytes(Collateral(revoked=[platform().serial]).content())
    with pytest.raises(EnclaveError, match="revoked"):
        enclave.attest(MEASUREMENT.hex(), of(enclave.folder))
    (enclave.folder / COLLATERAL_FILE).unlink()
    with pytest.raises(EnclaveError, match="collateral"):
        enclave.attest(MEASUREMENT.hex(), of(enclave.folder))
    assert not enclave.is_attested


def test_what_the_hosts_policy_accepts_is_in_every_report(enclave: QuotedEnclave) -> None:
    enclave.quoted = forged
    (enclave.folder / COLLATERAL_FILE).write_bytes(Collateral(levels=((5, "SWHardeningNeeded", ()),)).content())
    with pytest.raises(EnclaveError, match="status SWHardeningNeeded"):
        enclave.attest(MEASUREMENT.hex(), of(enclave.folder))
    (enclave.folder / "policy.toml").write_text('version = 1\n[sgx]\nstatus = ["SWHardeningNeeded"]\n')
    enclave.attest(MEASUREMENT.hex(), of(enclave.folder))
    assert "status SWHardeningNeeded (the policy lists this status)" in enclave.attestation_text


ANSWERING = """
import sys
from pathlib import Path
from milkglass.enclave import program
program.write_message(sys.stdout.buffer, {"kind": "gramine-sgx", "measurement": "MEASUREMENT", "holds": []})
while (message := program.read_message(sys.stdin.buffer)) is not None:
    assert message[0] == {"call": "challenge"} and len(message[1]) == 32
    program.write_message(sys.stdout.buffer, {"public": "00" * 32}, Path("QUOTE").read_bytes())
"""


def test_the_command_fetch_writes_what_intel_signs_beside_the_enclaves_own_quote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dcap_qvl

    folder, asked = tmp_path / "enclave", list[bytes]()
    at_rest.prepare_folder(folder, ATTESTED_KIND)
    not_signed = call("split", "enclave", "fetch", folder)
    assert not_signed.exit_code == 2 and "sign.sh" in not_signed.stderr
    for name in gramine.SIGNED_FILES[ATTESTED_KIND]:
        (folder / name).touch()
    (tmp_path / "quote").write_bytes(Quote().bytes())
    starting = ANSWERING.replace("MEASUREMENT", MEASUREMENT.hex()).replace("QUOTE", str(tmp_path / "quote"))
    (tmp_path / ATTESTED_KIND).write_text(f"#!{sys.executable}\n{starting}")
    (tmp_path / ATTESTED_KIND).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    async def intels(quote: bytes) -> object:
        asked.append(quote)
        return dcap_qvl.QuoteCollateralV3.from_json(Collateral().content().decode())

    monkeypatch.setattr(dcap_qvl, "get_collateral_from_pcs", intels)
    found = document(call("split", "enclave", "fetch", folder, "--json"))
    assert found == {"files": [COLLATERAL_FILE]} and asked == [(tmp_path / "quote").read_bytes()]
    assert (
        of(folder)
        .for_measurement(MEASUREMENT.hex())
        .verify(asked[0], DATA, (folder / COLLATERAL_FILE).read_bytes())
        .holds
    )
