"""What is asked of the makers, and that what they sign verifies. The services are stand-ins on this machine."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace

import pytest
from cryptography.x509 import ocsp

from milkglass.attest import chains, evidence, fetch, sev_snp
from milkglass.attest import rim as rim_of
from milkglass.attest.fetch import Services
from milkglass.attest.sources import with_collateral
from milkglass.errors import AttestationError, Unreachable
from tests.attest import samples
from tests.attest.makers import Makers
from tests.attest.samples import GPUS, SAMPLES, content


def test_amds_files_are_asked_for_this_chip_and_these_versions_and_verify_the_report() -> None:
    sample = SAMPLES["Genoa"].evidence
    from cryptography.hazmat.primitives.serialization import Encoding

    from milkglass.attest.chains import parse_certificates

    der = parse_certificates(sample.collateral["key"], "x")[0].public_bytes(Encoding.DER)
    makers = Makers({
        "/vcek/v1/Genoa/cert_chain": (200, content("go-sev-guest/ask_ark_genoa.pem")),
        "/vcek/v1/Genoa/crl": (200, b"crl"), "/vcek/v1/Genoa/": (200, der),
    })  # fmt: skip

    async def work() -> dict[str, bytes]:
        async with makers.running() as services:
            return await fetch.fetch_collateral(replace(sample, collateral={}), None, services)

    found = asyncio.run(work())
    chip = sev_snp.Report.parse(sample.raw).chip_id.hex()
    assert makers.asked[0][0] == f"/vcek/v1/Genoa/{chip}?blSPL=10&teeSPL=00&snpSPL=23&ucodeSPL=84"
    assert sorted(found) == ["chain.pem", "crl.der", "key.der"]
    named = {name.split(".")[0]: one for name, one in found.items() if name != "crl.der"}
    whole = with_collateral(replace(sample, collateral={}), named)
    assert evidence.verify(whole, samples.TODAY)[0].product == "Genoa"


def test_reports_that_do_not_name_their_processor_need_it_named_and_a_clouds_key_is_not_amds_to_give() -> None:
    async def work(name: str, product: str | None) -> None:
        await fetch.fetch_collateral(SAMPLES[name].evidence, product, Services("http://127.0.0.1:9", "", ""))

    for name, product, reason in (("Milan", None, "product"), ("VLEK", "Milan", "vlek")):
        with pytest.raises(AttestationError) as refused:
            asyncio.run(work(name, product))
        assert refused.value.reason == reason
    with pytest.raises(Unreachable):
        asyncio.run(work("Milan", "Milan"))
    turin = replace(sev_snp.Report.parse(SAMPLES["Milan"].evidence.raw), reported_tcb=bytes([1, 2, 3, 4, 0, 0, 0, 5]))
    path = fetch.amd_paths(turin, "Turin")["key.der"]
    assert (
        path.endswith("?fmcSPL=01&blSPL=02&teeSPL=03&snpSPL=04&ucodeSPL=05")
        and len(path.split("/")[-1].split("?")[0]) == 16
    )


def test_a_gpus_manifests_and_revocation_are_asked_by_its_own_words() -> None:
    hopper = GPUS["Hopper, its VBIOS"]
    rim = json.dumps({"rim": base64.b64encode(content(f"nvidia/{samples.VBIOS}")).decode()}).encode()
    makers = Makers({"/v1/rim/": (200, rim), "/ocsp": (200, b"answer")})
    whole = replace(SAMPLES["TDX"].evidence, kind="software", gpus=((hopper.raw, hopper.chain),))

    async def work() -> dict[str, bytes]:
        async with makers.running() as services:
            return await fetch.fetch_collateral(whole, None, services)

    found = asyncio.run(work())
    paths = [path for path, _ in makers.asked]
    assert "/v1/rim/NV_GPU_VBIOS_1010_0200_882_96005E0001" in paths and "/v1/rim/NV_GPU_DRIVER_GH100_535.86.09" in paths
    requests = [ocsp.load_der_ocsp_request(body) for path, body in makers.asked if path == "/ocsp"]
    gpu, signer = (
        chains.parse_certificates(hopper.chain, "x"),
        rim_of.read_signer_chain(content(f"nvidia/{samples.VBIOS}")),
    )
    authorities = {one.serial_number for one in (*gpu[1:-1], *signer[:-1])}
    assert {one.serial_number for one in requests} == authorities and gpu[0].serial_number not in authorities
    assert len(requests) == len(authorities) == 6, "nothing is asked twice, and nothing of a key that a GPU made itself"
    assert found["rim-vbios-0.xml"] == content(f"nvidia/{samples.VBIOS}") and found["gpu-0-2.der"] == b"answer"
    assert {"gpu-rim-driver-0-0.der", "gpu-rim-driver-0-2.der"} <= found.keys()


def test_a_service_that_answers_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_FILE_BYTES", 1000)

    async def work(size: int) -> dict[str, bytes]:
        async with Makers({"/vcek": (200, bytes(size))}).running() as services:
            return await fetch.fetch_collateral(SAMPLES["Genoa"].evidence, None, services)

    assert len(asyncio.run(work(1000))["key.der"]) == 1000
    with pytest.raises(AttestationError, match="more than 1,000 bytes") as refused:
        asyncio.run(work(1001))
    assert refused.value.reason == "size"


def test_a_service_that_limits_requests_is_said() -> None:
    async def work() -> None:
        async with Makers({"/vcek": (429, b"")}).running() as services:
            await fetch.fetch_collateral(SAMPLES["Genoa"].evidence, None, services)

    with pytest.raises(AttestationError, match="429") as refused:
        asyncio.run(work())
    assert "minute" in refused.value.hint
