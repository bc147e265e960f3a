"""The server's side: evidence from Linux or from software, requests handed on, quiet answers, released files."""

from __future__ import annotations

import asyncio
import errno
import json
import struct
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from milkglass.attest import evidence, passthrough, sealing, sev_snp
from milkglass.attest.chains import certificates
from milkglass.attest.channel import RELEASE_PATH
from milkglass.attest.evidence import HardwareEvidence
from milkglass.attest.front import EVIDENCE_PER_MINUTE, Front
from milkglass.attest.passthrough import PAD_BYTES, QUIET_HEADER, SLOT_BYTES, STATE_HEADER, filler, slots
from milkglass.attest.providers import PATH
from milkglass.attest.sealing import Vault, seal
from milkglass.attest.sources import EvidenceSource, Software, Tsm, certificate_table
from milkglass.errors import AttestationError, UsageError
from tests.attest.samples import SAMPLES, TODAY

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


def test_amds_table_of_certificates_is_read_and_a_malformed_one_gives_nothing() -> None:
    parts = {"63da758d-e664-4564-adc5-f4b93be8accd": b"VCEK", "4ab7b379-bbac-4fe4-a02f-05aef327c782": b"ASK",
             "c0b406a4-a803-4952-9743-3fb6014cd0ae": b"ARK"}  # fmt: skip
    at, head, body = 24 * 4, b"", b""
    for name, one in parts.items():
        head += uuid.UUID(name).bytes_le + struct.pack("<II", at + len(body), len(one))
        body += one
    found = certificate_table(head + bytes(24) + body)
    assert found["key"] == b"VCEK" and found["chain"].count(b"BEGIN CERTIFICATE") == 2
    for bad in (b"", b"x" * 23, head, head[:30], b"\xff" * 100):
        assert "chain" not in certificate_table(bad)


# --- the application --------------------------------------------------------------------------------------------------
@asynccontextmanager
async def client(front: Front, engine: Starlette | None = None) -> AsyncIterator[httpx2.AsyncClient]:
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
        async with client(Front(SOFTWARE, SPKI)) as one:
            answer = await one.get(PATH, params={"nonce": NONCE.hex()})
            assert answer.headers[STATE_HEADER] == "NOT ATTESTED"
            found = HardwareEvidence.parse(answer.content)
            evidence.verify(found, TODAY, SPKI, NONCE)
            for spki, nonce in ((bytes(32), NONCE), (SPKI, bytes(32))):
                with pytest.raises(AttestationError):
                    evidence.verify(found, TODAY, spki, nonce)
            for bad in ("", "zz", "00" * 31, "00" * 33):
                assert (await one.get(PATH, params={"nonce": bad})).status_code == 400

    run(work)


def test_evidence_is_limited_to_so_many_a_minute() -> None:
    async def work() -> None:
        async with client(Front(SOFTWARE, SPKI)) as one:
            codes = [
                (await one.get(PATH, params={"nonce": NONCE.hex()})).status_code for _ in range(EVIDENCE_PER_MINUTE + 3)
            ]
            assert codes == [200] * EVIDENCE_PER_MINUTE + [503] * 3

    run(work)


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
        async with client(Front(SOFTWARE, SPKI, "http://127.0.0.1:1"), ENGINE) as one:
            sent = {"Cookie": "a=b", "X-Forwarded-For": "me", "User-Agent": "me/1", "Authorization": "Bearer x"}
            answer = await one.post("/v1/embeddings", json={"input": "it"}, headers=sent)
            assert answer.json()["got"] == {"input": "it"} and "server" not in answer.headers
            assert not {"cookie", "x-forwarded-for"} & set(answer.json()["headers"])
            assert "authorization" in answer.json()["headers"]
            for path in ("/metrics", "/v1/embeddings/../metrics", "/v1/load_lora_adapter", "/docs"):
                assert (await one.get(path)).status_code in (404, 405)
            assert (await one.post("/v1/models")).status_code == 405

    run(work)


def test_without_an_engine_or_with_one_that_is_down_the_error_says_so() -> None:
    async def work() -> None:
        async with client(Front(SOFTWARE, SPKI)) as one:
            assert "--in-front-of" in (await one.get("/v1/models")).text

    run(work)


# --- quiet ------------------------------------------------------------------------------------------------------------
def test_a_whole_answer_is_padded_and_says_the_same() -> None:
    async def work() -> None:
        async with client(Front(SOFTWARE, SPKI, "http://127.0.0.1:1"), ENGINE) as one:
            for size in (1, 500, 20_000):
                answer = await one.post("/v1/embeddings", json={"input": "x" * size}, headers={QUIET_HEADER: "whole"})
                assert len(answer.content) % PAD_BYTES == 0 and answer.json()["got"] == {"input": "x" * size}
            assert (await one.post("/v1/embeddings", json={}, headers={QUIET_HEADER: "loud"})).status_code == 400

    run(work)


