"""Uploads: cut, resumed, damaged, too large, on a full disk; and what is not safetensors."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import pickle
import re
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save
from starlette.testclient import TestClient

from milkglass.errors import BadUpload
from milkglass.server.storage.uploads import IncomingChunk, check_weights
from tests.server.kit import announce, error, put, rows_file, running, sha256, upload

WEIGHTS = save({"a": torch.arange(4000.0), "b": torch.ones(3, 5)})
ROWS = rows_file([[1, 2, 3], [4, 5]], [0, 1])


def test_chunks_become_a_file(client: TestClient) -> None:
    key = announce(client, "model.safetensors", WEIGHTS, "model")
    assert client.get(f"/v1/uploads/{key}").json()["received"] == 0
    assert put(client, key, 0, WEIGHTS[:5000]).json() == {"id": key, "received": 5000}
    answer = put(client, key, 0, WEIGHTS[:5000])  # the answer was lost; the client sends again
    assert answer.status_code == 409 and error(answer)["received"] == 5000
    answer = client.post(f"/v1/uploads/{key}/complete")
    assert answer.status_code == 409 and "5000 of" in error(answer)["message"]
    put(client, key, 5000, WEIGHTS[5000:])
    file = client.post(f"/v1/uploads/{key}/complete").json()
    assert (file["object"], file["bytes"], file["sha256"]) == ("file", len(WEIGHTS), sha256(WEIGHTS))
    assert client.get(f"/v1/files/{file['id']}/content").content == WEIGHTS
    assert client.post(f"/v1/uploads/{key}/complete").json() == file  # the answer was lost; the client asks again
    assert client.get(f"/v1/uploads/{key}").status_code == 404
    assert [f["id"] for f in client.get("/v1/files").json()["data"]] == [file["id"]]
    assert client.get("/v1/files", params={"purpose": "fine-tune"}).json()["data"] == []
    assert client.delete(f"/v1/files/{file['id']}").json()["deleted"]
    assert client.get(f"/v1/files/{file['id']}").status_code == 404


class _ShortWrites(io.BytesIO):
    """A file that takes three bytes at a time, as an unbuffered one may."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data)[:3])


def test_a_chunk_is_written_whole_by_short_writes() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield WEIGHTS[:1000]
        yield WEIGHTS[1000:2000]

    file = _ShortWrites()
    chunk = IncomingChunk(file)
    asyncio.run(chunk.receive(pieces(), 5000))
    assert file.getvalue() == WEIGHTS[:2000] == b"".join(chunk.pieces())
    assert (chunk.size, chunk.sha256) == (2000, sha256(WEIGHTS[:2000]))


