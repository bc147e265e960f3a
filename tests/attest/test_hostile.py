"""Hostile bytes: a parser refuses them by its own errors and in bounded time, and no changed byte is believed."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milkglass.attest import chains, evidence, intel, nvidia, policy
from milkglass.attest.aci import signed_report_data
from milkglass.attest.claims import Verdict
from milkglass.attest.evidence import HardwareEvidence, gpu_nonce, report_data
from milkglass.attest.policy import EnclavePolicy, Policy, judge, parse_policy
from milkglass.attest.providers import read_aci, read_tinfoil
from milkglass.attest.sources import parse_certificate_table
from milkglass.errors import AttestationError, UsageError
from tests.attest.authority import Authority
from tests.attest.makers import Amd, Nvidia
from tests.attest.samples import TDX, TODAY, content, day

NOW = datetime(2026, 11, 26, tzinfo=UTC)
SPKI, NONCE, HOST = bytes(range(32)), bytes(range(32, 64)), "gpu.example"
SECONDS = 2.0  # of the processor's time for one document
FEW, MANY = settings(max_examples=100, deadline=None), settings(max_examples=300, deadline=None)
RECORDED = content("tinfoil/sev_document.json")
BOUND = bytes.fromhex("10ca85437a8e7353494bd4fce763b0aad25107cd8ab5e4a051c28b454f01063e")


@contextmanager
def only(error: type[Exception]) -> Iterator[None]:
    """Nothing but one kind of error may come, in bounded time."""
    start = time.process_time()
    with suppress(error):
        yield
    assert time.process_time() - start < SECONDS


def mixed(good: bytes) -> st.SearchStrategy[bytes]:
    """Noise, and a good document with a piece cut out, put in or changed."""
    places = st.tuples(st.integers(0, len(good)), st.integers(0, len(good)), st.binary(max_size=40))
    return st.binary(max_size=400) | places.map(lambda one: good[: one[0]] + one[2] + good[one[1] :])


LEAVES = st.none() | st.booleans() | st.integers() | st.sampled_from([10**400, -(10**4000), 1e308, "\ud800", "ä" * 40])
LEAVES |= st.floats() | st.text(max_size=20) | st.sampled_from(["aci/1", "tdx", "sev_snp", SPKI.hex(), HOST, "0x00"])
NAMES = ["api_version", "attestation", "workload_keyset", "evidence", "tee_type", "quote", "tls_public_keys",
         "spki_sha256", "domain", "not_after", "format", "body"]  # fmt: skip


def objects(names: list[str]) -> st.SearchStrategy[Any]:
    parts = st.recursive(
        LEAVES,
        lambda part: st.lists(part, max_size=4) | st.dictionaries(st.sampled_from(names) | st.text(max_size=3), part),
        max_leaves=12,
    )
    return st.dictionaries(st.sampled_from(names), parts)


# --- parsers ----------------------------------------------------------------------------------------------------------
FORMAT = json.loads(RECORDED)["format"]


@MANY
@given(mixed(RECORDED) | objects(NAMES).map(lambda one: json.dumps(one | {"format": FORMAT}).encode())
       | st.text().map(lambda body: json.dumps({"format": FORMAT, "body": body}).encode())
       | st.binary().map(lambda raw: json.dumps({"format": FORMAT, "body": base64.b64encode(raw).decode()}).encode())
)  # fmt: skip
def test_tinfoils_document(document: bytes) -> None:
    with only(AttestationError):
        assert read_tinfoil(document, BOUND, b"", HOST, NOW).form == "tinfoil"


def keyset(**changes: Any) -> dict[str, Any]:
    return {"not_after": int(NOW.timestamp()) + 86_400, "tls_public_keys": [{"spki_sha256": SPKI.hex()}]} | changes


def report(keys: Any, quote: Any = TDX.raw.hex(), tee: str = "tdx") -> bytes:
    inner = {"tee_type": tee, "workload_keyset": keys, "evidence": {"quote": quote}}
    return json.dumps({"api_version": "aci/1", "attestation": inner}).encode()


@MANY
@given(mixed(report(keyset(), "00" * 40)) | objects(NAMES).map(lambda one: json.dumps(one).encode())
       | objects(["not_after", "tls_public_keys", "x"]).map(lambda one: report(keyset() | one))
       | LEAVES.map(lambda leaf: report(keyset(not_after=leaf))) | LEAVES.map(lambda leaf: report(keyset(x=leaf)))
       | LEAVES.map(lambda leaf: report(keyset(), leaf)))  # fmt: skip
def test_acis_statement(document: bytes) -> None:
    with only(AttestationError):
        assert read_aci(document, SPKI, NONCE, HOST, NOW).form == "aci"


def test_a_keyset_that_has_no_canonical_form_is_refused() -> None:
    deep = b"[" * 900 + b"]" * 900
    for document in (
        report(keyset(x="\ud800")), report(keyset(not_after=10**400)), report(keyset(x=float("nan"))),
        report(keyset(x=0)).replace(b'"x": 0', b'"x": ' + deep),
    ):  # fmt: skip
        with only(AttestationError):
            read_aci(document, SPKI, NONCE, HOST, NOW)


WHO = Authority.make("root", "middle", "leaf")
LISTS = [WHO.revoked(0, [1, 2], TODAY), WHO.revoked(1, [WHO.chain[0].serial_number], TODAY),
         WHO.status(0, TODAY), WHO.status(1, TODAY, responder=WHO.responder(1))]  # fmt: skip


@MANY
@given(st.sampled_from(LISTS).flatmap(mixed))
def test_revocation_lists_and_answers_of_ocsp(raw: bytes) -> None:
    with only(AttestationError):
        current = chains.require_not_revoked(WHO.chain, [raw], TODAY, "it")
        assert not current, "one word is never about both certificates"


def table(entries: list[tuple[bytes, int, int]], body: bytes) -> bytes:
    head = b"".join(name + start.to_bytes(4, "little") + size.to_bytes(4, "little") for name, start, size in entries)
    return head + bytes(24) + body


@MANY
@given(st.binary(max_size=2_000) | st.builds(
    table,
    st.lists(st.tuples(
        st.sampled_from(["63da758de6644564adc5f4b93be8accd", "4ab7b379bbac4fe4a02f05aef327c782",
                         "c0b406a4a803495297433fb6014cd0ae", "00" * 16]).map(bytes.fromhex)
        | st.binary(min_size=16, max_size=16),
        st.integers(0, 2**32 - 1) | st.integers(0, 400), st.integers(0, 2**32 - 1) | st.integers(0, 400),
    ), max_size=20),
    st.binary(max_size=400),
))  # fmt: skip
def test_amds_table_of_certificates(raw: bytes) -> None:
    with only(AttestationError):
        found = parse_certificate_table(raw)
        assert set(found) <= {"key", "chain", "crl"} and all(isinstance(one, bytes) for one in found.values())
        assert sum(map(len, found.values())) <= 8 * len(raw) + 1_000, "nothing is multiplied"


POLICY = b"""version = 1
server = "https://x"
[sev-snp]
tcb = {snp = 1}
[[sev-snp.image]]
launch = "00"
name = "a"
origin = "b"
[tdx]
eval_data_number = 3
[nvidia]
count = 1
[accept]
milan = "c"
"""
TOML = st.lists(st.sampled_from([
    "[", "]", "{", "}", "[[", "]]", "=", ".", ",", "\n", '"', '"""', "'", "#", "sev-snp", "tdx", "tcb", "image", "1",
    "version", "-1", "0x", "1e400", "9" * 4_400, "nan", "true", "2026-02-31", "99:99:99", "\\ud800", "\u2028", "accept",
    "lease",
]), max_size=60).map("".join)  # fmt: skip


