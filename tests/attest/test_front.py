"""The server's side: evidence from Linux or from software, requests handed on, quiet answers, released files."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import json
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import pytest
import uvicorn
from cryptography.hazmat.primitives.serialization import Encoding
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from milkglass.attest import evidence, passthrough, sealing, sev_snp
from milkglass.attest import front as front_module
from milkglass.attest.chains import parse_certificates
from milkglass.attest.channel import RELEASE_PATH
from milkglass.attest.evidence import HardwareEvidence
from milkglass.attest.front import (
    EVIDENCE_PER_ADDRESS,
    EVIDENCE_PER_MINUTE,
    EVIDENCE_PER_MINUTE_WITH_FIRST,
    EVIDENCE_PER_SITE,
    AttestationGateway,
    EvidenceBudget,
)
from milkglass.attest.passthrough import PAD_BYTES, QUIET_HEADER, SLOT_BYTES, STATE_HEADER, fill_slots, filler_bytes
from milkglass.attest.providers import EVIDENCE_PATH
from milkglass.attest.sealing import ReleaseInbox, seal
from milkglass.attest.sources import EvidenceSource, Software, Tsm, parse_certificate_table, read_nvml_evidence
from milkglass.cli.serve import FrontAddress
from milkglass.errors import AttestationError, Busy, Conflict, Unreachable, UsageError
from milkglass.server.process import WebServer, listen, url_of
from milkglass.server.settings import Limits
from tests.attest.programs import leave, serving
from tests.attest.samples import SAMPLES, TODAY
from tests.server.kit import until

SPKI, NONCE = bytes(range(32)), bytes(range(32, 64))
SOFTWARE = EvidenceSource(Software())


# --- Linux' interface -------------------------------------------------------------------------------------------------
@pytest.fixture
def tsm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tsm, dict[str, Any]]:
    """A folder that does what configfs does: a new folder in it has the files of a report."""
    state: dict[str, Any] = {"provider": "sev_guest", "generations": ["1", "1"], "fail": [], "aux": b""}
    mkdir, rmdir, read_text, write_bytes = Path.mkdir, Path.rmdir, Path.read_text, Path.write_bytes

    def make(self: Path, *args: Any, **options: Any) -> None:
        if self.parent == tmp_path and state["fail"]:
            raise OSError(state["fail"].pop(), "it failed")
        mkdir(self, *args, **options)
        if self.parent == tmp_path:
            write_bytes(self / "provider", state["provider"].encode() + b"\n")
            write_bytes(self / "auxblob", state["aux"])
            write_bytes(self / "generation", b"0\n")

    def wrote(self: Path, data: bytes) -> int:
        if self.name == "inblob":
            write_bytes(self.parent / "outblob", b"report of " + data)
        return write_bytes(self, data)

    def read(self: Path, *args: Any, **options: Any) -> str:
        return str(state["generations"].pop(0)) if self.name == "generation" else read_text(self, *args, **options)

    def remove(self: Path) -> None:
        for one in self.iterdir():
            one.unlink()
        rmdir(self)

    for name, function in (("mkdir", make), ("write_bytes", wrote), ("read_text", read), ("rmdir", remove)):
        monkeypatch.setattr(Path, name, function)
    monkeypatch.setattr("milkglass.attest.sources.PAUSE_SECONDS", 0.0)
    return Tsm(tmp_path), state


def test_a_report_is_asked_for_and_its_entry_removed(tsm: tuple[Tsm, dict[str, Any]], tmp_path: Path) -> None:
    source, state = tsm
    assert source.report(b"x" * 64) == ("sev-snp", b"report of " + b"x" * 64, {})
    assert not list(tmp_path.iterdir())
    state |= {"provider": "tdx_guest", "generations": ["1", "1"]}
    assert source.report(b"y" * 64)[0] == "tdx"


def test_another_writer_or_a_busy_machine_is_tried_again(tsm: tuple[Tsm, dict[str, Any]]) -> None:
    source, state = tsm
    state |= {"generations": ["1", "2", "1", "1"], "fail": [errno.EBUSY, errno.EINTR]}
    assert source.report(b"x" * 64)[1] == b"report of " + b"x" * 64
    state |= {"generations": ["1", "2"] * 9}
    with pytest.raises(AttestationError, match="another program"):
        source.report(b"x" * 64)


def test_no_interface_and_an_unknown_provider_are_said(tsm: tuple[Tsm, dict[str, Any]], tmp_path: Path) -> None:
    source, state = tsm
    with pytest.raises(AttestationError, match="ENOENT"):
        Tsm(tmp_path / "missing").report(bytes(64))
    state |= {"provider": "arm_cca_guest", "generations": ["1", "1"]}
    with pytest.raises(AttestationError, match="arm_cca_guest"):
        source.report(bytes(64))


# AMD's table as the host writes it: 16 bytes of a GUID in the order of its text (AMDESE/sev-guest fills them with
# uuid_parse, go-sev-guest with uuid.Parse), offset and length as little-endian words, and an entry of zeros at the end.
VCEK, ASK, ARK = (
    b"\x63\xda\x75\x8d\xe6\x64\x45\x64\xad\xc5\xf4\xb9\x3b\xe8\xac\xcd",
    b"\x4a\xb7\xb3\x79\xbb\xac\x4f\xe4\xa0\x2f\x05\xae\xf3\x27\xc7\x82",
    b"\xc0\xb4\x06\xa4\xa8\x03\x49\x52\x97\x43\x3f\xb6\x01\x4c\xd0\xae",
)
VLEK, CRL = (
    b"\xa8\x07\x4b\xc2\xa2\x5a\x48\x3e\xaa\xe6\x39\xc0\x45\xa0\xb8\xa1",
    b"\x92\xf8\x1b\xc3\x58\x11\x4d\x3d\x97\xff\xd1\x9f\x88\xdc\x67\xea",
)


def table(parts: dict[bytes, bytes]) -> bytes:
    head, body = b"", b""
    for guid, part in parts.items():
        head += guid + struct.pack("<II", 24 * (len(parts) + 1) + len(body), len(part))
        body += part
    return head + bytes(24) + body


def test_amds_table_of_certificates_is_read_and_a_malformed_one_gives_nothing() -> None:
    whole = table({VCEK: b"VCEK", ASK: b"ASK", ARK: b"ARK", CRL: b"CRL"})
    found = parse_certificate_table(whole)
    assert found["key"] == b"VCEK" and found["crl"] == b"CRL" and found["chain"].count(b"BEGIN CERTIFICATE") == 2
    assert parse_certificate_table(table({VLEK: b"VLEK"}))["key"] == b"VLEK"
    for bad in (b"", b"x" * 23, whole[:96], whole[:30], b"\xff" * 100):
        assert "chain" not in parse_certificate_table(bad)
    both = parse_certificate_table(table({VLEK: b"VLEK", VCEK: b"VCEK"}))
    assert both == {"key": b"VCEK", "key+1": b"VLEK"}, "the report says which of them signed"
    assert parse_certificate_table(table({VCEK: b"VCEK", ASK: b"", ARK: b"ARK", CRL: b""})) == {"key": b"VCEK"}
    mixed = [guid[3::-1] + guid[5:3:-1] + guid[7:5:-1] + guid[8:] for guid in (VCEK, ASK, ARK, CRL)]
    assert parse_certificate_table(table(dict.fromkeys(mixed, b"x"))) == {}, "Windows' order of bytes is not AMD's"


# --- NVML, as nvidia-ml-py 13.615.71 offers it ------------------------------------------------------------------------
class Certificates(ctypes.Structure):
    _fields_ = (
        ("certChainSize", ctypes.c_uint), ("attestationCertChainSize", ctypes.c_uint),
        ("certChain", ctypes.c_uint8 * 0x1000), ("attestationCertChain", ctypes.c_uint8 * 0x1400),
    )  # fmt: skip


class Report(ctypes.Structure):
    _fields_ = (
        ("isCecAttestationReportPresent", ctypes.c_uint), ("attestationReportSize", ctypes.c_uint),
        ("cecAttestationReportSize", ctypes.c_uint), ("nonce", ctypes.c_uint8 * 0x20),
        ("attestationReport", ctypes.c_uint8 * 0x2000), ("cecAttestationReport", ctypes.c_uint8 * 0x1000),
    )  # fmt: skip


class NVMLError(Exception):
    pass


class Nvml(ModuleType):
    """The package's module, with two GPUs, whose reports begin with the nonce."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.gpus, self.size, self.open = 2, 40, 0
        self.state = SimpleNamespace(ccFeature=1, environment=2, devToolsMode=0)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlSystemGetConfComputeState(self) -> SimpleNamespace:
        return self.state

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return ctypes.c_void_p(index + 1)

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, device: Any, c_nonce: Any) -> Report:
        report = Report(attestationReportSize=self.size)
        report.nonce = (ctypes.c_uint8 * len(c_nonce))(*c_nonce)
        report.attestationReport[:40] = [*report.nonce, *bytes(7), device.value]
        return report

    def nvmlDeviceGetConfComputeGpuCertificate(self, device: Any) -> Certificates:
        found = Certificates(attestationCertChainSize=4, certChainSize=2)
        found.attestationCertChain[:4] = [*b"PEM", device.value]
        return found


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_each_gpu_gives_its_report_and_certificates_for_the_nonce(nvml: Nvml) -> None:
    assert read_nvml_evidence(NONCE) == [(NONCE + bytes(7) + b"\1", b"PEM\1"), (NONCE + bytes(7) + b"\2", b"PEM\2")]
    assert nvml.open == 0, "the library is closed again"


