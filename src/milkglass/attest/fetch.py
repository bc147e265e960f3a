"""Gets the makers' signed files for a piece of evidence. No other module of this package asks a maker's service.

    AMD      Key Distribution Service: the VCEK's certificate, its authorities, the revocation list
    Intel    Provisioning Certification Service, by the library dcap-qvl
    NVIDIA   reference manifests of driver and VBIOS, and OCSP responses on each authority of the GPU's key and on
             each certificate of the manifests' signers

What is fetched is signed, and is verified when it is used. The services learn which processor is asked about, and when.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx2
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp

from milkglass.attest import rim, sev_snp
from milkglass.attest.chains import parse_certificates
from milkglass.attest.evidence import HardwareEvidence
from milkglass.attest.nvidia import DRIVER_FIELD, FIRST_REVOCABLE_INDEX, SignedMeasurements, chip_of
from milkglass.errors import AttestationError, Unreachable

MAX_FILE_BYTES, TIMEOUT_SECONDS = 4 << 20, 60.0
# The types of a GPU's opaque data that name its VBIOS's manifest
PROJECT_FIELD, PROJECT_SKU_FIELD, CHIP_SKU_FIELD = 17, 18, 15
# The product by CPUID family and model, which reports of version 3 and later state
PRODUCT_BY_CPUID = {
    (0x19, 0x01): "Milan",
    (0x19, 0x11): "Genoa",
    (0x19, 0xA0): "Genoa",
    (0x1A, 0x02): "Turin",
    (0x1A, 0x11): "Turin",
}


@dataclass(frozen=True)
class Services:
    """Names the addresses of the makers' services. Tests put others in their place."""

    amd: str = "https://kdsintf.amd.com"
    nvidia_rim: str = "https://rim.attestation.nvidia.com"
    nvidia_ocsp: str = "https://ocsp.ndis.nvidia.com"


def product_of(report: sev_snp.Report) -> str | None:
    """Returns the processor's generation, or None if the report does not state a known one, as of version 2."""
    return PRODUCT_BY_CPUID.get((report.raw[0x188], report.raw[0x189])) if report.version >= 3 else None


def amd_paths(report: sev_snp.Report, product: str) -> dict[str, str]:
    """Returns the path of each file at AMD's service, by its name in a collateral folder.

    Raises AttestationError for a report that no VCEK signed.
    """
    if report.signing_key != sev_snp.SIGNED_BY_VCEK:
        raise AttestationError(
            "vlek", "the cloud's own key signed (VLEK): AMD does not hand it out", "its host gives the certificate"
        )
    tcb = sev_snp.tcb_versions(report.reported_tcb, product)
    names = {"bootloader": "blSPL", "tee": "teeSPL", "snp": "snpSPL", "microcode": "ucodeSPL", "fmc": "fmcSPL"}
    query = "&".join(f"{names[part]}={number:02}" for part, number in tcb.items())
    chip = report.chip_id[:8] if product == "Turin" else report.chip_id
    root = f"/vcek/v1/{product}"
    return {"key.der": f"{root}/{chip.hex()}?{query}", "chain.pem": f"{root}/cert_chain", "crl.der": f"{root}/crl"}


def manifest_names(raw: bytes, chip: str) -> dict[str, str]:
    """Returns the ids of the manifests of a GPU's driver and VBIOS, by the beginning of the file's name.

    Args:
        raw: the GPU's evidence.
        chip: the chip's name, such as "GH100".
    """
    measurements = SignedMeasurements.parse(raw)
    parts = [measurements.text(field_type) for field_type in (PROJECT_FIELD, PROJECT_SKU_FIELD, CHIP_SKU_FIELD)]
    vbios = "_".join([*parts, measurements.vbios_version.replace(".", "")])
    return {
        "rim-driver": f"NV_GPU_DRIVER_{chip}_{measurements.text(DRIVER_FIELD)}",
        "rim-vbios": f"NV_GPU_VBIOS_{vbios.upper()}",
    }


