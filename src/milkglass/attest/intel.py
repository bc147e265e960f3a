"""Intel TDX and SGX: quotes by DCAP, verified by the library dcap-qvl with the collateral that is given.

The library checks the chain to Intel's root, revocation, the quoting enclave's identity, and the level of firmware and
microcode, all at the given time. It is asked for claims only, so that what its strict policy would refuse becomes a
claim here: the level's status, advisories, keys from a cache, hyperthreads and platforms of several packages. Debug is
never accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cryptography import x509

from milkglass.attest.chains import certificates, require_chain, require_not_revoked, spki_of
from milkglass.attest.claims import Claim, VerifiedMachine, proven, unchecked, weak
from milkglass.errors import AttestationError
from milkglass.extras import missing_extra_error

MAX_QUOTE, MAX_COLLATERAL = 64 << 10, 1 << 20
MAX_NUMBER = 2**32 - 1  # of Intel's levels
ROOT = "a0af031289f5d5d4132f9186068a7fc13628633ba235777472e29b6b6c67a49e"  # SHA-256 of the public key of Intel's root
UP_TO_DATE = "UpToDate"
# Intel's answers, each with what is signed and certified with it
ANSWERS = {
    "tcb_info": ("tcb_info_signature", "tcb_info_issuer_chain"),
    "qe_identity": ("qe_identity_signature", "qe_identity_issuer_chain"),
    "pck_crl": ("pck_crl_issuer_chain",),
    "root_ca_crl": (),
}
LISTS = ("pck_crl", "root_ca_crl")
TD_DEBUG = 1 << 0  # of a domain's attributes; the library refuses migration
# Of an enclave's attributes: initialised, debug, 64 bits
INITIALISED, DEBUG, MODE64 = 0x01, 0x02, 0x04
REGISTERS = {"mrtd": "mr_td", **{f"rtmr{number}": f"rt_mr{number}" for number in range(4)}, "config": "mr_config_id"}
# The reason of a refusal, by a word in the library's message
REASONS = {"expired": "expired", "migra": "migration", "service td": "migration"}
# What the platform's certificate says of it, and in words
PLATFORM = {
    "cached_keys": ("cached-keys", "the platform's keys come from a cache of its owner"),
    "smt_enabled": ("smt", "hyperthreads are on: another guest may share a core"),
    "dynamic_platform": ("dynamic-platform", "packages can be added to the platform after it was registered"),
}


def verify(raw: bytes, collateral: Mapping[str, bytes], now: datetime, root: bytes | None = None) -> VerifiedMachine:
    """Verifies a quote of TDX (version 4 or 5) or of SGX (version 3).

    Args:
        collateral: "intel" and more names that begin with it: Intel's answers as JSON (QuoteCollateralV3). Of each
            answer the newest counts, whoever hands it over.
        now: the time.
        root: another root than Intel's in DER, for tests.

    Raises:
        AttestationError: with the first fault.
    """
    quote = parse_quote(raw)
    import dcap_qvl

    tdx = quote.is_tdx()
    flags = int.from_bytes(quote.report.td_attributes if tdx else quote.report.attributes[:8], "little")
    if flags & (TD_DEBUG if tdx else DEBUG):
        fault = "the host may debug this guest, and read its memory, which no policy accepts of TDX or SGX"
        raise AttestationError("debug", fault, "run it without debug")
    files = [content for name, content in collateral.items() if name.startswith("intel")]
    if not files:
        raise AttestationError(
            "collateral", "Intel's collateral is missing", "`milkglass attest fetch` gets it from Intel"
        )
    if too_large := next((content for content in files if len(content) > MAX_COLLATERAL), None):
        raise AttestationError("size", f"Intel's collateral has {len(too_large):,} bytes, too many")
    seconds = int(now.timestamp())
    if seconds < 0:
        raise AttestationError("time", f"{now} is before 1970", "give a later time")
    answer = _newest(quote, files)
    try:
        answers = dcap_qvl.QuoteCollateralV3.from_json(answer.decode())
        policy = dcap_qvl.QuotePolicy.claims_only(seconds)
        verifier = dcap_qvl.QuoteVerifier() if root is None else dcap_qvl.QuoteVerifier(root)
        claims = json.loads(verifier.verify_with_policy(raw, answers, seconds, policy).to_json())
    except ValueError as error:
        if "certificate chain" in str(error):  # the library does not say what is wrong with it
            _require_platform(quote, answer, now, root)
        words = str(error).lower()
        reason = next((name for word, name in REASONS.items() if word in words), "quote")
        raise AttestationError(reason, f"the quote does not verify: {error}") from None
    return _machine(claims, json.loads(answers.tcb_info)["issueDate"][:10])


def _newest(quote: Any, files: Sequence[bytes]) -> bytes:
    """Returns the newest of each of Intel's answers for a quote's platform, as one file.

    The dates are read before anybody's signature is checked. One that was changed is then refused by its signature.
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
    for part, signed_with in ANSWERS.items():
        dated = [(age, document) for document in documents if (age := _age(quote, part, document)) is not None]
        best = max(dated, key=lambda pair: pair[0])[1] if dated else documents[0] if documents else {}
        newest |= {name: best[name] for name in (part, *signed_with) if name in best}
    return json.dumps(newest).encode()