@pytest.mark.parametrize("name", [
    "nvmlInit", "nvmlSystemGetConfComputeState", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetConfComputeGpuAttestationReport", "nvmlDeviceGetConfComputeGpuCertificate", "nvmlShutdown",
])  # fmt: skip
@pytest.mark.parametrize(
    "error", [NVMLError("Not Supported"), TypeError("2 arguments"), AttributeError("none"), OSError(5)]
)
def test_whatever_nvml_raises_is_a_named_refusal(
    nvml: Nvml, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(nvml, name, fail)
    with pytest.raises(AttestationError, match=type(error).__name__) as refused:
        read_nvml_evidence(NONCE)
    assert refused.value.reason == "gpu"


@pytest.mark.parametrize("changed", [{"devToolsMode": 1}, {"ccFeature": 0}, {"environment": 1}])
def test_gpus_in_developer_mode_or_without_protection_give_no_evidence(nvml: Nvml, changed: dict[str, int]) -> None:
    vars(nvml.state).update(changed)
    with pytest.raises(AttestationError, match="not protected") as refused:
        read_nvml_evidence(NONCE)
    assert refused.value.reason == "gpu" and nvml.open == 0


def test_no_gpu_and_a_size_that_cannot_be_are_refused(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (0, 0x2001):
        nvml.size = size
        with pytest.raises(AttestationError, match=f"report of GPU 0 has {size} bytes"):
            read_nvml_evidence(NONCE)
    nvml.gpus = 0
    with pytest.raises(AttestationError, match="no GPU"):
        read_nvml_evidence(NONCE)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UsageError, match="nvidia-ml-py"):
        read_nvml_evidence(NONCE)


# --- the application --------------------------------------------------------------------------------------------------
@asynccontextmanager
async def client(front: AttestationGateway, engine: Starlette | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    front._client = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(engine or Starlette()), base_url="http://127.0.0.1"
    )
    app = front.app()
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="https://x") as found:
        yield found
    await front._client.aclose()