def status_requests(chain: Sequence[x509.Certificate]) -> Iterator[bytes]:
    """Yields an OCSP request in DER for each certificate of a chain below the root."""
    for certificate, issuer in zip(chain, chain[1:], strict=False):
        request = ocsp.OCSPRequestBuilder().add_certificate(certificate, issuer, SHA384()).build()
        yield request.public_bytes(Encoding.DER)


async def fetch_collateral(
    evidence: HardwareEvidence, product: str | None, services: Services = Services()
) -> dict[str, bytes]:
    """Fetches the makers' files for evidence, by their names in a collateral folder.

    Args:
        evidence: the evidence of a machine and its GPUs.
        product: the generation of AMD's processor, for reports that do not state it. None: it is not known.
        services: the addresses of the makers' services.

    Raises:
        AttestationError: the evidence does not name a file, or a service does not have it.
        Unreachable: a service does not answer.
    """
    files, statuses = dict[str, bytes](), dict[bytes, bytes]()
    async with httpx2.AsyncClient(timeout=TIMEOUT_SECONDS, follow_redirects=False) as client:
        if evidence.kind == "sev-snp":
            report = sev_snp.Report.parse(evidence.raw)
            generation = product_of(report) or product
            if generation is None:
                raise AttestationError("product", "the report does not name the processor", "give --product")
            for name, path in amd_paths(report, generation).items():
                files[name] = await _download(client, services.amd + path)
        elif evidence.kind in ("tdx", "sgx"):
            files["intel.json"] = await _intel_collateral(evidence.raw)
        for number, (raw, pem) in enumerate(evidence.gpus):
            gpu_chain = parse_certificates(pem, "a GPU's chain")
            chains = [("", gpu_chain[FIRST_REVOCABLE_INDEX:])]
            for file, name in manifest_names(raw, chip_of(gpu_chain)).items():
                answer = await _download(client, f"{services.nvidia_rim}/v1/rim/{name}")
                manifest = files[f"{file}-{number}.xml"] = _manifest(answer)
                chains.append((f"{file}-", rim.read_signer_chain(manifest)))
            for prefix, chain in chains:
                for index, request in enumerate(status_requests(chain)):
                    if request not in statuses:
                        statuses[request] = await _download(client, services.nvidia_ocsp, request)
                        files[f"gpu-{prefix}{number}-{index}.der"] = statuses[request]
    return files


def _manifest(answer: bytes) -> bytes:
    """Returns the manifest in an answer of NVIDIA's service. Raises AttestationError."""
    try:
        return base64.b64decode(json.loads(answer)["rim"])
    except (ValueError, KeyError, TypeError) as error:
        raise AttestationError(
            "collateral", f"NVIDIA's answer has no reference manifest ({type(error).__name__})", "try again"
        ) from None


async def _download(client: httpx2.AsyncClient, url: str, body: bytes | None = None) -> bytes:
    """Returns the answer to a GET, or to a POST of an OCSP request. Raises AttestationError, Unreachable."""
    headers = {"Content-Type": "application/ocsp-request"} if body is not None else {}
    service, content = url.split("?")[0], b""
    method = "GET" if body is None else "POST"
    try:
        async with client.stream(method, url, content=body, headers=headers) as answer:
            if answer.status_code != 200:
                is_limited = answer.status_code == 429
                hint = "requests are limited: wait a minute" if is_limited else "is the evidence of real hardware?"
                raise AttestationError("collateral", f"{service} answers {answer.status_code}", hint)
            async for piece in answer.aiter_bytes():
                content += piece
                if len(content) > MAX_FILE_BYTES:
                    raise AttestationError("size", f"{service} answers more than {MAX_FILE_BYTES:,} bytes")
    except httpx2.TransportError as error:
        raise Unreachable(f"{service} cannot be reached ({type(error).__name__})", "try again") from error
    return content


async def _intel_collateral(quote: bytes) -> bytes:
    """Returns Intel's collateral for a quote, as JSON. Raises Unreachable."""
    import dcap_qvl

    try:
        collateral = await dcap_qvl.get_collateral_from_pcs(quote)
    except Exception as error:  # noqa: BLE001 - the library raises its own network's errors
        raise Unreachable(f"Intel's service gives no collateral ({type(error).__name__})", "try again") from error
    return str(collateral.to_json()).encode()