def _age(quote: Any, part: str, document: Mapping[str, Any]) -> tuple[int, datetime] | None:
    """Returns what orders an answer by its age; None if it is for another platform, or cannot be read."""
    try:
        if part in LISTS:
            revocation_list = x509.load_der_x509_crl(bytes.fromhex(document[part]))
            if part == "pck_crl":
                leaf = certificates(quote.cert_chain_pem_bytes() or b"", "the platform's chain")[0]
                if revocation_list.issuer != leaf.issuer:
                    return None
            return 0, revocation_list.last_update_utc
        answer = json.loads(document[part])
        kinds = {"tcb_info": ("SGX", "TDX"), "qe_identity": ("QE", "TD_QE")}[part]
        if answer["id"] != kinds[quote.is_tdx()]:
            return None
        if part == "tcb_info" and answer["fmspc"].upper() != quote.fmspc().upper():
            return None
        issued, number = datetime.fromisoformat(answer["issueDate"]), answer["tcbEvaluationDataNumber"]
        if type(number) is not int or not 0 <= number <= MAX_NUMBER:
            return None
        return number, issued if issued.tzinfo else issued.replace(tzinfo=UTC)
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError, AttestationError):
        return None


def parse_quote(raw: bytes) -> Any:
    """Returns the library's view of a quote, of which nothing is verified. Raises AttestationError."""
    try:
        import dcap_qvl
    except ModuleNotFoundError as error:
        raise missing_extra_error(error, "the verification of quotes") or error from None
    if len(raw) > MAX_QUOTE:
        raise AttestationError("size", f"a quote has at most {MAX_QUOTE:,} bytes, and this one {len(raw):,}")
    try:
        return dcap_qvl.parse_quote(raw)
    except ValueError as error:
        raise AttestationError("quote", f"this is no quote of TDX or SGX: {error}") from None


def _require_platform(quote: Any, answers: bytes, now: datetime, root: bytes | None) -> None:
    """Raises AttestationError, by name, for a platform whose certificates are revoked, expired or another root's."""
    chain = certificates(quote.cert_chain_pem_bytes() or b"", "the platform's chain")
    end = ROOT if root is None else spki_of(certificates(root, "the root")[0]).hex()
    require_chain(chain, end, now, "the platform")
    lists = [bytes.fromhex(json.loads(answers)[name]) for name in LISTS]
    require_not_revoked(chain, lists, now, "the platform")


def _machine(claims: Mapping[str, Any], issued: str) -> VerifiedMachine:
    ((report_kind, report),) = claims["report"].items()
    tdx, status, platform = report_kind != "SgxEnclave", claims["tcb"]["status"], claims["platform"]
    if report_kind == "TD15":
        report = {**report, **report.get("base", {})}
    lines = [proven("processor", f"an Intel processor with {'TDX' if tdx else 'SGX'}, quote of form {report_kind}")]
    date = platform["tcb_level"]["tcbDate"][:10]
    number = min(claims["tcb"]["eval_data_number"], claims["qe"]["tcb_eval_data_number"])
    if status == UP_TO_DATE:
        text = f"its firmware and microcode are up to date ({date}), by the levels of {issued}, number {number}"
        lines.append(Claim("tcb", "affirming", "vendor states", text))
    else:
        text = f"Intel calls its firmware and microcode {status} ({date}), by the levels of {issued}, number {number}"
        lines.append(weak("tcb", text, f"status {status}", "vendor states"))
    lines += [
        weak("advisory", f"{advisory} applies", advisory, "vendor states") for advisory in claims["tcb"]["advisory_ids"]
    ]
    for name, (weakness, text) in PLATFORM.items():
        if platform["pck"][name] == "True":
            lines.append(weak(weakness, text, weakness, "vendor states"))
    if tdx:
        lines.append(proven("debug", "the host cannot debug the domain"))
        image = {name: report[field] for name, field in REGISTERS.items()}
    else:
        flags = int.from_bytes(bytes.fromhex(report["attributes"])[:8], "little")
        if flags & ~MODE64 != INITIALISED or report["misc_select"]:
            text = f"the enclave has the attributes {flags:#x}, misc {report['misc_select']:#x}"
            lines.append(weak("attributes", text, "attributes", bad=True))
        lines.append(proven("debug", "the host cannot debug the enclave"))
        image = {"mrenclave": report["mr_enclave"], "mrsigner": report["mr_signer"]}
    machine = bytes(platform["pck"]["ppid"]).hex()
    lines.append(proven("machine", f"the processor {machine[:16]}..."))
    lines.append(Claim("revocation", "affirming", "vendor states", "Intel's revocation lists do not name its keys"))
    lines.append(unchecked("image", "who built the measured image, and what it gives away"))
    return VerifiedMachine(
        "tdx" if tdx else "sgx", "", bytes.fromhex(report["report_data"]), image, machine, {}, status, tuple(lines),
        eval_data_number=number,
    )  # fmt: skip