def run(work: Callable[[], Any]) -> None:
    asyncio.run(work())


def test_evidence_answers_a_nonce_and_verifies_for_this_key_alone() -> None:
    async def work() -> None:
        async with client(AttestationGateway(SOFTWARE, SPKI)) as one:
            answer = await one.get(EVIDENCE_PATH, params={"nonce": NONCE.hex()})
            assert answer.headers[STATE_HEADER] == "NOT ATTESTED"
            found = HardwareEvidence.parse(answer.content)
            evidence.verify(found, TODAY, SPKI, NONCE)
            for spki, nonce in ((bytes(32), NONCE), (SPKI, bytes(32))):
                with pytest.raises(AttestationError):
                    evidence.verify(found, TODAY, spki, nonce)
            for bad in ("", "zz", "00" * 31, "00" * 33):
                assert (await one.get(EVIDENCE_PATH, params={"nonce": bad})).status_code == 400

    run(work)


async def codes_of(app: Any, address: str, count: int, headers: dict[str, str] | None = None) -> list[int]:
    """Asks for evidence from an address."""
    transport = httpx2.ASGITransport(app, client=(address, 1))
    async with httpx2.AsyncClient(transport=transport, base_url="https://x", headers=headers) as one:
        return [(await one.get(EVIDENCE_PATH, params={"nonce": NONCE.hex()})).status_code for _ in range(count)]


def test_a_stranger_who_asks_for_evidence_again_and_again_locks_nobody_else_out() -> None:
    async def work() -> None:
        app = AttestationGateway(SOFTWARE, SPKI).app()
        most = EVIDENCE_PER_ADDRESS
        assert await codes_of(app, "192.0.2.1", 3 * most) == [200] * most + [503] * 2 * most
        assert await codes_of(app, "192.0.2.2", 2) == [200, 200]
        spoofed = {"X-Forwarded-For": "192.0.2.99", "Forwarded": "for=192.0.2.99"}
        assert await codes_of(app, "192.0.2.1", 1, spoofed) == [503]
        # IPv6: whoever has one address has 2^64
        assert await codes_of(app, "2001:db8:0:1::1", most) == [200] * most
        assert await codes_of(app, "2001:db8:0:1:ffff::9", 1) == [503]
        assert await codes_of(app, "2001:db8:0:2::1", 1) == [200]
        assert await codes_of(app, "::ffff:192.0.2.1", 1) == [503]

    run(work)


def test_one_piece_of_evidence_is_made_at_a_time_few_wait_and_who_leaves_waits_no_more() -> None:
    going, at_once, most = threading.Event(), [0], [0]

    class Slow(Software):
        def report(self, signed_data: bytes) -> Any:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            assert going.wait(20)
            at_once[0] -= 1
            return super().report(signed_data)

    async def work() -> None:
        app = AttestationGateway(EvidenceSource(Slow()), SPKI).app()

        async def ask(address: str) -> httpx2.Response:
            transport = httpx2.ASGITransport(app, client=(address, 1))
            async with httpx2.AsyncClient(transport=transport, base_url="https://x") as one:
                return await one.get(EVIDENCE_PATH, params={"nonce": NONCE.hex()})

        query = f"nonce={NONCE.hex()}"
        await leave(app, EVIDENCE_PATH, lambda: at_once[0] == 1, method="GET", query=query)
        full = front_module.MAX_UNFINISHED
        asked = [asyncio.create_task(ask(f"192.0.2.{number}")) for number in range(full + 5)]
        async with asyncio.timeout(20):
            while sum(task.done() for task in asked) < 5:
                await asyncio.sleep(0.01)
        answers = [task.result() for task in asked if task.done()]
        assert [answer.status_code for answer in answers] == [503] * 5, "those that left are not counted"
        for answer in answers:
            assert answer.headers["retry-after"] == "2" and str(full) in answer.json()["error"]["message"]
        going.set()
        codes = [answer.status_code for answer in await asyncio.gather(*asked)]
        assert sorted(codes) == [200] * full + [503] * 5 and most == [1]
        going.clear()
        held = [asyncio.create_task(ask("192.0.2.200")) for _ in range(full)]
        other = asyncio.create_task(ask("192.0.2.201"))
        await asyncio.sleep(0.1)
        going.set()
        of_one = sorted(answer.status_code for answer in await asyncio.gather(*held))
        assert of_one.count(200) == front_module.MAX_UNFINISHED_OF_ADDRESS < full, "one address does not fill the queue"
        assert (await other).status_code == 200
        assert (await ask("192.0.2.99")).status_code == 200

    run(work)


