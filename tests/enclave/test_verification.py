"""Quotes of SGX: made by an Intel of the tests' own, then bent. What the policy does not accept by name is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from milkglass.attest import chains, intel
from milkglass.attest.claims import Verdict
from milkglass.attest.policy import EnclavePolicy, read_policy
from milkglass.enclave.verification import QuoteVerifier
from milkglass.errors import AttestationError, EnclaveError, UsageError
from tests.attest import intel_forger as forger
from tests.attest import samples
from tests.attest.intel_forger import DATA, MEASUREMENT, NOW, Collateral, Quote, issued, pck_extension, report

ROOT_FINGERPRINT = "44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3"  # SHA-256, as Intel publishes it
SMT = pck_extension(forger.SVN, forger.PCE_SVN, forger.FMSPC, ("smt_enabled",))
OLD = pck_extension(forger.SVN - 1, forger.PCE_SVN, forger.FMSPC, None)


def verifier(accept: dict[str, str] | None = None, status: tuple[str, ...] = ("UpToDate",)) -> QuoteVerifier:
    found = QuoteVerifier.of_measurements([MEASUREMENT.hex()])
    sgx = found.policy.sgx.model_copy(update={"status": [*status]})
    reasons = {**found.policy.accept, **(accept or {})}
    policy = found.policy.model_copy(update={"accept": reasons, "sgx": sgx})
    return replace(found, policy=policy, root=forger.intel().root_der, now=lambda: NOW)


def check(
    quote: Quote | bytes = Quote(), collateral: Collateral = Collateral(), who: QuoteVerifier | None = None,
    data: bytes = DATA,
) -> Verdict:  # fmt: skip
    raw = quote if isinstance(quote, bytes) else quote.bytes()
    return (who or verifier()).verify(raw, data, collateral.content())


def test_a_good_quote_counts_and_its_verdict_says_what_was_accepted() -> None:
    found = check()
    assert found.holds and found.is_from_hardware and set(found.accepted_weaknesses) == {"first-use"}
    words = "\n".join(found.lines())
    assert "revocation lists do not name" in words and "firmware and microcode are up to date" in words


# --- what the policy refuses, by name, and what a policy can accept ---------------------------------------------------
WEAK = {
    "microcode that is out of date": (Quote(machine=forger.intel().platform(OLD)), Collateral(), "status OutOfDate"),
    "an advisory": (Quote(), Collateral(levels=((5, "UpToDate", ("INTEL-SA-00334",)),)), "INTEL-SA-00334"),
    "hyperthreads": (Quote(machine=forger.intel().platform(SMT)), Collateral(), "smt"),
    "an old quoting enclave": (Quote(qe_svn=7), Collateral(), "status OutOfDate"),
    "microcode that needs configuration": (
        Quote(), Collateral(levels=((5, "ConfigurationNeeded", ()),)), "status ConfigurationNeeded"
    ),
    "the provisioning key": (Quote(enclave=report(flags=0x35)), Collateral(), "attributes"),
    "an enclave that is not initialised": (Quote(enclave=report(flags=4)), Collateral(), "attributes"),
    "more written on its exits": (Quote(enclave=report(misc=1)), Collateral(), "attributes"),
}  # fmt: skip


@pytest.mark.parametrize("what", WEAK)
def test_each_weakness_is_refused_by_its_name_and_accepted_by_it_alone(what: str) -> None:
    quote, collateral, name = WEAK[what]
    with pytest.raises(EnclaveError, match=name):
        check(quote, collateral)
    with pytest.raises(EnclaveError):
        check(quote, collateral, verifier({"vlek": "another name"}))
    statuses = (name.removeprefix("status "),) if name.startswith("status") else ("UpToDate",)
    reasons = {"INTEL-SA-00001": "known"} if "OutOfDate" in name and "microcode" in what else {}
    found = check(quote, collateral, verifier({name: "we know", **reasons}, statuses))
    assert name in found.accepted_weaknesses and any(name in line for line in found.lines())


def test_a_machine_must_be_pinned_or_any_accepted() -> None:
    policy = EnclavePolicy(version=1, sgx=verifier().policy.sgx)
    with pytest.raises(EnclaveError, match="first-use"):
        check(who=replace(verifier(), policy=policy))
    pinned = policy.model_validate({"version": 1, "sgx": policy.sgx, "machine": {"pinned": [(b"P" * 16).hex()]}})
    assert check(who=replace(verifier(), policy=pinned)).accepted_weaknesses == {}
    other = policy.model_validate({"version": 1, "sgx": policy.sgx, "machine": {"pinned": ["ab" * 16]}})
    with pytest.raises(EnclaveError, match="pinned"):
        check(who=replace(verifier(), policy=other))


# --- what no policy accepts -------------------------------------------------------------------------------------------
def odd_chain(*, authority: bool) -> Quote:
    """A chain whose middle certificate may sign nothing, or whose leaf may sign."""
    who = forger.intel()
    good = pck_extension(forger.SVN, forger.PCE_SVN, forger.FMSPC, None)
    middle = issued("middle", who.root, authority)
    leaf = issued("leaf", middle, authority, good)
    return Quote(machine=leaf, chain=leaf.pem + middle.pem + who.root.pem)


def other_root() -> Quote:
    who = forger.intel("other")
    leaf = who.platform()
    return Quote(machine=leaf, chain=leaf.pem + who.platforms.pem + who.root.pem)


WHO = forger.intel()
BAD = {
    "an enclave that is not allowed": (Quote(enclave=report(b"x" * 32)), Collateral(), "mrenclave 7878"),
    "a debug enclave": (Quote(enclave=report(flags=7)), Collateral(), "debug"),
    "an answer to another question": (Quote(enclave=report(data=bytes(64))), Collateral(), "another question"),
    "another version": (Quote(version=4), Collateral(), "no quote of TDX or SGX"),
    "another kind of key": (Quote(key_type=3), Collateral(), "key type"),
    "another quoting enclave": (Quote(qe_signer=b"x" * 32), Collateral(), "QE MRSIGNER"),
    "another enclave of Intel's": (Quote(qe_product=2), Collateral(), "QE ISVPRODID .* got 2"),
    "a debug quoting enclave": (Quote(qe_flags=0x17), Collateral(), "QE report"),
    "a quoting enclave without its key": (Quote(qe_flags=0x05), Collateral(), "QE ATTRIBUTES"),
    "a quoting enclave with miscselect": (Quote(qe_misc=0xFFFFFFFF), Collateral(), "QE MISCSELECT"),
    "a key that the quoting enclave does not know": (Quote(bound=bytes(64)), Collateral(), "QE report hash"),
    "certificates of another type": (Quote(data_type=1), Collateral(), "format: 1"),
    "another root": (other_root(), Collateral(), r"\(root\)"),
    "another signer": (Quote(signer=ec.generate_private_key(ec.SECP256R1())), Collateral(), "signature is invalid"),
    "no PCK certificate": (Quote(machine=issued("leaf", WHO.platforms, False)), Collateral(), "Intel extension"),
    "an authority that may sign nothing": (odd_chain(authority=False), Collateral(), r"\(chain\).*role"),
    "a platform that may sign": (odd_chain(authority=True), Collateral(), r"\(chain\).*role"),
    "an expired platform": (Quote(machine=WHO.platform(days=-1)), Collateral(), r"\(expired\)"),
    "a revoked platform": (Quote(), Collateral(revoked=[forger.platform().serial]), r"\(revoked\).*Processor CA"),
    "a revoked authority": (Quote(), Collateral(revoked_authorities=[WHO.platforms.serial]), r"\(revoked\).*Root CA"),
    "a revoked signer of collateral": (Quote(), Collateral(revoked_authorities=[WHO.tcb.serial]), "certificate chain"),
    "microcode of no level": (Quote(), Collateral(levels=((9, "UpToDate", ()),)), "No matching TCB level"),
    "levels of another processor": (Quote(), Collateral(fmspc="00906ed50001"), "Fmspc"),
    "collateral of another root": (Quote(), Collateral(who=forger.intel("other")), "CRL"),
    "collateral that has expired": (Quote(), Collateral(now=NOW - timedelta(days=40)), r"\(expired\)"),
    "collateral of tomorrow": (Quote(), Collateral(now=NOW + timedelta(days=3)), r"\(quote\)"),
    "levels that nobody signed": (Quote(), Collateral(edited={"tcb_info_signature": "00" * 64}), r"\(quote\)"),
    "an identity that nobody signed": (Quote(), Collateral(edited={"qe_identity_signature": "00" * 64}), r"\(quote\)"),
    "levels that were changed": (Quote(), Collateral(edited={"tcb_info": "{}"}), r"\(quote\)"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_quote_is_refused_with_its_reason(what: str) -> None:
    quote, collateral, words = BAD[what]
    accept_all = verifier(dict.fromkeys(("smt", "attributes", "debug", "status OutOfDate"), "all"))
    with pytest.raises(EnclaveError, match=words):
        check(quote, collateral, accept_all)


def test_without_collateral_nothing_counts_and_the_next_step_is_named() -> None:
    with pytest.raises(EnclaveError, match=r"\(collateral\)") as refused:
        verifier().verify(Quote().bytes(), DATA, b"")
    assert "split enclave fetch" in refused.value.hint
    for bad in (b"x", b"{}", b"[]", b"\xff", b"{" * 100_000, b" " * (2 << 20)):
        with pytest.raises(EnclaveError):
            verifier().verify(Quote().bytes(), DATA, bad)


def test_cut_quotes_are_refused() -> None:
    raw = Quote().bytes()
    for length in (0, 1, 47, 48, 432, 435, 500, 1100, len(raw) - 1):
        with pytest.raises(EnclaveError):
            check(raw[:length])
    with pytest.raises(EnclaveError, match=r"\(size\)"):
        check(raw + bytes(intel.MAX_QUOTE_BYTES))


def test_no_changed_byte_passes() -> None:
    """Every byte of what is signed, of the signatures and of the reports, and some of the certificates."""
    raw, content = Quote().bytes(), Collateral().content()
    good, body = check(raw), 48 + 384 + 4
    signed = {*range(48 + 384), *range(body, body + 128 + 384 + 64)}
    for place in [*range(body + 576), *range(body + 576, len(raw), 37)]:
        bad = bytearray(raw)
        bad[place] ^= 1
        try:
            found = verifier().verify(bytes(bad), DATA, content)
        except EnclaveError:
            continue
        assert found == good and place not in signed, f"byte {place} was changed and the quote accepted"


def test_no_changed_bit_of_a_certificate_ends_in_another_error() -> None:
    """The libraries have errors of their own for many of them, such as for a version that is none."""
    chain = x509.load_pem_x509_certificates(forger.platform().pem + WHO.platforms.pem + WHO.root.pem)
    draw, expected, content, tried = random.Random(5), check(), Collateral().content(), 0
    accepted = [0, 0, 0]
    for place, one in enumerate(chain):
        der = one.public_bytes(Encoding.DER)
        ends = [(at, 1 << bit) for at in range(16) for bit in range(8)]
        for at, bits in ends + [(draw.randrange(len(der)), 1 << draw.randrange(8)) for _ in range(150)]:
            tried += 1
            bad = bytearray(der)
            bad[at] ^= bits
            others = [other.public_bytes(Encoding.PEM) for other in chain]
            others[place] = pem(bytes(bad))
            try:
                found = verifier().verify(Quote(chain=b"".join(others)).bytes(), DATA, content)
            except EnclaveError:
                continue
            accepted[place] += 1
            assert found == expected, f"bit {bits} of byte {at} of certificate {place}"
    assert sum(accepted[:2]) < 0.02 * tried, "of the third, the root, the library takes its own in place of the quote's"


def pem(der: bytes) -> bytes:
    import base64

    body = base64.encodebytes(der).decode().replace("\n", "")
    lines = [body[at : at + 64] for at in range(0, len(body), 64)]
    return "\n".join(["-----BEGIN CERTIFICATE-----", *lines, "-----END CERTIFICATE-----", ""]).encode()


# --- Intel's own ------------------------------------------------------------------------------------------------------
def test_the_root_is_the_key_of_the_certificate_that_intel_publishes() -> None:
    from cryptography.hazmat.primitives.hashes import SHA256

    chain = chains.parse_certificates(intel.parse_quote(samples.SGX.raw).cert_chain_pem_bytes(), "it")
    assert chain[-1].fingerprint(SHA256()).hex() == ROOT_FINGERPRINT
    assert chains.spki_digest_of(chain[-1]).hex() == intel.ROOT_SPKI_DIGEST


def test_a_recorded_quote_ends_at_intels_root_and_its_microcode_needs_a_policy() -> None:
    quote, answers, when = samples.SGX.raw, samples.SGX.collateral["intel"], samples.day("2025-06-25")
    machine = intel.verify(quote, samples.SGX.collateral, when)
    found = replace(QuoteVerifier.of_measurements([machine.measurements["mrenclave"]]), now=lambda: when)
    with pytest.raises(EnclaveError, match="status ConfigurationAndSWHardeningNeeded.*INTEL-SA-00289"):
        found.verify(quote, machine.report_data, answers)
    with pytest.raises(AttestationError) as refused:
        intel.verify(quote, samples.SGX.collateral, when, forger.intel().root_der)
    assert refused.value.reason == "quote"
    with pytest.raises(EnclaveError, match=r"refused \("):
        check(who=replace(verifier(), root=None))


# --- policies of enclaves ---------------------------------------------------------------------------------------------
def test_a_policy_of_enclaves_has_sgx_alone_and_no_server(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        f'version = 1\n[sgx]\nimage = [{{mrenclave = "{MEASUREMENT.hex()}", name = "a", origin = "signed here"}}]\n'
        '[accept]\nfirst-use = "any client"\nsmt = "most have it"\n'
    )
    found = replace(verifier(), policy=read_policy(path, EnclavePolicy))
    assert set(check(Quote(machine=WHO.platform(SMT)), who=found).accepted_weaknesses) == {"first-use", "smt"}
    for bad in ('server = "https://x"', "[sev-snp]", "[tdx]", '[accept]\nsmtt = "x"', '[accept]\ndebug = "x"',
                'kinds = ["software"]'):  # fmt: skip
        path.write_text(f"version = 1\n{bad}\n")
        with pytest.raises(UsageError, match=r"p\.toml"):
            read_policy(path, EnclavePolicy)


def test_the_policy_of_a_folder_is_its_hosts(tmp_path: Path) -> None:
    smt = Quote(machine=WHO.platform(SMT))

    def found() -> Verdict:
        own = QuoteVerifier.of_folder(tmp_path).for_measurement(MEASUREMENT.hex())
        return check(smt, who=replace(own, root=WHO.root_der, now=lambda: NOW))

    with pytest.raises(EnclaveError, match="smt"):
        found()
    (tmp_path / "policy.toml").write_text('version = 1\n[accept]\nsmt = "my own machine"\n')
    assert json.loads(json.dumps(dict(found().accepted_weaknesses)))["smt"] == "my own machine"