def test_slots_have_one_size_and_carry_the_same_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passthrough, "SLOT_SECONDS", 0.01)

    async def work() -> None:
        async def parts() -> AsyncIterator[bytes]:
            for one in EVENTS:
                yield one[:2]
                await asyncio.sleep(0.005)
                yield one[2:]

        pieces = [one async for one in slots(parts())]
        assert {len(one) for one in pieces} == {SLOT_BYTES}
        lines = b"".join(pieces).split(b"\n\n")
        assert [one for one in lines if one.startswith(b"data")] == [one.removesuffix(b"\n\n") for one in EVENTS]
        assert all(one.lstrip(b"\n").startswith((b"data", b":")) or not one.strip() for one in lines)

    run(work)


def test_a_filler_is_skipped_by_every_reader() -> None:
    for size in range(50):
        found = filler(size)
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

        found = slots(parts())
        await anext(found)
        await found.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(ended.wait(), 5)

    run(work)


# --- released files ---------------------------------------------------------------------------------------------------
def test_a_file_opens_in_the_job_it_was_sealed_to_and_under_its_name(tmp_path: Path) -> None:
    vault, other = Vault.new(tmp_path / "a"), Vault.new(tmp_path / "b")
    sealed = seal(b"a key", vault.public_key, "my.mgkey")
    assert vault.open(sealed, "my.mgkey").read_bytes() == b"a key"
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0 and (tmp_path / "a" / "my.mgkey").stat().st_mode & 0o077 == 0
    for where, what, name in ((other, sealed, "my.mgkey"), (vault, sealed, "other"), (vault, sealed[:-1], "my.mgkey"),
                              (vault, b"", "my.mgkey")):  # fmt: skip
        with pytest.raises(AttestationError):
            where.open(what, name)
    for name in ("../x", "", "a/b", ".hidden", "x" * 101, "a b"):
        with pytest.raises(UsageError):
            vault.open(sealed, name)
    for public in (b"", b"\xff" * 1_216):
        with pytest.raises(AttestationError):
            seal(b"x", public, "x")


def test_a_job_takes_files_that_were_sealed_to_it_and_its_evidence_binds_the_key(tmp_path: Path) -> None:
    vault = Vault.new(tmp_path / "got")
    source = EvidenceSource(Software(), sealing_key=vault.public_key)

    async def work() -> None:
        async with client(Front(source, SPKI, None, vault)) as one:
            found = HardwareEvidence.parse((await one.get(PATH, params={"nonce": NONCE.hex()})).content)
            assert found.sealing == vault.public_key
            evidence.verify(found, TODAY, SPKI, NONCE)
            swapped = json.loads(found.document()) | {"sealing": ""}
            with pytest.raises(AttestationError):
                evidence.verify(HardwareEvidence.parse(json.dumps(swapped).encode()), TODAY, SPKI, NONCE)
            sealed = sealing.seal(b"rows", found.sealing, "rows.jsonl")
            assert (await one.post(RELEASE_PATH, params={"name": "rows.jsonl"}, content=sealed)).json() == {
                "kept": "rows.jsonl"
            }
            assert (tmp_path / "got" / "rows.jsonl").read_bytes() == b"rows"
            assert (await one.post(RELEASE_PATH, params={"name": "other"}, content=sealed)).status_code == 502

    run(work)
    run_without = Front(SOFTWARE, SPKI)

    async def refused() -> None:
        async with client(run_without) as one:
            assert (await one.post(RELEASE_PATH, params={"name": "x"}, content=b"x")).status_code == 404

    run(refused)


def test_a_report_verifies_with_the_certificates_that_the_host_gave() -> None:
    sample = SAMPLES["Milan"]
    chain = certificates(sample.evidence.collateral["chain"], "the chain")
    ders = [sample.evidence.collateral["key"], *(one.public_bytes(Encoding.DER) for one in chain)]
    names = ("63da758d-e664-4564-adc5-f4b93be8accd", "4ab7b379-bbac-4fe4-a02f-05aef327c782",
             "c0b406a4-a803-4952-9743-3fb6014cd0ae")  # fmt: skip
    head, body = b"", b""
    for name, one in zip(names, ders, strict=True):
        head += uuid.UUID(name).bytes_le + struct.pack("<II", 24 * 4 + len(body), len(one))
        body += one
    collateral = certificate_table(head + bytes(24) + body)
    assert sev_snp.verify(sample.evidence.raw, collateral, sample.time).product == "Milan"
