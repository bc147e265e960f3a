"""What the provider releases reaches the enclave whole, or not at all; what is sealed opens for one enclave only."""

from __future__ import annotations

import base64
import re
import time
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from milkglass.enclave import attestation, release
from milkglass.enclave.attestation import make_software_quote
from milkglass.enclave.budget import ROWS_AHEAD, RowBudget, RowPolicy, RowsNotCharged
from milkglass.enclave.package import TablePackage
from milkglass.enclave.verification import QuoteVerifier
from milkglass.errors import EnclaveError, UsageError
from milkglass.split.decoder.gate import ReleaseRequest, TableGate, measurements_of
from tests.attest.intel_forger import MEASUREMENT, NOW, Collateral, Quote, intel, platform, report

NONCE = bytes(range(32))
SIZES = (0, 1, release.PIECE_BYTES - 1, release.PIECE_BYTES, release.PIECE_BYTES + 1, 3 * release.PIECE_BYTES)


@pytest.fixture
def own() -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


def sent(own: X25519PrivateKey, content: bytes) -> bytes:
    return b"".join(release.encrypt_package(content, own.public_key().public_bytes_raw(), NONCE))


@pytest.mark.parametrize("size", SIZES)
def test_a_package_of_any_size_comes_back(own: X25519PrivateKey, size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    assert release.decrypt_package(sent(own, content), own, NONCE) == content


def test_a_package_that_was_changed_cut_or_reordered_is_refused(own: X25519PrivateKey) -> None:
    content = np.random.default_rng(1).bytes(2 * release.PIECE_BYTES + 100)
    whole, step = sent(own, content), release.PIECE_BYTES + release.TAG_BYTES
    head, pieces = whole[:32], [whole[32 + i * step : 32 + (i + 1) * step] for i in range(3)]
    changed = bytearray(whole)
    changed[100] ^= 1
    for bad in (
        bytes(changed), whole[:-1], head + pieces[0] + pieces[1], head + pieces[1] + pieces[0] + pieces[2],
        head + pieces[0] + pieces[2], head + pieces[0] + pieces[0] + pieces[2], whole + pieces[2], head, b"",
        bytes(32) + whole[32:],
    ):  # fmt: skip
        with pytest.raises(EnclaveError):
            release.decrypt_package(bad, own, NONCE)


def test_another_enclave_or_nonce_cannot_read_it(own: X25519PrivateKey) -> None:
    whole = sent(own, b"the table")
    with pytest.raises(EnclaveError):
        release.decrypt_package(whole, X25519PrivateKey.generate(), NONCE)
    with pytest.raises(EnclaveError):
        release.decrypt_package(whole, own, bytes(32))
    with pytest.raises(EnclaveError, match="X25519"):
        list(release.encrypt_package(b"x", bytes(32), NONCE))


def test_the_report_data_binds_the_key_and_the_nonce() -> None:
    one = release.report_data(bytes(32), NONCE)
    assert len(one) == 64
    assert len({one, release.report_data(bytes(31) + b"\1", NONCE), release.report_data(bytes(32), bytes(32))}) == 3


def test_what_is_sealed_opens_for_its_enclave_only() -> None:
    key = attestation.sealing_key(b"s" * 32, "aa")
    sealed = attestation.seal(key, "table", b"rows")
    assert attestation.unseal(key, "table", sealed) == b"rows"
    assert attestation.seal(key, "table", b"rows") != sealed
    for other, name, content in (
        (attestation.sealing_key(b"s" * 32, "ab"), "table", sealed),
        (attestation.sealing_key(b"t" * 32, "aa"), "table", sealed),
        (key, "state", sealed), (key, "table", sealed[:-1]), (key, "table", b""),
        (key, "table", bytes([sealed[0] ^ 1]) + sealed[1:]),
    ):  # fmt: skip
        with pytest.raises(EnclaveError, match="does not open"):
            attestation.unseal(other, name, content)


# --- the limit of rows ------------------------------------------------------------------------------------------------
class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def spend(budget: RowBudget, rows: int) -> None:
    """As the enclave does it: what is not charged yet is charged, then taken."""
    try:
        budget.take(rows)
    except RowsNotCharged:
        budget.charge(rows)
        budget.take(rows)


def test_rows_leave_at_the_providers_rate() -> None:
    clock = Clock()
    budget = RowBudget(RowPolicy(per_hour=3600, burst=100), 100.0, clock)
    spend(budget, 100)
    with pytest.raises(EnclaveError, match="leaves 0"):
        spend(budget, 1)
    clock.now += 10
    spend(budget, 10)
    with pytest.raises(EnclaveError, match="in 1 s"):
        spend(budget, 1)
    clock.now -= 500  # a clock that is set back fills nothing
    with pytest.raises(EnclaveError):
        spend(budget, 1)
    clock.now += 10_000
    spend(budget, 100)
    with pytest.raises(EnclaveError):
        spend(budget, 1)
    with pytest.raises(EnclaveError, match="101 tokens"):
        spend(budget, 101)


def test_no_more_than_a_burst_leaves_at_once_or_is_ever_in_the_bucket() -> None:
    clock = Clock()
    budget = RowBudget(RowPolicy(per_hour=3600, burst=100), 100.0, clock)
    budget.charge(100)
    budget.take(1)  # 99 are charged and were not used
    clock.now += 10_000
    with pytest.raises(RowsNotCharged):
        budget.take(100)
    budget.charge(100)
    assert budget.charged_count + budget.level == 100
    with pytest.raises(EnclaveError, match=r"\b150 tokens\b.*\b100\b"):
        budget.take(150)


def test_setting_the_date_fills_no_bucket() -> None:
    assert RowBudget(RowPolicy(), 0.0).clock is time.monotonic


def test_a_table_cannot_be_read_faster_than_is_stated() -> None:
    clock = Clock()
    policy = RowPolicy(per_hour=600, burst=50)
    budget, rows, seen, calls = RowBudget(policy, 50.0, clock), 1000, 0, 0
    while seen < rows:
        calls += 1
        try:
            spend(budget, 1)
            seen += 1
        except EnclaveError:
            clock.now += 1
    assert calls >= rows
    assert (clock.now - 1000) / 3600 >= policy.hours(rows) > 1.5


def test_what_was_charged_is_gone_unless_it_is_refunded() -> None:
    clock = Clock()
    policy = RowPolicy(per_hour=3600, burst=1000)
    budget = RowBudget(policy, 1000.0, clock)
    with pytest.raises(RowsNotCharged):
        budget.take(1)
    assert budget.charge(1) == 1000 - ROWS_AHEAD, "this is written before the row leaves"
    budget.take(ROWS_AHEAD)
    with pytest.raises(RowsNotCharged):
        budget.take(1)
    assert budget.charge(500) == 1000 - ROWS_AHEAD - 500
    budget.take(1)
    assert budget.refund() == 1000 - ROWS_AHEAD - 1 and budget.charged_count == 0
    with pytest.raises(EnclaveError, match=f"leaves {1000 - ROWS_AHEAD - 1}"):
        budget.charge(1000)
    with pytest.raises(RowsNotCharged):
        budget.take(1)


# --- the package ------------------------------------------------------------------------------------------------------
def package() -> TablePackage:
    rows = np.random.default_rng(1).integers(0, 255, (20, 8), np.uint8)
    special = np.arange(20) < 2
    return TablePackage(rows, special, "bfloat16", "digest", RowPolicy(5, 4), files={"tokenizer.json": "{}"})


def test_a_package_survives_its_bytes_and_loses_the_files_when_lists_are_added() -> None:
    one = package()
    back = TablePackage.from_bytes(one.to_bytes())
    assert (back.rows == one.rows).all() and (back.special == one.special).all()
    assert (back.dtype, back.tokenizer_digest, back.policy, back.files) == (
        one.dtype,
        one.tokenizer_digest,
        one.policy,
        one.files,
    )
    assert back.width == 4 and back.near is None
    full = TablePackage.from_bytes(one.with_lists(np.zeros((18, 2), np.int32), np.ones((18, 2))).to_bytes())
    assert full.near is not None and full.near.shape == (18, 2) and not full.files


@pytest.mark.parametrize("bad", [b"", b"x" * 100, b"\0" * 200])
def test_bytes_that_are_no_package_are_refused(bad: bytes) -> None:
    with pytest.raises(EnclaveError, match="no table"):
        TablePackage.from_bytes(bad)


@pytest.mark.parametrize("name", ["../seal.key", "state.bin", "tokenizer.json/..", "model.safetensors"])
def test_a_package_hands_out_a_tokenizers_files_alone(name: str) -> None:
    with pytest.raises(EnclaveError, match="no table"):
        TablePackage.from_bytes(replace(package(), files={name: "{}"}).to_bytes())


def test_the_gate_encodes_its_package_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    encode = TablePackage.to_bytes
    monkeypatch.setattr(TablePackage, "to_bytes", lambda one: calls.append(1) or encode(one))
    gate = TableGate(package(), allow_unattested=True)
    for _ in range(3):
        own, nonce = X25519PrivateKey.generate(), gate.challenge()
        public = own.public_key().public_bytes_raw()
        data = release.report_data(public, bytes.fromhex(nonce))
        quote = base64.b64encode(make_software_quote("process", "", data)).decode()
        answer = b"".join(gate.release(ReleaseRequest(nonce=nonce, public=public.hex(), quote=quote)))
        assert (
            TablePackage.from_bytes(release.decrypt_package(answer, own, bytes.fromhex(nonce))).files == package().files
        )
    assert calls == [1]


@pytest.mark.parametrize("policy", [RowPolicy(-5, 0), RowPolicy(0, 0), RowPolicy(1, 0), RowPolicy(7, True)])
def test_a_package_with_a_limit_that_is_none_is_refused(policy: RowPolicy) -> None:
    with pytest.raises(EnclaveError, match="no table"):
        TablePackage.from_bytes(replace(package(), policy=policy).to_bytes())


def test_a_measurement_is_64_hex_digits() -> None:
    assert measurements_of(["AB" * 32]) == {"ab" * 32}
    for bad in ("ab" * 31, "xy" * 32, "", "ab" * 32 + "\n"):
        with pytest.raises(UsageError, match=f"{re.escape(repr(bad))}.*64"):
            measurements_of([bad])


def test_the_gate_releases_to_a_quote_that_counts_and_to_no_other() -> None:
    """Over the whole way of a request: the quote's report data, the collateral of the client, the encrypted package."""
    found = QuoteVerifier.of_measurements([MEASUREMENT.hex()])
    gate = TableGate(package(), replace(found, root=intel().root_der, now=lambda: NOW))
    own = X25519PrivateKey.generate()
    public = own.public_key().public_bytes_raw()

    def released(collateral: bytes) -> bytes:
        nonce = gate.challenge()
        data = release.report_data(public, bytes.fromhex(nonce))
        raw, answers = (
            base64.b64encode(one).decode() for one in (Quote(enclave=report(data=data)).bytes(), collateral)
        )
        request = ReleaseRequest(nonce=nonce, public=public.hex(), quote=raw, collateral=answers)
        return release.decrypt_package(b"".join(gate.release(request)), own, bytes.fromhex(nonce))

    good = Collateral()
    assert TablePackage.from_bytes(released(good.content())).files == package().files
    for bad, words in (
        (replace(good, revoked=[platform().serial]).content(), "revoked"),
        (replace(good, levels=((6, "UpToDate", ()), (5, "OutOfDate", ()))).content(), "status OutOfDate"),
        (b"", "collateral"),
    ):
        with pytest.raises(EnclaveError, match=words):
            released(bad)
    gate.allow_unattested, gate.verifier = True, None
    with pytest.raises(EnclaveError, match="no enclave of SGX"):
        released(good.content())


def asked(nonce: str, quote: bytes) -> ReleaseRequest:
    return ReleaseRequest(nonce=nonce, public="00" * 32, quote=base64.b64encode(quote).decode())


def test_a_quote_of_nested_json_is_refused() -> None:
    gate = TableGate(package())
    with pytest.raises(EnclaveError):
        gate.release(asked(gate.challenge(), b"[" * 90_000))


@pytest.mark.parametrize("quote", ["é", "a", "====", "\ud800"])
def test_a_quote_that_is_no_base64_is_refused(quote: str) -> None:
    gate = TableGate(package())
    request = ReleaseRequest.model_construct(nonce=gate.challenge(), public="00" * 32, quote=quote, collateral="")
    with pytest.raises(EnclaveError, match="not base64"):
        gate.release(request)


class SlowNonces(dict[str, float]):
    """Iterating over them waits for another thread, which ends meanwhile unless it is kept out."""

    meanwhile: Thread

    def items(self) -> Any:
        for number, one in enumerate(super().items()):
            if not number:
                self.meanwhile.start()
                self.meanwhile.join(0.3)
            yield one


def test_a_release_during_a_challenge_neither_fails_nor_is_undone() -> None:
    gate = TableGate(package())
    nonce, _ = gate.challenge(), gate.challenge()
    nonces = SlowNonces(gate._deadlines)

    def released() -> None:
        with pytest.raises(EnclaveError):
            gate.release(asked(nonce, b""))

    nonces.meanwhile = Thread(target=released)
    gate._deadlines = nonces
    gate.challenge()
    nonces.meanwhile.join()
    assert nonce not in gate._deadlines


def test_bf16_rows_are_read_as_they_are() -> None:
    import torch

    table = torch.randn(6, 4).bfloat16()
    one = TablePackage(table.view(torch.uint8).numpy(), np.zeros(6, bool), "bfloat16", "", RowPolicy())
    assert (one.vectors() == table.float().numpy()).all()
    for dtype in (torch.float16, torch.float32):
        other = table.to(dtype)
        name = str(dtype).removeprefix("torch.")
        assert (TablePackage(other.view(torch.uint8).numpy(), np.zeros(6, bool), name, "", RowPolicy()).vectors()
                == other.float().numpy()).all()  # fmt: skip