def test_a_restarted_server_goes_on(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with running(home) as client:
        key = announce(client, "m.safetensors", WEIGHTS, "model")
        put(client, key, 0, WEIGHTS[:7000])
    with (home / "uploads" / key).open("ab") as file:
        file.write(b"half of a chunk that was never acknowledged")
    (home / "uploads" / "stray").write_bytes(b"x")
    with running(home) as client:
        assert client.get(f"/v1/uploads/{key}").json()["received"] == 7000
        assert put(client, key, 7000, WEIGHTS[7000:]).json()["received"] == len(WEIGHTS)
        assert client.post(f"/v1/uploads/{key}/complete").json()["sha256"] == sha256(WEIGHTS)
        assert list((home / "uploads").iterdir()) == []


def test_a_chunk_that_changed_on_its_way_changes_nothing(client: TestClient, tmp_path: Path) -> None:
    key = announce(client, "m.safetensors", WEIGHTS, "model")
    answer = put(client, key, 0, WEIGHTS[:100], checksum=sha256(b"other"))
    assert answer.status_code == 400 and "checksum" in error(answer)["message"]
    assert (tmp_path / "home" / "uploads" / key).stat().st_size == 0
    answer = put(client, key, 0, WEIGHTS + b"x")
    assert answer.status_code == 400 and "beyond" in error(answer)["message"]
    assert client.get(f"/v1/uploads/{key}").json()["received"] == 0


def test_the_whole_is_checked_too(client: TestClient, tmp_path: Path) -> None:
    body = {"filename": "m.safetensors", "bytes": len(WEIGHTS), "sha256": sha256(b"x"), "purpose": "model"}
    key = client.post("/v1/uploads", json=body).json()["id"]
    put(client, key, 0, WEIGHTS)
    assert "checksum" in error(client.post(f"/v1/uploads/{key}/complete"))["message"]
    assert client.get(f"/v1/uploads/{key}").status_code == 404
    assert list((tmp_path / "home" / "uploads").iterdir()) == []


def header_of(table: dict[str, Any], data: bytes = b"") -> bytes:
    head = json.dumps(table).encode()
    return struct.pack("<Q", len(head)) + head + data


def tensor(**more: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | more


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"weights": [1, 2, 3]}),
        b"PK\x03\x04" + b"\0" * 200,  # what torch.save writes
        WEIGHTS[:-1],
        WEIGHTS + b"\0",
        b"\0",
        b"\xff" * 64,
        header_of({}),
        header_of({"a": tensor()}),
        header_of({"a": tensor(shape=[-2])}, b"\0" * 8),
        header_of({"a": tensor(shape=[2**62, 4])}, b"\0" * 8),
        header_of({"a": tensor(dtype="PICKLE")}, b"\0" * 8),
        header_of({"a": tensor(), "b": tensor()}, b"\0" * 8),
        header_of({"a": tensor(data_offsets=[0, 10**30])}, b"\0" * 8),
        header_of({"a": 5}, b"\0" * 8),
        save({"a": torch.ones(3)}, {"format": "pt", "notes": "private"}),
        save({"a": torch.ones(3)}, {"format": "np"}),
        header_of({"__metadata__": 5, "a": tensor()}, b"\0" * 8),
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
)
def test_what_is_not_safetensors_is_thrown_away(client: TestClient, tmp_path: Path, data: bytes) -> None:
    key = announce(client, "model.safetensors", data, "model")
    put(client, key, 0, data)
    answer = client.post(f"/v1/uploads/{key}/complete")
    assert answer.status_code == 400, answer.text
    assert error(answer)["code"] == "bad_upload" and key not in error(answer)["message"]
    home = tmp_path / "home"
    assert not [*(home / "uploads").iterdir(), *(home / "files").iterdir()]


def test_a_form_becomes_a_file(client: TestClient, tmp_path: Path) -> None:
    answer = client.post("/v1/files", files={"file": ("train.safetensors", ROWS)}, data={"purpose": "fine-tune"})
    assert answer.json()["sha256"] == sha256(ROWS)
    assert not list((tmp_path / "home" / "work").iterdir())


@pytest.mark.parametrize(
    ("name", "purpose"),
    [
        ("train.jsonl", "fine-tune"),
        ("train.parquet", "fine-tune"),
        ("pytorch_model.bin", "model"),
        ("../m.safetensors", "model"),
        (".m.safetensors", "model"),
        ("a..safetensors", "model"),
        ("m\n.safetensors", "model"),
        ("m.safetensors", "assistants"),
    ],
)
def test_names_and_purposes(client: TestClient, name: str, purpose: str) -> None:
    body = {"filename": name, "bytes": 10, "sha256": "0" * 64, "purpose": purpose}
    assert error(client.post("/v1/uploads", json=body)) and client.post("/v1/uploads", json=body).status_code == 400
    form = client.post("/v1/files", files={"file": (name, ROWS)}, data={"purpose": purpose})
    assert form.status_code == 400 and error(form)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Upload-Offset": "0"},
        {"Upload-Offset": "-1", "Chunk-SHA256": "0" * 64},
        {"Upload-Offset": "9" * 30, "Chunk-SHA256": "0" * 64},
        {"Upload-Offset": "0", "Chunk-SHA256": "not a checksum"},
    ],
)
def test_chunk_headers(client: TestClient, headers: dict[str, str]) -> None:
    key = announce(client, "m.safetensors", WEIGHTS, "model")
    answer = client.put(f"/v1/uploads/{key}", content=b"x", headers=headers)
    assert answer.status_code == 400 and error(answer)


