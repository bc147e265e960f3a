"""What an enclave proves of itself to its host: a word is no proof, and a quote is checked each time it is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from milkglass.enclave import release
from milkglass.enclave.attestation import ATTESTED, NOT_ATTESTED, software_quote
from milkglass.enclave.enclave import Enclave
from milkglass.enclave.quote import Trust
from milkglass.errors import EnclaveError
from tests.enclave.test_quote import MEASUREMENT, SIGNER, Forge, authority, raw_point, report

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
    path = folder / ATTESTED
    path.write_text(f"#!{sys.executable}\n{HELLO.replace('KIND', kind).replace('MEASUREMENT', MEASUREMENT.hex())}")
    path.chmod(0o700)


@pytest.fixture
def enclave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QuotedEnclave]:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    starter(tmp_path, ATTESTED)
    with QuotedEnclave(ATTESTED, tmp_path) as running:
        yield running


def trust() -> Trust:
    return Trust(raw_point(authority().root), SIGNER)


def forged(data: bytes, measurement: bytes = MEASUREMENT) -> bytes:
    return Forge(enclave=report(measurement, b"S" * 32, data)).bytes()


def test_a_program_that_says_it_is_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    starter(tmp_path, "process")
    with pytest.raises(EnclaveError, match="gramine-sgx .*'process'"):
        Enclave(ATTESTED, tmp_path)


def test_a_word_proves_nothing_and_a_quote_does(enclave: QuotedEnclave) -> None:
    assert not enclave.attested and NOT_ATTESTED in enclave.notice
    enclave.quoted = forged
    enclave.attest(MEASUREMENT.hex(), trust())
    assert enclave.attested and NOT_ATTESTED not in enclave.notice and "a quote of SGX" in enclave.notice


@pytest.mark.parametrize(
    ("quoted", "words"),
    [
        (lambda data: software_quote(ATTESTED, MEASUREMENT.hex(), data), "version"),
        (lambda data: forged(bytes(64)), "another question"),
        (lambda data: forged(data, b"x" * 32), "measurement .*7878"),
    ],
)
def test_no_other_quote_does(enclave: QuotedEnclave, quoted: Callable[[bytes], bytes], words: str) -> None:
    enclave.quoted = quoted
    with pytest.raises(EnclaveError, match=words):
        enclave.attest(MEASUREMENT.hex(), trust())
    assert not enclave.attested


def test_another_measurement_than_the_expected_one_is_refused(enclave: QuotedEnclave) -> None:
    enclave.quoted = forged
    with pytest.raises(EnclaveError, match=f"{MEASUREMENT.hex()}.*{'ab' * 32}"):
        enclave.attest("ab" * 32, trust())
    assert not enclave.attested


def test_a_quote_that_ends_at_another_root_than_intels_is_refused(enclave: QuotedEnclave) -> None:
    enclave.quoted = forged
    with pytest.raises(EnclaveError, match="root"):
        enclave.attest(MEASUREMENT.hex())