@MANY
@given(mixed(POLICY) | TOML.map(lambda text: text.encode()) | TOML.map(lambda text: POLICY + text.encode())
       | st.sampled_from(["[", "{a=", "a.", "[a.", "[[a]]\n", '"""', "a=[[],"]).map(lambda one: one.encode() * 12_000)
)  # fmt: skip
def test_policies(raw: bytes) -> None:
    for model in (Policy, EnclavePolicy):
        with only(UsageError):
            assert parse_policy(raw, "p.toml", model).version == 1


@FEW
@given(raw=mixed(b'[[machine]]\nid = "aa"\nfirst_seen = "2026"\n') | TOML.map(lambda text: text.encode()))
def test_lock_files(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "p.toml"
    Path(policy.lock_path(path)).write_bytes(raw)
    with only(UsageError):
        assert all(isinstance(one, str) for one in policy.read_lock(path))


INTEL = [*intel.COLLATERAL_PARTS, *(name for names in intel.COLLATERAL_PARTS.values() for name in names)]


@FEW
@given(objects(INTEL).map(lambda one: json.dumps(one).encode()) | st.binary(max_size=200)
       | st.builds(lambda name, value: json.dumps(json.loads(TDX.collateral["intel"]) | {name: value}).encode(),
                   st.sampled_from(INTEL), LEAVES | objects(["id", "fmspc", "issueDate"]).map(json.dumps)))  # fmt: skip
def test_intels_answers_beside_good_ones(noise: bytes) -> None:
    good = TDX.collateral["intel"]
    for files in ({"intel": good, "intel+1": noise}, {"intel": noise, "intel+1": good}, {"intel": noise}):
        with only(AttestationError):
            assert intel.verify(TDX.raw, files, day("2025-06-25")).status == "UpToDate"


# --- changed bytes ----------------------------------------------------------------------------------------------------
def changes(raw: bytes, step: int) -> Iterator[bytes]:
    rng = np.random.default_rng(2)
    for at in range(0, len(raw), step):
        changed = bytearray(raw)
        changed[at] ^= 1 << int(rng.integers(8))
        yield bytes(changed)


def counted(name: str, raw: bytes, read: Callable[[bytes], Any], step: int = 1) -> tuple[int, int]:
    """Changes a byte at each place. Returns how many changes were refused, and how many gave what is verified."""
    good, refused, equal = read(raw), 0, 0
    for at, changed in enumerate(changes(raw, step)):
        try:
            found = read(changed)
        except AttestationError:
            refused += 1
            continue
        assert found == good, f"the change of byte {at * step} was accepted, and changed what is verified"
        equal += 1
    print(f"{name}: {len(raw)} bytes, every {step}., refused {refused}, equal {equal}")
    return refused, equal


def test_each_changed_byte_of_tinfoils_document() -> None:
    refused, equal = counted("Tinfoil's document", RECORDED, lambda raw: read_tinfoil(raw, BOUND, b"", HOST, NOW))
    assert refused + equal == len(RECORDED) and refused > 0.95 * len(RECORDED)


def holding(verdict: Verdict) -> tuple[str, ...]:
    """The lines of a verdict that holds. A document that lost a list is refused by the policy."""
    if not verdict.holds:
        raise AttestationError("policy", str(verdict.refusals))
    return tuple(map(str, verdict.claims))


def rules(machine: evidence.VerifiedMachine, gpus: int, form: str = "milkglass") -> Policy:
    text = f"""version = 1
server = "https://{HOST}"
evidence = "{form}"
[sev-snp]
products = ["Genoa"]
tcb = {{bootloader = 10, tee = 0, snp = 23, microcode = 84}}
[[sev-snp.image]]
launch = "{machine.measurements["launch"]}"
name = "a"
origin = "b"
[machine]
pinned = ["{machine.machine_id}"]
"""
    if gpus:
        text += f'[nvidia]\ncount = {gpus}\narchitectures = ["HOPPER"]\n[accept]\nrelayable-gpu = "known"\n'
    return parse_policy(text.encode(), "p", Policy)


def our_document(amd: Amd, who: Nvidia | None) -> bytes:
    gpus = () if who is None else ((who.evidence(gpu_nonce(SPKI, NONCE)), who.gpu.pem),)
    data = report_data(SPKI, NONCE, nvidia.gpu_evidence_digest(gpus), b"key")
    collateral = {**amd.files, "crl": amd.authority.revoked(0, [], TODAY)}
    return HardwareEvidence(
        "sev-snp", amd.report({0x50: data}), collateral, "milkglass", SPKI, NONCE, gpus,
        () if who is None else tuple(who.manifests().values()), () if who is None else tuple(who.statuses(TODAY)),
        sealing_key=b"key", recorded="2026-11-26T00:00:00Z",
    ).document()  # fmt: skip


@pytest.mark.parametrize("gpu", [False, True])
def test_a_changed_byte_of_our_own_document(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_our_document(monkeypatch, gpu, 331 if gpu else 17)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [False, True])
def test_every_byte_of_our_own_document(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_our_document(monkeypatch, gpu, 7 if gpu else 1)


def flip_our_document(monkeypatch: pytest.MonkeyPatch, gpu: bool, step: int) -> None:
    amd, who = Amd.make().trusted(monkeypatch), Nvidia.make().trusted(monkeypatch) if gpu else None
    document = our_document(amd, who)
    demanded = rules(evidence.verify(HardwareEvidence.parse(document), TODAY)[0], int(gpu))

    def read(raw: bytes) -> Any:
        parsed = HardwareEvidence.parse(raw)
        machine, gpus, bound = evidence.verify(parsed, TODAY, SPKI, NONCE)
        return holding(judge(demanded, machine, gpus, bound)), parsed.sealing_key

    refused, equal = counted(f"our document{', with a GPU' * gpu}", document, read, step)
    assert refused > 0.8 * (refused + equal)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_changed_byte_of_acis_report(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    amd = Amd.make().trusted(monkeypatch)
    keys = keyset(tls_public_keys=[{"spki_sha256": SPKI.hex(), "domain": HOST}])
    draft = read_aci(report(keys, "00", "sev_snp"), SPKI, NONCE, HOST, NOW)
    signed = amd.report({0x50: signed_report_data(draft.keyset, NONCE)})
    collateral = {**amd.files, "crl": amd.authority.revoked(0, [], TODAY)}

    def machine_of(raw: bytes) -> Any:
        return evidence.verify(
            replace(read_aci(raw, SPKI, NONCE, HOST, NOW), collateral=collateral), TODAY, SPKI, NONCE
        )

    document = report(keys, signed.hex(), "sev_snp")
    demanded = rules(machine_of(document)[0], 0, "aci")
    refused, equal = counted("ACI's report", document, lambda raw: holding(judge(demanded, *machine_of(raw))), step)
    assert refused > 0.95 * (refused + equal), "what is left: letters of hex in another case"


def test_each_changed_byte_of_a_list_or_an_answer_that_revokes_is_no_good_word() -> None:
    for name, raw in (
        ("a revocation list", WHO.revoked(0, [WHO.chain[1].serial_number], TODAY)),
        ("an answer of OCSP", WHO.status(0, TODAY, revoked=True)),
        ("an answer of a responder", WHO.status(0, TODAY, revoked=True, responder=WHO.responder(0))),
    ):
        refused = silent = 0
        for changed in changes(raw, 1):
            try:
                assert not chains.require_not_revoked(WHO.chain, [changed], TODAY, "it", 1)
                silent += 1
            except AttestationError:
                refused += 1
        print(f"{name}: {len(raw)} bytes, refused {refused}, no word {silent}")
        assert refused + silent == len(raw)