def test_a_header_does_not_say_from_which_address_a_request_comes() -> None:
    """By the web server as it is, also from this machine, whose word many servers take for it."""
    address = FrontAddress("127.0.0.1", 0, None, None)
    listener = listen(address, Limits())
    server = WebServer(AttestationGateway(SOFTWARE, SPKI).app(), address, Limits())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started)
        with httpx2.Client(base_url=url_of(listener, address), trust_env=False) as one:
            codes = [
                one.get(
                    EVIDENCE_PATH, params={"nonce": NONCE.hex()}, headers={"X-Forwarded-For": f"192.0.2.{n}"}
                ).status_code
                for n in range(EVIDENCE_PER_ADDRESS + 2)
            ]
        assert codes == [200] * EVIDENCE_PER_ADDRESS + [503] * 2
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_all_addresses_together_have_a_limit_and_it_ends_after_a_minute() -> None:
    now = [0.0]
    budget = EvidenceBudget(lambda: now[0])
    for number in range(EVIDENCE_PER_MINUTE):
        budget.take(f"10.0.{number // EVIDENCE_PER_ADDRESS}.1")
    budget.take("10.9.9.9")  # its first
    for address in ("10.9.9.9", "10.0.0.1"):
        with pytest.raises(Busy):
            budget.take(address)
    now[0] = 59.9
    with pytest.raises(Busy):
        budget.take("10.9.9.9")
    now[0] = 60.0
    for _ in range(EVIDENCE_PER_ADDRESS):
        budget.take("10.0.0.1")
    with pytest.raises(Busy):
        budget.take("10.0.0.1")


def test_few_sites_that_use_up_the_total_lock_out_nobody_who_had_none() -> None:
    budget = EvidenceBudget(lambda: 0.0)

    def taken(addresses: list[str]) -> int:
        """How many of these get a piece."""
        count = 0
        for address in addresses:
            with suppress(Busy):
                budget.take(address)
                count += 1
        return count

    one_site = [f"2001:db8:7:{subnet:x}::1" for subnet in range(100) for _ in range(EVIDENCE_PER_ADDRESS)]
    assert taken(one_site) == EVIDENCE_PER_SITE, "whoever has a /48 has 65,536 times a /64"
    others = [f"2001:db8:{site:x}::1" for site in range(8, 14) for _ in range(EVIDENCE_PER_ADDRESS)]
    assert taken(others) == EVIDENCE_PER_MINUTE - EVIDENCE_PER_SITE
    assert taken(others) == 0, "the total is used up"
    assert taken(["192.0.2.7", "2001:db8:ffff::1", "192.0.2.7", "2001:db8:ffff:2::1"]) == 2, "each its first"
    many = [f"10.{number >> 8}.{number & 255}.1" for number in range(2_000)]
    assert taken(many) == EVIDENCE_PER_MINUTE_WITH_FIRST - EVIDENCE_PER_MINUTE - 2, "first pieces have a limit, too"


def test_whoever_has_no_token_gets_evidence_and_health_alone(tmp_path: Path) -> None:
    reached = list[str]()

    async def engine_answers(request: Request) -> Response:
        reached.append(request.url.path)
        return JSONResponse({})

    engine = Starlette(
        routes=[Route(path, engine_answers, methods=[how]) for path, how in passthrough.METHOD_BY_PATH.items()]
    )
    token, inbox = "t" * 16, ReleaseInbox.new(tmp_path / "got", SENDER)

    async def work() -> None:
        async with client(AttestationGateway(SOFTWARE, SPKI, "http://127.0.0.1:1", inbox, token=token), engine) as one:
            for authorization in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": token}):
                for path, how in passthrough.METHOD_BY_PATH.items():
                    answer = await one.request(how, path, headers=authorization)
                    assert answer.status_code == (200 if path == "/health" else 401), path
                    assert answer.headers[STATE_HEADER] == "NOT ATTESTED"
                assert (
                    await one.get(EVIDENCE_PATH, params={"nonce": NONCE.hex()}, headers=authorization)
                ).status_code == 200
            assert {*reached} == {"/health"}
            sealed = seal(b"x", inbox.public_key, "x")
            released = await one.post(RELEASE_PATH, params={"name": "x"}, content=sealed, headers=WITH_TOKEN)
            assert released.status_code == 200, "a release has a token of its own"
            with_token = {"Authorization": f"Bearer {token}"}
            for path, how in passthrough.METHOD_BY_PATH.items():
                assert (await one.request(how, path, headers=with_token)).status_code == 200
            assert {*reached} == {*passthrough.METHOD_BY_PATH}

    run(work)


def test_every_answer_says_what_is_attested_also_refusals_and_errors(tmp_path: Path) -> None:
    class Broken(Software):
        def report(self, report_data: bytes) -> Any:
            raise ValueError("secret")

    async def work() -> None:
        for source, state in ((SOFTWARE, "NOT ATTESTED"), (EvidenceSource(Tsm(tmp_path / "none")), "see the evidence"),
                              (EvidenceSource(Broken()), "NOT ATTESTED")):  # fmt: skip
            async with client(AttestationGateway(source, SPKI)) as one:
                nonce = {"nonce": NONCE.hex()}
                sent = [
                    await one.get("/nothing"), await one.put(EVIDENCE_PATH), await one.get(EVIDENCE_PATH),
                    await one.get(EVIDENCE_PATH, params=nonce),
                    await one.post("/v1/chat/completions", content=b"x", headers={"Content-Length": str(1 << 40)}),
                ]  # fmt: skip
                codes = [answer.status_code for answer in sent]
                assert codes[:3] == [404, 405, 400] and codes[4] == 413 and "GET" in sent[1].headers["allow"]
                for answer in sent:
                    assert answer.headers.get_list(STATE_HEADER) == [state], answer
                    assert "secret" not in answer.text
                    if answer.status_code != 200:
                        assert answer.json()["error"]["message"]

    run(work)


