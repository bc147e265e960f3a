"""Verifies quotes of Intel TDX and SGX (DCAP) with the library dcap-qvl and the collateral that is given.

The library checks the chain to Intel's root, revocation, the quoting enclave's identity, and the TCB level of firmware
and microcode, all at the given time. It is asked for claims only: what its strict policy would refuse (an old TCB
status, advisories, cached keys, hyperthreads, dynamic platforms) becomes a claim here. Debug is never accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cryptography import x509

from milkglass.attest.chains import parse_certificates, require_chain, require_not_revoked, spki_digest_of
from milkglass.attest.claims import Claim, VerifiedMachine, proven_claim, unchecked_claim, weak_claim
from milkglass.errors import AttestationError
from milkglass.extras import missing_extra_error

MAX_QUOTE_BYTES, MAX_COLLATERAL_BYTES = 64 << 10, 1 << 20
MAX_EVALUATION_NUMBER = 2**32 - 1  # the greatest TCB evaluation data number that is read
# SHA-256 of the SPKI of Intel's root
ROOT_SPKI_DIGEST = "a0af031289f5d5d4132f9186068a7fc13628633ba235777472e29b6b6c67a49e"
UP_TO_DATE = "UpToDate"
# The parts of Intel's collateral, each with the entries that sign and certify it
COLLATERAL_PARTS = {
    "tcb_info": ("tcb_info_signature", "tcb_info_issuer_chain"),
    "qe_identity": ("qe_identity_signature", "qe_identity_issuer_chain"),
    "pck_crl": ("pck_crl_issuer_chain",),
    "root_ca_crl": (),
}
REVOCATION_LISTS = ("pck_crl", "root_ca_crl")
TD_DEBUG = 1 << 0  # a bit of TDATTRIBUTES; the library refuses migration
# Bits of an enclave's ATTRIBUTES: it was initialised, it may be debugged, it runs in 64-bit mode
SGX_INITIALISED, SGX_DEBUG, SGX_MODE64 = 0x01, 0x02, 0x04
# The names of registers in policies, and in the library's report
REGISTERS = {"mrtd": "mr_td", **{f"rtmr{number}": f"rt_mr{number}" for number in range(4)}, "config": "mr_config_id"}
# The reason of a refusal, by words in the library's message
REASON_OF_WORD = {"expired": "expired", "migra": "migration", "service td": "migration"}
# The weakness and its text, by the flag of the platform's certificate (PCK)
PLATFORM_WEAKNESSES = {
    "cached_keys": ("cached-keys", "the platform's keys come from a cache of its owner"),
    "smt_enabled": ("smt", "hyperthreads are on: another guest may share a core"),
    "dynamic_platform": ("dynamic-platform", "packages can be added to the platform after it was registered"),
}


def verify(raw: bytes, collateral: Mapping[str, bytes], now: datetime, root: bytes | None = None) -> VerifiedMachine:
    """Verifies a quote of TDX or SGX, and returns what it proves of the machine.

    Args:
        raw: the quote.
        collateral: Intel's collateral as JSON (QuoteCollateralV3), in files whose names begin with "intel". The newest
            of each part counts, whoever hands it over.
        now: the time at which the collateral must be valid.
        root: a root certificate in DER in place of Intel's, for tests.

    Raises:
        AttestationError: the quote does not verify. The error names the first fault.
        UsageError: the library dcap-qvl is not installed.
    """
    quote = parse_quote(raw)
    import dcap_qvl

    is_tdx = quote.is_tdx()
    attributes = int.from_bytes(quote.report.td_attributes if is_tdx else quote.report.attributes[:8], "little")
    if attributes & (TD_DEBUG if is_tdx else SGX_DEBUG):
        fault = "the host may debug this guest, and read its memory, which no policy accepts of TDX or SGX"
        raise AttestationError("debug", fault, "run it without debug")
    files = [content for name, content in collateral.items() if name.startswith("intel")]
    if not files:
        raise AttestationError(
            "collateral", "Intel's collateral is missing", "`milkglass attest fetch` gets it from Intel"
        )
    if large_file := next((content for content in files if len(content) > MAX_COLLATERAL_BYTES), None):
        raise AttestationError("size", f"Intel's collateral has {len(large_file):,} bytes, too many")
    seconds = int(now.timestamp())
    if seconds < 0:
        raise AttestationError("time", f"{now} is before 1970", "give a later time")
    merged = _merge_newest(quote, files)
    try:
        parsed_collateral = dcap_qvl.QuoteCollateralV3.from_json(merged.decode())
        policy = dcap_qvl.QuotePolicy.claims_only(seconds)
        verifier = dcap_qvl.QuoteVerifier() if root is None else dcap_qvl.QuoteVerifier(root)
        library_claims = json.loads(verifier.verify_with_policy(raw, parsed_collateral, seconds, policy).to_json())
    except ValueError as error:
        if "certificate chain" in str(error):  # the library does not say what is wrong with it
            _require_platform_chain(quote, merged, now, root)
        message = str(error).lower()
        reason = next((name for word, name in REASON_OF_WORD.items() if word in message), "quote")
        raise AttestationError(reason, f"the quote does not verify: {error}") from None
    return _verified_machine(library_claims, json.loads(parsed_collateral.tcb_info)["issueDate"][:10])


def _merge_newest(quote: Any, files: Sequence[bytes]) -> bytes:
    """Returns one file of collateral with the newest of each part that is for a quote's platform.

    A single file is returned as it is. The dates are read before any signature is checked. A part whose date was
    changed is then refused by its signature.
    """
    if len(files) == 1:
        return files[0]
    documents = list[dict[str, Any]]()
    for content in files:
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            documents.append(document)
    newest = dict[str, Any]()
    for part, signing_entries in COLLATERAL_PARTS.items():
        dated = [
            (newness, document) for document in documents if (newness := _newness(quote, part, document)) is not None
        ]
        source = max(dated, key=lambda pair: pair[0])[1] if dated else documents[0] if documents else {}
        newest |= {name: source[name] for name in (part, *signing_entries) if name in source}
    return json.dumps(newest).encode()


def _newness(quote: Any, part: str, document: Mapping[str, Any]) -> tuple[int, datetime] | None:
    """Returns a key by which a document's part is ordered, the newest last: its evaluation number and its date.

    Revocation lists have no such number. Returns None for a part of another platform, or one that cannot be read.
    """
    try:
        if part in REVOCATION_LISTS:
            revocation_list = x509.load_der_x509_crl(bytes.fromhex(document[part]))
            if part == "pck_crl":
                leaf = parse_certificates(quote.cert_chain_pem_bytes() or b"", "the platform's chain")[0]
                if revocation_list.issuer != leaf.issuer:
                    return None
            return 0, revocation_list.last_update_utc
        content = json.loads(document[part])
        expected_ids = {"tcb_info": ("SGX", "TDX"), "qe_identity": ("QE", "TD_QE")}[part]
        if content["id"] != expected_ids[quote.is_tdx()]:
            return None
        if part == "tcb_info" and content["fmspc"].upper() != quote.fmspc().upper():
            return None
        issued, evaluation_number = datetime.fromisoformat(content["issueDate"]), content["tcbEvaluationDataNumber"]
        if type(evaluation_number) is not int or not 0 <= evaluation_number <= MAX_EVALUATION_NUMBER:
            return None
        return evaluation_number, issued if issued.tzinfo else issued.replace(tzinfo=UTC)
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError, AttestationError):
        return None


def parse_quote(raw: bytes) -> Any:
    """Parses a quote with the library, and verifies nothing of it.

    Raises:
        AttestationError: the quote is too large, or none of TDX or SGX.
        UsageError: the library dcap-qvl is not installed.
    """
    try:
        import dcap_qvl
    except ModuleNotFoundError as error:
        raise missing_extra_error(error, "the verification of quotes") or error from None
    if len(raw) > MAX_QUOTE_BYTES:
        raise AttestationError("size", f"a quote has at most {MAX_QUOTE_BYTES:,} bytes, and this one {len(raw):,}")
    try:
        return dcap_qvl.parse_quote(raw)
    except ValueError as error:
        raise AttestationError("quote", f"this is no quote of TDX or SGX: {error}") from None


def _require_platform_chain(quote: Any, collateral: bytes, now: datetime, root: bytes | None) -> None:
    """Raises AttestationError for a platform's certificates that are revoked, expired or of another root."""
    chain = parse_certificates(quote.cert_chain_pem_bytes() or b"", "the platform's chain")
    root_digest = ROOT_SPKI_DIGEST if root is None else spki_digest_of(parse_certificates(root, "the root")[0]).hex()
    require_chain(chain, root_digest, now, "the platform")
    lists = [bytes.fromhex(json.loads(collateral)[name]) for name in REVOCATION_LISTS]
    require_not_revoked(chain, lists, now, "the platform")