def test_a_chunk_needs_a_length(client: TestClient) -> None:
    """Without one, nothing could be compared with the upload and the disk before the bytes are read."""
    key = announce(client, "m.safetensors", WEIGHTS, "model")
    headers = {"Upload-Offset": "0", "Chunk-SHA256": sha256(WEIGHTS)}

    def pieces() -> Iterator[bytes]:
        yield WEIGHTS[:100]
        yield WEIGHTS[100:]

    answer = client.put(f"/v1/uploads/{key}", content=pieces(), headers=headers)
    assert answer.status_code == 411 and error(answer)["code"] == "length_required"
    assert client.get(f"/v1/uploads/{key}").json()["received"] == 0
    assert put(client, key, 0, WEIGHTS).json()["received"] == len(WEIGHTS)


def test_a_chunk_is_cut_where_it_goes_beyond_its_length(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from milkglass.server.storage.uploads import IncomingChunk

    written: list[int] = []
    add = IncomingChunk._add
    monkeypatch.setattr(IncomingChunk, "_add", lambda self, piece: (written.append(len(piece)), add(self, piece)))
    key = announce(client, "m.safetensors", WEIGHTS, "model")
    headers = {"Upload-Offset": "0", "Chunk-SHA256": sha256(WEIGHTS), "Content-Length": "10"}
    answer = client.put(f"/v1/uploads/{key}", content=bytes(5 << 20), headers=headers)
    assert answer.status_code == 400 and "beyond the 10 bytes" in error(answer)["message"]
    assert written == []
    assert client.get(f"/v1/uploads/{key}").json()["received"] == 0


class _Full(io.FileIO):
    """A file on a disk that takes half of a write and then says ENOSPC."""

    def write(self, chunk: Any) -> int:
        if len(chunk) < 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(chunk[: len(chunk) // 2])


def test_a_full_disk_is_said_and_leaves_nothing(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = announce(client, "m.safetensors", WEIGHTS, "model")
    whole = Path.open

    def full(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        return _Full(path, mode) if mode == "r+b" else whole(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", full)
    answer = put(client, key, 0, WEIGHTS)
    assert answer.status_code == 507 and error(answer)["code"] == "disk_full"
    monkeypatch.undo()  # somebody made room
    assert put(client, key, 0, WEIGHTS).json()["received"] == len(WEIGHTS)
    assert client.post(f"/v1/uploads/{key}/complete").status_code == 200


def test_a_store_without_room_leaves_the_upload_whole(client: TestClient, tmp_path: Path) -> None:
    store, home = client.app.state.context.store, tmp_path / "home"
    key = announce(client, "m.safetensors", WEIGHTS, "model")
    put(client, key, 0, WEIGHTS)
    pages = store.execute("PRAGMA page_count")[0][0]
    store.execute(f"PRAGMA max_page_count = {pages}")
    answers = [client.post("/v1/uploads", json=_big(n)) for n in range(200)]  # until SQLite's own SQLITE_FULL
    full = next(answer for answer in answers if answer.status_code != 200)
    assert full.status_code == 507 and error(full)["code"] == "disk_full"
    assert len(list((home / "uploads").iterdir())) == sum(a.status_code == 200 for a in answers) + 1
    store.execute("PRAGMA max_page_count = 1000000")
    assert client.post(f"/v1/uploads/{key}/complete").status_code == 200


def _big(number: int) -> dict[str, Any]:
    return {"filename": f"{'n' * 100}{number}.safetensors", "bytes": 9, "sha256": "0" * 64, "purpose": "model"}


@pytest.mark.parametrize("renamed", [False, True])
def test_a_kill_while_an_upload_becomes_a_file(tmp_path: Path, renamed: bool) -> None:
    home = tmp_path / "home"
    with running(home) as client:
        key = announce(client, "m.safetensors", WEIGHTS, "model")
        put(client, key, 0, WEIGHTS)
        store = client.app.state.context.store
        upload_record = store.uploads.get(key)
        file_id = client.post(f"/v1/uploads/{key}/complete").json()["id"]
        store.uploads.add(upload_record)  # as it was just before the end
        if not renamed:
            (home / "files" / file_id).rename(home / "uploads" / key)
    with running(home) as client:
        assert client.post(f"/v1/uploads/{key}/complete").json()["id"] == file_id
        assert client.get(f"/v1/files/{file_id}/content").content == WEIGHTS
        assert not list((home / "uploads").iterdir())


def test_a_disk_without_room_is_told_beforehand(tmp_path: Path) -> None:
    with running(tmp_path / "home", spare_disk=1 << 60) as client:
        body = {"filename": "m.safetensors", "bytes": 10, "sha256": "0" * 64, "purpose": "model"}
        assert client.post("/v1/uploads", json=body).status_code == 507
        answer = client.post("/v1/files", files={"file": ("t.safetensors", ROWS)}, data={"purpose": "fine-tune"})
        assert answer.status_code == 507 and error(answer)["code"] == "disk_full"
        assert not list((tmp_path / "home" / "uploads").iterdir())


def test_limits(tmp_path: Path) -> None:
    with running(tmp_path / "home", max_upload=1000, max_body=500) as client:
        body = {"filename": "m.safetensors", "bytes": 1001, "sha256": "0" * 64, "purpose": "model"}
        assert client.post("/v1/uploads", json=body).status_code == 413
        key = client.post("/v1/uploads", json=body | {"bytes": 1000}).json()["id"]
        assert put(client, key, 0, b"x" * 501).status_code == 413
        form = client.post("/v1/files", files={"file": ("t.safetensors", b"x" * 600)}, data={"purpose": "fine-tune"})
        assert form.status_code == 413 and error(form)["code"] == "too_large"
        assert client.delete(f"/v1/uploads/{key}").json()["deleted"]


def test_a_file_in_use_stays(client: TestClient, folders: dict[str, Path]) -> None:
    from tests.server.kit import register

    register(client, "bert", folders["classifier"])
    train = upload(client, "t.safetensors", ROWS, "fine-tune")
    wanted = {"model": "bert", "training_file": train, "hyperparameters": {"seed": 3}}
    job = client.post("/v1/fine_tuning/jobs", json=wanted).json()
    assert client.delete(f"/v1/files/{train}").status_code == 409
    assert client.delete("/v1/models/bert").status_code == 409
    client.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel")


SOUND = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def weights(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + b"\0" * 4


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b'{"a": [' + b"[]," * 100_000 + b"[]]}", "by other fields than"),
        (b'{"a": {"dtype": "F32", "shape": [' + b"1," * 1000 + b'1], "data_offsets": [0, 4]}}', "an impossible shape"),
        (b"{" + b",".join(b'"%d": {}' % number for number in range(200_001)) + b"}", "more values|lists and objects"),
        (b'{"a":{"dtype":"private","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "not JSON as safetensors has it"),
        (b'{"__metadata__":{"format":"private"},"a":' + SOUND + b"}", "metadata of its own"),
        (b"{}", "bytes after its last tensor"),
    ],
)
def test_headers_of_weights(client: TestClient, header: bytes, named: str) -> None:
    for data, status in ((weights(header), 400), (weights(b'{"a":' + SOUND + b"}"), 200)):
        answer = client.post("/v1/files", files={"file": ("model.safetensors", data)}, data={"purpose": "model"})
        assert answer.status_code == status
        assert status == 200 or re.search(named, error(answer)["message"])


@pytest.mark.parametrize(
    ("unit", "count", "named"),
    [(b"{},", 8_000_000, "more values"), (b'{"":0},', 3_300_000, "strings, at most")],
    ids=["empty", "named"],
)
def test_a_key_twice_hides_nothing_large_from_the_server(tmp_path: Path, unit: bytes, count: int, named: str) -> None:
    """Of a key that occurs twice, an ordinary reader of JSON keeps the last value only."""
    path = tmp_path / "part"
    path.write_bytes(weights(b'{"a":[' + unit * count + b'{}],"a":' + SOUND + b"}"))
    before = psutil.Process().memory_info().rss
    with pytest.raises(BadUpload, match=named):
        check_weights(path)
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_unfinished_uploads_are_found_and_deleted(client: TestClient) -> None:
    keys = [announce(client, name, WEIGHTS, "model") for name in ("a.safetensors", "b.safetensors")]
    put(client, keys[0], 0, WEIGHTS[:100])
    listed = client.get("/v1/uploads").json()
    assert [(one["id"], one["received"]) for one in listed["data"]] == [(keys[0], 100), (keys[1], 0)]
    for key in keys:
        client.delete(f"/v1/uploads/{key}")
    assert client.get("/v1/uploads").json() == {"object": "list", "data": []}


def test_a_full_disk_names_all_that_can_be_deleted(tmp_path: Path) -> None:
    with running(tmp_path / "home", spare_disk=1 << 60) as client:
        hint = error(client.post("/v1/uploads", json=_big(1)))["hint"]
        for address in ("/v1/uploads", "/v1/files", "/v1/models", "/v1/fine_tuning/jobs"):
            assert address in hint and client.get(address).status_code == 200


def test_an_abandoned_upload_goes_after_a_day(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with running(home) as client:
        old, fresh, third = (announce(client, f"{n}.safetensors", WEIGHTS, "model") for n in "abc")
        for key, hours in ((old, 25), (fresh, 23), (third, 23)):
            put(client, key, 0, WEIGHTS[:100])
            _age(home / "uploads" / key, hours)
        assert client.get(f"/v1/uploads/{old}").status_code == 200
        announce(client, "d.safetensors", WEIGHTS, "model")  # whoever wants room makes it
        assert client.get(f"/v1/uploads/{old}").status_code == 404
        assert client.get(f"/v1/uploads/{fresh}").json()["received"] == 100
        _age(home / "uploads" / third, 25)
    with running(home) as client:  # and at every start
        assert client.get(f"/v1/uploads/{third}").status_code == 404
        put(client, fresh, 100, WEIGHTS[100:])
        assert client.post(f"/v1/uploads/{fresh}/complete").status_code == 200


def _age(path: Path, hours: float) -> None:
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))


def test_announced_uploads_share_the_free_space(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was announced and has not come counts, so that a disk is not promised twice."""
    from shutil import disk_usage

    from milkglass.server import settings as home

    free = 10_000
    monkeypatch.setattr(home.shutil, "disk_usage", lambda path: disk_usage(path)._replace(free=free))
    body = {"filename": "m.safetensors", "sha256": sha256(b"x" * 6000), "purpose": "model"}
    first = client.post("/v1/uploads", json=body | {"bytes": 6000}).json()["id"]
    full = client.post("/v1/uploads", json=body | {"bytes": 5000})
    assert full.status_code == 507 and error(full)["code"] == "disk_full"
    assert put(client, first, 0, b"x" * 2000).status_code == 200
    free -= 2000
    assert client.post("/v1/uploads", json=body | {"bytes": 5000}).status_code == 507
    assert client.post("/v1/uploads", json=body | {"bytes": 3000}).status_code == 200
    client.delete(f"/v1/uploads/{first}")
    assert client.post("/v1/uploads", json=body | {"bytes": 4000}).status_code == 200


def test_uploads_are_limited_in_number(tmp_path: Path) -> None:
    with running(tmp_path / "home", max_uploads=3) as client:
        keys = [client.post("/v1/uploads", json=_big(number)).json()["id"] for number in range(3)]
        answer = client.post("/v1/uploads", json=_big(3))
        assert answer.status_code == 409 and "3 uploads are unfinished" in error(answer)["message"]
        client.delete(f"/v1/uploads/{keys[0]}")
        assert client.post("/v1/uploads", json=_big(3)).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'.encode("utf-16"),
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "note": "private"}}',
        b'{"__metadata__": {"note": "private"}, "__metadata__": {"format": "pt"}, '
        b'"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    ],
    ids=["byte order mark", "utf-16", "field", "twice"],
)
def test_a_header_that_the_library_would_refuse_or_that_hides_a_note(client: TestClient, data: bytes) -> None:
    whole = struct.pack("<Q", len(data)) + data + b"\0" * 8
    answer = client.post("/v1/files", files={"file": ("m.safetensors", whole)}, data={"purpose": "model"})
    assert answer.status_code == 400 and error(answer)["code"] == "bad_upload"