def test_bodies_in_memory_have_a_limit_in_all() -> None:
    """A hundred clients send a body each and wait: what is held stays under the limit, and the others are refused."""
    body = b"x" * passthrough.MAX_BODY_BYTES
    most = front_module.MAX_HELD_BYTES // len(body)

    async def work() -> None:
        waiting, arrived = asyncio.Event(), list[int]()

        async def slow(request: Request) -> Response:
            arrived.append(len(await request.body()))
            await waiting.wait()
            return JSONResponse({})

        engine = Starlette(routes=[Route("/v1/embeddings", slow, methods=["POST"])])
        async with client(AttestationGateway(SOFTWARE, SPKI, "http://127.0.0.1:1"), engine) as one:
            asked = [asyncio.create_task(one.post("/v1/embeddings", content=body)) for _ in range(most)]
            async with asyncio.timeout(60):
                while len(arrived) < most:
                    await asyncio.sleep(0.01)
            refused = [await one.post("/v1/embeddings", content=body) for _ in range(3)]
            assert [answer.status_code for answer in refused] == [503] * 3 and len(arrived) == most
            waiting.set()
            assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * most
            assert (await one.post("/v1/embeddings", content=body)).status_code == 200, "the memory is free again"

    run(work)


def test_one_clients_cookie_is_not_sent_with_another_clients_request() -> None:
    """The engine sets a cookie, by its own server and the front's own connections to it."""
    seen = list[str | None]()

    async def cookies(request: Request) -> Response:
        seen.append(request.headers.get("cookie"))
        answer = JSONResponse({})
        answer.set_cookie("session", f"of-client-{len(seen)}")
        answer.set_cookie("other", "x")
        return answer

    async def work(port: int) -> None:
        front = AttestationGateway(SOFTWARE, SPKI, f"http://127.0.0.1:{port}")
        app = front.app()
        async with app.router.lifespan_context(app):
            for _ in range(3):
                async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="https://x") as one:
                    answer = await one.post("/v1/embeddings", json={})
                    assert answer.status_code == 200 and "set-cookie" not in answer.headers

    engine = Starlette(routes=[Route("/v1/embeddings", cookies, methods=["POST"])])
    with serving(engine) as port:
        asyncio.run(work(port))
    assert seen == [None] * 3


async def echo(request: Request) -> Response:
    found = json.loads(await request.body() or b"{}")
    return JSONResponse({"got": found, "headers": sorted(request.headers)}, headers={"Server": "secret/1.0"})


EVENTS = [
    b"data: %d " % n + b"x" * size + b"\n\n" for n, size in enumerate((3, 5_000, 40, 4_090, 4_091, 4_092, 9_000, 1))
]


