"""Files that crash, bloat or hold up their reader: refused in words, while the same server goes on."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from milkglass.errors import BadUpload
from milkglass.models import safetensors_header
from milkglass.server import spec
from milkglass.server.storage import inspection
from milkglass.server.storage import parquet as parquets
from milkglass.server.storage.recording import Recording
from milkglass.server.storage.store import ModelRecord, Store
from tests.server import craft
from tests.server.kit import announce, error, parquet, put, running

ROWS = parquet([[1, 2, 3], [4, 5]], [0, 1])
SMALL = 700 << 20  # bytes of address space: enough for pyarrow and a small file


def send(client: TestClient, data: bytes) -> Any:
    return client.post("/v1/files", files={"file": ("train.parquet", data)}, data={"purpose": "fine-tune"})


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (craft.column_beyond_the_schema(), "not readable"),
        (craft.histogram_of_another_size(), "crashes its reader"),
    ],
    ids=["column", "histogram"],
)
def test_a_file_that_crashes_its_reader_is_refused(client: TestClient, tmp_path: Path, data: bytes, named: str) -> None:
    answer = send(client, data)
    assert answer.status_code == 400 and named in error(answer)["message"]
    assert send(client, ROWS).status_code == 200
    assert not list((tmp_path / "home" / "work").iterdir())


def test_a_page_that_claims_more_than_its_column(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MEMORY", SMALL)
    assert send(client, craft.page_beyond_its_column(4)).status_code == 200, "the same file, with a true page header"
    before = psutil.Process().memory_info().rss
    data = craft.page_beyond_its_column(400_000_000)
    answer = send(client, data)
    assert len(data) < 300 and answer.status_code == 400
    assert "700 MiB of memory" in error(answer)["message"]
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_a_crash_at_complete_leaves_nothing_to_be_repeated(tmp_path: Path) -> None:
    data, home = craft.histogram_of_another_size(), tmp_path / "home"
    with running(home) as client:
        key = announce(client, "t.parquet", data, "fine-tune")
        put(client, key, 0, data)
        answer = client.post(f"/v1/uploads/{key}/complete")
        assert answer.status_code == 400 and "crashes" in error(answer)["message"]
        assert client.post(f"/v1/uploads/{key}/complete").status_code == 404  # the client asks again
    with running(home) as client:
        assert client.get("/v1/uploads").json()["data"] == client.get("/v1/files").json()["data"] == []
        assert not [path for room in ("uploads", "files", "work") for path in (home / room).iterdir()]


def test_a_complete_that_could_not_be_inspected_is_asked_again(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = announce(client, "t.parquet", ROWS, "fine-tune")
    put(client, key, 0, ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(inspection, "COMMAND", ("/no/such/python",))  # our fault, not the file's
        assert client.post(f"/v1/uploads/{key}/complete").status_code == 500
    assert client.post(f"/v1/uploads/{key}/complete").status_code == 200


LIMITED = "from milkglass.server.storage.inspector import limit; import os, signal, time; limit(1, 1 << 30, 100)\n"


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("while True: pass", "seconds to read|too much memory or time"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "too much memory or time"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashes its reader"),
        ("raise SystemExit(3)", "could not be inspected"),
        ("print('x' * 1000, flush=True)", "could not be inspected"),  # beyond the limit of file size
        ("print('{\"found\"')", "could not be inspected"),
        ("print('{\"memory\": true}')", "MiB of memory"),
        ("bytearray(2 << 30)", "could not be inspected"),
    ],
)
def test_however_the_inspector_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, named: str) -> None:
    monkeypatch.setattr(inspection, "COMMAND", (sys.executable, "-c", LIMITED + program))
    (tmp_path / "t.parquet").write_bytes(ROWS)
    with pytest.raises(BadUpload, match=named):
        inspection.inspect(tmp_path / "t.parquet", "fine-tune")


def test_an_inspector_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = "import os, time; from pathlib import Path; Path('pid').write_text(str(os.getpid())); time.sleep(600)"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inspection, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(inspection, "WALL", 0.05)
    (tmp_path / "t.parquet").write_bytes(ROWS)
    with pytest.raises(BadUpload, match="seconds to read"):
        inspection.inspect(tmp_path / "t.parquet", "fine-tune")
    pid = tmp_path / "pid"
    assert not pid.exists() or not psutil.pid_exists(int(pid.read_text()))


SOUND = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def weights(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + b"\0" * 4


def forbid_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the server's process; the inspector's is another."""

    def parsed(header: bytes, name: str) -> Any:
        pytest.fail("the server parsed it")

    monkeypatch.setattr(safetensors_header, "parse_table", parsed)


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
def test_the_server_parses_no_header(
    monkeypatch: pytest.MonkeyPatch, client: TestClient, header: bytes, named: str
) -> None:
    forbid_parsing(monkeypatch)
    for data, status in ((weights(header), 400), (weights(b'{"a":' + SOUND + b"}"), 200)):
        answer = client.post("/v1/files", files={"file": ("model.safetensors", data)}, data={"purpose": "model"})
        assert answer.status_code == status
        assert status == 200 or re.search(named, error(answer)["message"])


@pytest.mark.parametrize(
    ("unit", "count", "named"),
    [(b"{},", 8_000_000, "more values"), (b'{"":0},', 3_300_000, "strings, at most")],
    ids=["empty", "named"],
)
def test_a_key_twice_hides_nothing_large_from_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unit: bytes, count: int, named: str
) -> None:
    """Of a key that occurs twice, an ordinary reader of JSON keeps the last value only."""
    forbid_parsing(monkeypatch)
    path = tmp_path / "part"
    path.write_bytes(weights(b'{"a":[' + unit * count + b'{}],"a":' + SOUND + b"}"))
    before = psutil.Process().memory_info().rss
    with pytest.raises(BadUpload, match=named):
        inspection.check(path, "model")
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_the_inspector_starts_quickly_and_leaves_no_core() -> None:
    program = (
        "import sys, resource\n"
        "from milkglass.server.storage import inspector, parquet\n"
        "inspector.limit(9, 1 << 30)\n"
        "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)\n"
        "print([name for name in ('torch', 'pydantic', 'fastapi', 'transformers') if name in sys.modules])\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_row_that_a_worker_can_use_is_short_enough() -> None:
    assert parquets.MAX_ROW == 8 * spec.MAX_LENGTH


def test_no_token_of_the_server_reaches_the_inspector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILKGLASS_TOKEN", "secret")
    environment = inspection._environment()
    assert "MILKGLASS_TOKEN" not in environment and environment["PATH"] == os.environ["PATH"]


def test_a_worker_reads_what_was_checked(tmp_path: Path) -> None:
    """The same rows as pyarrow's own reader gives, over several row groups and batches."""
    ids = [[number % 7 + 1] * (number % 5 + 1) for number in range(1000)]
    columns = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "labels": pa.array([n % 3 for n in range(1000)])}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=300)
    assert parquets.read(tmp_path / "t.parquet").equals(pq.read_table(tmp_path / "t.parquet"))
    lengths, flat = inspection.ids(tmp_path / "t.parquet", tmp_path)
    assert lengths.tolist() == [len(one) for one in ids] and flat.tolist() == sum(ids, [])
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_recording_survives_a_file_that_crashes_its_reader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad").write_bytes(craft.histogram_of_another_size())
    store = Store(tmp_path / "state.sqlite")
    model = ModelRecord(id="m", kind="encoder", vocab_size=9, positions=9, token_types=0, sha256={})
    Recording(tmp_path / "seen", store).trained(model, tmp_path / "bad")
    store.close()
    assert "could not record (BadUpload)" in caplog.text
