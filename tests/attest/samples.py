"""Recorded evidence, with the time at which each verifies and what is weak in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from milkglass.attest.claims import VerifiedGpu
from milkglass.attest.evidence import HardwareEvidence
from milkglass.attest.nvidia import decode_gpu_evidence, verify

FOLDER = Path(__file__).parents[1] / "fixtures" / "attestation"


def content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def hexed(name: str) -> bytes:
    return bytes.fromhex(content(name).decode().strip().removeprefix("0x"))


def day(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@dataclass(frozen=True)
class Sample:
    """Evidence of a processor.

    Attributes:
        time: at which it is verified.
        reason: of the refusal; "" if it verifies.
        weak: the names of what is weak in it.
    """

    evidence: HardwareEvidence
    time: datetime
    reason: str = ""
    weak: frozenset[str] = frozenset()
    image: dict[str, str] = field(default_factory=dict)


def snp(raw: bytes, key: bytes, chain: str) -> HardwareEvidence:
    return HardwareEvidence("sev-snp", raw, {"key": key, "chain": content(chain)})


def intel(kind: str, raw: bytes, collateral: str | None) -> HardwareEvidence:
    return HardwareEvidence(kind, raw, {} if collateral is None else {"intel": content(f"dcap-qvl/{collateral}")})  # type: ignore[arg-type]


AZURE = json.loads(content("trustee/az-snp-vtpm-evidence-genoa.json"))
GENOA = bytes(AZURE["report"])[32:1216], AZURE["vcek"].encode()
TODAY = day("2026-11-26")
MILAN_CHAIN, GENOA_CHAIN = "trustee/milan_ask_ark_asvk.pem", "trustee/genoa_ask_ark_asvk.pem"
TRUSTEE = content("trustee/snp-test-report.bin")
VLEK = content("trustee/snp-test-vlek-report.bin"), content("trustee/snp-test-vlek.der")
OLD = {"milan", "no-alias-check", "no-revocation"}
PLATFORM = frozenset({"cached-keys", "smt", "dynamic-platform"})
TDX = intel("tdx", content("dcap-qvl/tdx_quote"), "tdx_quote_collateral.json")
SGX = intel("sgx", content("dcap-qvl/sgx_quote"), "sgx_quote_collateral.json")
NEAR = intel("tdx", hexed("dcap-qvl/near_quote_hex.txt"), "near_quote_collateral.json")
SAMPLES = {
    "Milan": Sample(
        snp(hexed("virtee-sev/report_milan.hex"), content("virtee-sev/vcek_milan.der"), "virtee-sev/cert_chain_milan"),
        TODAY, weak=frozenset(OLD),
    ),
    "Milan, debug": Sample(
        snp(*map(content, ("go-sev-guest/attestation.bin", "go-sev-guest/vcek.testcer")), "go-sev-guest/milan.testcer"),
        TODAY, weak=frozenset({*OLD, "debug"}),
    ),
    "Milan of trustee": Sample(
        snp(TRUSTEE, content("trustee/snp-test-vcek.der"), MILAN_CHAIN), TODAY, weak=frozenset(OLD)
    ),
    "a broken key": Sample(
        snp(TRUSTEE, content("trustee/snp-test-vcek-invalid-legacy.der"), MILAN_CHAIN), TODAY, "chain"
    ),
    "another broken key": Sample(
        snp(TRUSTEE, content("trustee/snp-test-vcek-invalid-new.der"), MILAN_CHAIN), TODAY, "chain"
    ),
    "VLEK": Sample(snp(*VLEK, MILAN_CHAIN), day("2025-06-01"),
                   weak=frozenset({"level", "milan", "vlek", "no-revocation"})),
    "VLEK, expired": Sample(snp(*VLEK, MILAN_CHAIN), TODAY, "expired"),
    "Genoa": Sample(
        snp(*GENOA, GENOA_CHAIN), TODAY, weak=frozenset({"no-revocation"}),
    ),
    "Genoa, chain of Milan": Sample(snp(*GENOA, MILAN_CHAIN), TODAY, "chain"),
    "Genoa's key for Milan's report": Sample(snp(TRUSTEE, GENOA[1], GENOA_CHAIN), TODAY, "signature"),
    "TDX": Sample(TDX, day("2025-06-25"), weak=PLATFORM),
    "TDX, collateral too old": Sample(TDX, TODAY, "expired"),
    "TDX of NEAR": Sample(NEAR, day("2025-09-10"), weak=PLATFORM),
    "TDX, no level": Sample(
        intel("tdx", content("dcap-qvl/tdx_quote_outdated"), "tdx_quote_outdated_collateral.json"), day("2026-02-25"),
        "quote",
    ),
    "TDX, no collateral": Sample(replace(TDX, collateral={}), day("2025-06-25"), "collateral"),
    "TDX with SGX's collateral": Sample(replace(TDX, collateral=SGX.collateral), day("2025-06-25"), "quote"),
    "TDX that says SGX": Sample(replace(TDX, kind="sgx"), day("2025-06-25"), "kind"),
    "SGX": Sample(
        SGX, day("2025-06-25"),
        weak=frozenset({"status ConfigurationAndSWHardeningNeeded", "INTEL-SA-00289", "INTEL-SA-00615"}),
    ),
    "TDX, debug": Sample(intel("tdx", content("trustee/tdx_quote_4.dat"), None), day("2025-06-25"), "debug"),
}  # fmt: skip
PARSED = (
    "go-tdx-guest/quote_v5_sample.dat", "go-tdx-guest/tdx_prod_quote_SPR_E4.dat", "go-tdx-guest/cos-113-tdx-quote.dat",
    "trustee/tdx_quote_5.dat", "trustee/tdx_quote_6.dat",
)  # fmt: skip


# --- GPUs -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class GpuSample:
    """Evidence of a GPU. `references`: the files of its reference values; `mode`: what it states."""

    raw: bytes
    chain: bytes
    time: datetime = TODAY
    reason: str = ""
    architecture: str = "HOPPER"
    nonce: bytes | None = None
    references: tuple[str, ...] = ()
    mode: str = "spt"
    weak: frozenset[str] = frozenset({"no-rim"})

    def verified(self) -> VerifiedGpu:
        files = [content(f"nvidia/{name}") for name in self.references]
        return verify(self.raw, self.chain, self.nonce, files, [], self.time)


def listed(name: str) -> list[tuple[bytes, bytes, bytes]]:
    entries = json.loads(content(f"nvidia/{name}.json"))
    return [(*decode_gpu_evidence(one), bytes.fromhex(one["nonce"])) for one in entries]


def gpu(name: str, mode: str, number: int = 0) -> GpuSample:
    raw, chain, nonce = listed(name)[number]
    return GpuSample(raw, chain, nonce=nonce, mode=mode)


HOPPER = GpuSample(
    hexed("nvidia/hopperAttestationReport.txt"), content("nvidia/hopperCertChain.txt"), day("2025-01-01"), mode=""
)
VBIOS, BAD_VBIOS = (
    "1010_0200_882_96005E0001_PROD.swidtag", "NV_GPU_VBIOS_1010_0200_882_96005E0001_measurement_mismatch.xml",
)  # fmt: skip
COCO = hexed("trustee/nvidia-hopper_coco_report1.txt"), content("trustee/nvidia-hopper_coco_certs1.txt")
GPUS = {
    "Hopper": gpu("hopper_evidence", "ppcie"),
    "Hopper, 590.12": gpu("evidence_hopper_590_12", "ppcie"),
    **{f"one of four, {number}": gpu("multi_gpu_hopper", "ppcie", number) for number in range(4)},
    "Hopper on hold": gpu("hopper_evidence_cert_hold", "spt"),
    "another nonce": replace(gpu("hopper_evidence", "ppcie"), nonce=bytes(32), reason="nonce"),
    "a switch": replace(gpu("switch_evidence_ls10", "spt"), reason="architecture"),
    "Hopper, its VBIOS": replace(HOPPER, references=(VBIOS,)),
    "Hopper, another driver's manifest": replace(HOPPER, references=("NV_GPU_DRIVER_GH100_550.144.03.xml",),
                                                 time=day("2026-01-01")),
    "Hopper, another VBIOS": replace(HOPPER, references=(BAD_VBIOS,), reason="measurement"),
    "Hopper, an expired manifest": replace(HOPPER, references=(VBIOS,), time=TODAY, reason="expired"),
    "Hopper, a changed manifest of another driver": replace(HOPPER, references=("incorrect_signature_driver_rim.xml",)),
    "a changed value": replace(
        HOPPER, references=("NV_GPU_DRIVER_GH100_535.86.09_measurement_mismatch.xml",), time=day("2026-01-01"),
        reason="rim-signature",
    ),
    "a manifest as old": GpuSample(
        hexed("nvidia/hopperAttestationReportExpired.txt"), content("nvidia/hopperCertChainExpired.txt")
    ),
    "a bad signature": GpuSample(
        hexed("nvidia/hopperAttestationReportInvalidSignature.txt"), content("nvidia/hopperCertChain.txt"),
        reason="signature",
    ),
    "Blackwell": GpuSample(
        hexed("nvidia/blackwellAttestationReport.txt"), content("nvidia/blackwellCertChain.txt"),
        architecture="BLACKWELL", mode="",
    ),
    "a byte too many": GpuSample(*COCO, reason="trailing"),
    "without that byte": GpuSample(COCO[0][:-1], COCO[1]),
    "cut in its signature": GpuSample(COCO[0][:-50], COCO[1], reason="evidence"),
}  # fmt: skip