async def stream(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for one in EVENTS:
            yield one[: len(one) // 2]
            await asyncio.sleep(0.01)
            yield one[len(one) // 2 :]

    return StreamingResponse(parts(), media_type="text/event-stream")


ENGINE = Starlette(routes=[
    Route("/v1/embeddings", echo, methods=["POST"]), Route("/v1/chat/completions", stream, methods=["POST"]),
    Route("/metrics", echo), Route("/v1/models", echo),
])  # fmt: skip


def test_only_listed_paths_and_headers_are_handed_on() -> None:
    async def work() -> None:
        async with client(AttestationGateway(SOFTWARE, SPKI, "http://127.0.0.1:1"), ENGINE) as one:
            sent = {"Cookie": "a=b", "X-Forwarded-For": "me", "User-Agent": "me/1", "Authorization": "Bearer x"}
            answer = await one.post("/v1/embeddings", json={"input": "it"}, headers=sent)
            assert answer.json()["got"] == {"input": "it"} and "server" not in answer.headers
            assert not {"cookie", "x-forwarded-for"} & set(answer.json()["headers"])
            assert "authorization" in answer.json()["headers"]
            for path in ("/metrics", "/v1/embeddings/../metrics", "/v1/load_lora_adapter", "/docs", "/v1/models/"):
                assert (await one.get(path)).status_code in (404, 405)
            assert (await one.post("/v1/models")).status_code == 405

    run(work)


def test_without_an_engine_or_with_one_that_is_down_the_error_says_so() -> None:
    async def work() -> None:
        async with client(AttestationGateway(SOFTWARE, SPKI)) as one:
            assert "--in-front-of" in (await one.get("/v1/models")).text

    run(work)


# --- quiet ------------------------------------------------------------------------------------------------------------
def test_a_whole_answer_is_padded_and_says_the_same() -> None:
    async def work() -> None:
        async with client(AttestationGateway(SOFTWARE, SPKI, "http://127.0.0.1:1"), ENGINE) as one:
            for size in (1, 500, 20_000):
                answer = await one.post("/v1/embeddings", json={"input": "x" * size}, headers={QUIET_HEADER: "whole"})
                assert len(answer.content) % PAD_BYTES == 0 and answer.json()["got"] == {"input": "x" * size}
            assert (await one.post("/v1/embeddings", json={}, headers={QUIET_HEADER: "loud"})).status_code == 400

    run(work)


def test_all_that_is_not_streamed_has_padded_sizes_if_the_request_is_quiet(tmp_path: Path) -> None:
    asked = list[bytes]()

    async def models(request: Request) -> Response:
        asked.append(await request.body())
        return JSONResponse({"data": []})

    async def empty(request: Request) -> Response:
        return Response()

    engine = Starlette(routes=[Route("/v1/models", models), Route("/health", empty)])

    async def work(quiet: str) -> None:
        async with client(AttestationGateway(SOFTWARE, SPKI, "http://127.0.0.1:1", token=RELEASE_TOKEN), engine) as one:
            one.headers[QUIET_HEADER] = quiet
            refused = [await one.get("/v1/models"), await one.get(EVIDENCE_PATH)]
            one.headers.update(WITH_TOKEN)
            answers = [
                await one.request("GET", "/v1/models", content=b" " * PAD_BYTES), await one.get("/health"),
                *refused, await one.get("/nothing"), await one.put("/v1/models"),
                await one.post("/v1/embeddings", content=b"x", headers={"Content-Length": str(1 << 40)}),
                await one.get("/v1/models", headers={QUIET_HEADER: "loud"}),
            ]  # fmt: skip
            assert [answer.status_code for answer in answers] == [200, 200, 401, 400, 404, 405, 413, 400]
            for answer in answers:
                assert len(answer.content) == PAD_BYTES == int(answer.headers["content-length"]), answer
                assert answer.json() if answer.content.strip() else answer.url.path == "/health"
            assert asked == [b""], "the engine gets no blanks"

    for quiet in ("whole", "slots"):
        asked.clear()
        run(lambda quiet=quiet: work(quiet))


def test_no_more_of_a_quiet_answer_waits_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on without an end, faster than slots leave."""
    monkeypatch.setattr(passthrough, "MAX_QUIET_BYTES", 50_000)
    ended = threading.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            for _ in range(100_000):
                yield b"data: " + b"x" * 992 + b"\n\n"
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def engine(request: Request) -> Response:
        return StreamingResponse(endless(), media_type="text/event-stream")

    async def work(port: int) -> None:
        app = AttestationGateway(SOFTWARE, SPKI, f"http://127.0.0.1:{port}").app()
        client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="https://x")
        async with app.router.lifespan_context(app), client as one:
            answer = await one.post("/v1/completions", json={}, headers={QUIET_HEADER: "whole"})
            assert answer.status_code == 502 and "50,000 bytes" in answer.json()["error"]["message"]
        sent = list[bytes]()
        with pytest.raises(Unreachable, match="50,000 bytes"):
            async for piece in fill_slots(endless()):
                sent.append(piece)
        assert len(sent) <= 2, "what waited is not sent first"

    with serving(Starlette(routes=[Route("/v1/completions", engine, methods=["POST"])])) as port:
        asyncio.run(asyncio.wait_for(work(port), 20))
        assert ended.wait(10), "the engine's connection was closed"


@pytest.mark.parametrize("quiet", [None, "whole", "slots"])
def test_an_engine_that_breaks_off_is_a_named_error_or_a_broken_answer(
    quiet: str | None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer ends in the middle: never does a part pass for the whole, and nothing of it is logged."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"10\r\ndata: secret 1\n\n\r\n10\r\ndata: sec")
        await writer.drain()
        writer.close()

    async def work() -> None:
        engine = await asyncio.start_server(cut, "127.0.0.1", 0)
        front = AttestationGateway(SOFTWARE, SPKI, f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}")
        server = uvicorn.Server(uvicorn.Config(front.app(), port=0, log_level="info", log_config=None))
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        headers = {} if quiet is None else {QUIET_HEADER: quiet}
        async with httpx2.AsyncClient(base_url=url, trust_env=False, headers=headers) as one:
            if quiet == "whole":
                answer = await one.post("/v1/completions", json={})
                assert answer.status_code == 502 and answer.json()["error"]["type"] == "Unreachable"
                assert "broke off" in answer.json()["error"]["message"]
                assert answer.headers[STATE_HEADER] == "NOT ATTESTED"
            else:
                with pytest.raises(httpx2.RemoteProtocolError):
                    await one.post("/v1/completions", json={})
        server.should_exit = True
        await running
        engine.close()

    run(work)
    said = "".join(capfd.readouterr()) + caplog.text
    assert "Traceback" not in said and "secret" not in said, said


def test_slots_have_one_size_and_carry_the_same_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passthrough, "SLOT_SECONDS", 0.01)

    async def work() -> None:
        async def parts() -> AsyncIterator[bytes]:
            for one in EVENTS:
                yield one[:2]
                await asyncio.sleep(0.005)
                yield one[2:]

        pieces = [one async for one in fill_slots(parts())]
        assert {len(one) for one in pieces} == {SLOT_BYTES}
        lines = b"".join(pieces).split(b"\n\n")
        assert [one for one in lines if one.startswith(b"data")] == [one.removesuffix(b"\n\n") for one in EVENTS]
        assert all(one.lstrip(b"\n").startswith((b"data", b":")) or not one.strip() for one in lines)

    run(work)


def test_a_filler_is_skipped_by_every_reader() -> None:
    for size in range(50):
        found = filler_bytes(size)
        assert len(found) == size
        assert not found.strip(b"\n") or found.startswith(b":")


def test_slots_end_when_the_reader_leaves() -> None:
    async def work() -> None:
        ended = asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: x\n\n"
                    await asyncio.sleep(0.01)
            finally:
                ended.set()

        found = fill_slots(parts())
        await anext(found)
        await found.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(ended.wait(), 5)

    run(work)


# --- released files ---------------------------------------------------------------------------------------------------
RELEASE_TOKEN = "0123456789abcdef" * 4
SENDER = hashlib.sha256(RELEASE_TOKEN.encode()).hexdigest()
WITH_TOKEN = {"Authorization": f"Bearer {RELEASE_TOKEN}"}


def test_a_file_opens_in_the_job_it_was_sealed_to_and_under_its_name(tmp_path: Path) -> None:
    inbox, other = ReleaseInbox.new(tmp_path / "a", SENDER), ReleaseInbox.new(tmp_path / "b", SENDER)
    sealed = seal(b"a key", inbox.public_key, "my.mgkey")
    assert inbox.unseal(BytesIO(sealed), "my.mgkey").read_bytes() == b"a key"
    assert len(seal(b"", inbox.public_key, "x")) == sealing.SEALED_EXTRA_BYTES
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0 and (tmp_path / "a" / "my.mgkey").stat().st_mode & 0o077 == 0
    (tmp_path / "a" / "my.mgkey").unlink()
    for where, what, name in ((other, sealed, "my.mgkey"), (inbox, sealed, "other"), (inbox, sealed[:-1], "my.mgkey"),
                              (inbox, b"", "my.mgkey")):  # fmt: skip
        with pytest.raises(AttestationError):
            where.unseal(BytesIO(what), name)
    for name in ("../x", "", "a/b", ".hidden", "x" * 101, "a b"):
        with pytest.raises(UsageError):
            inbox.unseal(BytesIO(sealed), name)
    for public in (b"", b"\xff" * 1_216):
        with pytest.raises(AttestationError):
            seal(b"x", public, "x")
    for sender in ("", "x" * 64, SENDER.upper(), SENDER[1:]):
        with pytest.raises(UsageError):
            ReleaseInbox.new(tmp_path / "c", sender)
    with pytest.raises(UsageError, match="openssl rand"):
        sealing.token_digest("short")
    assert sealing.token_digest(RELEASE_TOKEN) == SENDER


def test_no_file_is_replaced_whoever_put_it_there(tmp_path: Path) -> None:
    inbox = ReleaseInbox.new(tmp_path / "got", SENDER)
    inbox.unseal(BytesIO(seal(b"the owner's", inbox.public_key, "my.mgkey")), "my.mgkey")
    (tmp_path / "got" / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("my.mgkey", "link"):
        with pytest.raises(Conflict, match=name):
            inbox.unseal(BytesIO(seal(b"a stranger's", inbox.public_key, name)), name)
    assert (tmp_path / "got" / "my.mgkey").read_bytes() == b"the owner's" and not (tmp_path / "elsewhere").exists()
    for number in range(sealing.MAX_FILES - 2):
        (tmp_path / "got" / f"f{number}").touch()
    with pytest.raises(Conflict, match=str(sealing.MAX_FILES)):
        inbox.unseal(BytesIO(seal(b"x", inbox.public_key, "one-more")), "one-more")


def test_a_job_takes_files_that_were_sealed_to_it_and_its_evidence_binds_the_key(tmp_path: Path) -> None:
    inbox = ReleaseInbox.new(tmp_path / "got", SENDER)
    source = EvidenceSource(Software(), sealing_key=inbox.public_key)

    async def work() -> None:
        async with client(AttestationGateway(source, SPKI, None, inbox)) as one:
            found = HardwareEvidence.parse((await one.get(EVIDENCE_PATH, params={"nonce": NONCE.hex()})).content)
            assert found.sealing_key == inbox.public_key
            evidence.verify(found, TODAY, SPKI, NONCE)
            swapped = json.loads(found.document()) | {"sealing": ""}
            with pytest.raises(AttestationError):
                evidence.verify(HardwareEvidence.parse(json.dumps(swapped).encode()), TODAY, SPKI, NONCE)
            one.headers.update(WITH_TOKEN)
            sealed = sealing.seal(b"rows", found.sealing_key, "rows.jsonl")
            assert (await one.post(RELEASE_PATH, params={"name": "rows.jsonl"}, content=sealed)).json() == {
                "kept": "rows.jsonl"
            }
            assert (tmp_path / "got" / "rows.jsonl").read_bytes() == b"rows"
            assert (await one.post(RELEASE_PATH, params={"name": "other"}, content=sealed)).status_code == 502
            again = await one.post(RELEASE_PATH, params={"name": "rows.jsonl"}, content=sealed)
            assert again.status_code == 409 and "rows.jsonl" in again.json()["error"]["message"]
            assert sorted(path.name for path in (tmp_path / "got").iterdir()) == ["rows.jsonl"]

    run(work)
    run_without = AttestationGateway(SOFTWARE, SPKI)

    async def refused() -> None:
        async with client(run_without) as one:
            assert (await one.post(RELEASE_PATH, params={"name": "x"}, content=b"x")).status_code == 404

    run(refused)


def test_a_file_without_the_senders_token_is_refused_before_it_arrives(tmp_path: Path) -> None:
    """A stranger has the published key, and seals a file that would open."""
    inbox = ReleaseInbox.new(tmp_path / "got", SENDER)
    sealed = seal(b"a stranger's", inbox.public_key, "my.mgkey")
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for at in range(0, len(sealed), 100):
            read += 1
            yield sealed[at : at + 100]

    async def work() -> None:
        async with client(AttestationGateway(SOFTWARE, SPKI, None, inbox)) as one:
            wrong = ({}, {"Authorization": ""}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {SENDER}"},
                     {"Authorization": f"Bearer {RELEASE_TOKEN}x"}, {"Authorization": b"Bearer \xff"})  # fmt: skip
            for headers in wrong:
                answer = await one.post(RELEASE_PATH, params={"name": "my.mgkey"}, content=body(), headers=headers)
                assert answer.status_code == 401, headers

    run(work)
    assert read == 0 and not list((tmp_path / "got").iterdir())


def test_a_file_that_is_too_large_is_refused_while_it_arrives_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "MAX_FILE_BYTES", 1 << 20)
    inbox = ReleaseInbox.new(tmp_path / "got", SENDER)
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 64 << 10
            yield bytes(64 << 10)

    async def work() -> None:
        async with client(AttestationGateway(SOFTWARE, SPKI, None, inbox)) as one:
            one.headers.update(WITH_TOKEN)
            answer = await one.post(RELEASE_PATH, params={"name": "big"}, content=endless())
            assert answer.status_code == 413 and read < 2 << 20
            claimed = {"Content-Length": str(4 << 30)}
            assert (
                await one.post(RELEASE_PATH, params={"name": "big"}, content=b"x", headers=claimed)
            ).status_code == 413
            exact = seal(bytes(1 << 20), inbox.public_key, "exact")
            assert (await one.post(RELEASE_PATH, params={"name": "exact"}, content=exact)).status_code == 200
            assert sorted(path.name for path in (tmp_path / "got").iterdir()) == ["exact"]

    run(work)


def test_few_files_arrive_at_a_time(tmp_path: Path) -> None:
    inbox = ReleaseInbox.new(tmp_path / "got", SENDER)

    async def work() -> None:
        going = asyncio.Event()

        async def slow(sealed: bytes) -> AsyncIterator[bytes]:
            yield sealed[:10]
            await going.wait()
            yield sealed[10:]

        async with client(AttestationGateway(SOFTWARE, SPKI, None, inbox)) as one:
            one.headers.update(WITH_TOKEN)

            async def send(name: str) -> int:
                sealed = seal(b"x", inbox.public_key, name)
                return (await one.post(RELEASE_PATH, params={"name": name}, content=slow(sealed))).status_code

            first = [asyncio.create_task(send(f"f{number}")) for number in range(sealing.MAX_ARRIVING)]
            await asyncio.sleep(0.1)
            assert await send("more") == 503
            going.set()
            assert await asyncio.gather(*first) == [200] * sealing.MAX_ARRIVING
            assert await send("more") == 200, "a place is free again"

    run(work)


def test_a_report_verifies_with_the_certificates_that_the_host_gave() -> None:
    sample = SAMPLES["Milan"]
    chain = parse_certificates(sample.evidence.collateral["chain"], "the chain")
    ders = [sample.evidence.collateral["key"], *(one.public_bytes(Encoding.DER) for one in chain)]
    collateral = parse_certificate_table(table(dict(zip((VCEK, ASK, ARK), ders, strict=True))))
    assert sev_snp.verify(sample.evidence.raw, collateral, sample.time).product == "Milan"
    empty = parse_certificate_table(table({**dict(zip((VCEK, ASK, ARK), ders, strict=True)), CRL: b""}))
    assert sev_snp.verify(sample.evidence.raw, empty, sample.time).product == "Milan", "an empty list is none"


@pytest.mark.parametrize("quiet", [{}, {QUIET_HEADER.encode(): b"whole"}])
def test_a_header_that_is_not_ascii_crosses_byte_for_byte(quiet: dict[bytes, bytes]) -> None:
    """From client to engine and back: bytes of Latin-1, and UTF-8 of what Latin-1 does not have."""
    values, seen = (b"Bearer \xff\xe9", "Bearer \u20ac \u4e2d".encode()), list[bytes]()

    async def answer(request: Request) -> Response:
        value = dict(request.scope["headers"])[b"authorization"]
        seen.append(value)
        found = JSONResponse({})
        found.raw_headers = [(b"content-type", b"application/json; a=" + value), (b"retry-after", value)]
        return found

    async def work(port: int) -> None:
        app = AttestationGateway(SOFTWARE, SPKI, f"http://127.0.0.1:{port}").app()
        client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="https://x")
        async with app.router.lifespan_context(app), client as one:
            for value in values:
                found = await one.post("/v1/embeddings", json={}, headers={b"authorization": value, **quiet})
                assert found.status_code == 200 and dict(found.headers.raw)[b"retry-after"] == value

    with serving(Starlette(routes=[Route("/v1/embeddings", answer, methods=["POST"])])) as port:
        asyncio.run(work(port))
    assert seen == [*values]


@pytest.mark.parametrize("quiet", ["", "slots"])
def test_an_answer_whose_first_part_is_never_read_gives_its_connection_back(
    quiet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves when the headers are on their way: nothing began to read the engine's body."""
    monkeypatch.setattr(front_module, "MAX_CONNECTIONS", 1)

    async def work(port: int) -> None:
        app = AttestationGateway(SOFTWARE, SPKI, f"http://127.0.0.1:{port}").app()
        async with app.router.lifespan_context(app):
            for _ in range(2):
                headers = {QUIET_HEADER: quiet} if quiet else None
                sent = await leave(app, "/v1/chat/completions", lambda: False, headers)
                assert [message.get("status") for message in sent] == [200]

    with serving(ENGINE) as port:
        asyncio.run(work(port))


@pytest.mark.parametrize("quiet", ["", "whole", "slots"])
def test_a_client_that_leaves_a_silent_engine_gives_its_connection_back(
    quiet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "MAX_CONNECTIONS", 1)
    asked = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += bool(await reader.readuntil(b"\r\n\r\n"))
        await reader.read()
        writer.close()

    async def work() -> None:
        engine = await asyncio.start_server(silent, "127.0.0.1", 0)
        app = AttestationGateway(SOFTWARE, SPKI, f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}").app()
        async with engine, app.router.lifespan_context(app):
            for count in (1, 2, 3):
                headers = {QUIET_HEADER: quiet} if quiet else None
                await leave(app, "/v1/embeddings", lambda count=count: asked == count, headers)  # type: ignore[misc]
                assert asked == count

    run(work)