def _verified_machine(library_claims: Mapping[str, Any], issue_date: str) -> VerifiedMachine:
    """Returns what the library's claims prove of the machine.

    Args:
        library_claims: what dcap-qvl says of the quote.
        issue_date: when Intel issued the TCB info.
    """
    ((report_kind, report),) = library_claims["report"].items()
    is_tdx, status, platform = report_kind != "SgxEnclave", library_claims["tcb"]["status"], library_claims["platform"]
    if report_kind == "TD15":
        report = {**report, **report.get("base", {})}
    claims = [
        proven_claim("processor", f"an Intel processor with {'TDX' if is_tdx else 'SGX'}, quote of form {report_kind}")
    ]
    date = platform["tcb_level"]["tcbDate"][:10]
    evaluation_number = min(library_claims["tcb"]["eval_data_number"], library_claims["qe"]["tcb_eval_data_number"])
    levels = f"by the levels of {issue_date}, number {evaluation_number}"
    if status == UP_TO_DATE:
        text = f"its firmware and microcode are up to date ({date}), {levels}"
        claims.append(Claim("tcb", "affirming", "vendor states", text))
    else:
        text = f"Intel calls its firmware and microcode {status} ({date}), {levels}"
        claims.append(weak_claim("tcb", text, f"status {status}", "vendor states"))
    claims += [
        weak_claim("advisory", f"{advisory} applies", advisory, "vendor states")
        for advisory in library_claims["tcb"]["advisory_ids"]
    ]
    for name, (weakness, text) in PLATFORM_WEAKNESSES.items():
        if platform["pck"][name] == "True":
            claims.append(weak_claim(weakness, text, weakness, "vendor states"))
    if is_tdx:
        claims.append(proven_claim("debug", "the host cannot debug the domain"))
        measurements = {name: report[field] for name, field in REGISTERS.items()}
    else:
        attributes = int.from_bytes(bytes.fromhex(report["attributes"])[:8], "little")
        if attributes & ~SGX_MODE64 != SGX_INITIALISED or report["misc_select"]:
            text = f"the enclave has the attributes {attributes:#x}, misc {report['misc_select']:#x}"
            claims.append(weak_claim("attributes", text, "attributes", undoes_proof=True))
        claims.append(proven_claim("debug", "the host cannot debug the enclave"))
        measurements = {"mrenclave": report["mr_enclave"], "mrsigner": report["mr_signer"]}
    machine_id = bytes(platform["pck"]["ppid"]).hex()
    claims.append(proven_claim("machine", f"the processor {machine_id[:16]}..."))
    claims.append(Claim("revocation", "affirming", "vendor states", "Intel's revocation lists do not name its keys"))
    claims.append(unchecked_claim("image", "who built the measured image, and what it gives away"))
    return VerifiedMachine(
        "tdx" if is_tdx else "sgx", "", bytes.fromhex(report["report_data"]), measurements, machine_id, {}, status,
        tuple(claims), eval_data_number=evaluation_number,
    )  # fmt: skip
