"""Thousands of damaged Parquet files: refused or taken, and where one crashes its reader, the server goes on."""

from __future__ import annotations

import collections
import io
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milkglass.server.storage import inspection
from tests.server import craft
from tests.server.kit import error, parquet
from tests.server.real import Server
from tests.server.test_inspection import SMALL

BATCH = Path(__file__).with_name("batch_inspector.py")
INPUTS = 20_000
THROUGH_THE_DOOR = 300
CPU = 600  # seconds for a process that reads many files; a single one may hang no longer than HANG
HANG = 60


def seeds() -> list[bytes]:
    """Small files of every compression, encoding and page version that a user may send, and those made by hand."""
    rng = random.Random(0)
    ids = [[rng.randrange(1000) for _ in range(rng.randint(1, 12))] for _ in range(40)]
    nested = pa.array([[-100] * len(one) for one in ids], pa.list_(pa.int32()))
    plain = pa.array([rng.randint(0, 1) for _ in ids], pa.int32())
    made = [craft.page_beyond_its_column(4), craft.page_beyond_its_column(60)]
    for compression in ("none", "snappy", "zstd", "gzip", "lz4"):
        for dictionary in (True, False):
            for version in ("1.0", "2.0"):
                for labels in (nested, plain):
                    table = pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32())), "labels": labels})
                    out = io.BytesIO()
                    pq.write_table(
                        table, out, compression=compression, use_dictionary=dictionary, data_page_version=version,
                        row_group_size=17, write_statistics=True,
                    )  # fmt: skip
                    made.append(out.getvalue())
    return made


def mutated(rng: random.Random, whole: bytes) -> bytes:
    """A few changes, half of them in the footer, the others in pages and their headers."""
    data = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 3, 6])):
        footer = min(int.from_bytes(whole[-8:-4], "little"), len(data) - 9)
        low, high = (len(data) - 8 - footer, len(data) - 1) if rng.random() < 0.5 else (4, len(data) - 9 - footer)
        at = rng.randint(min(low, high), max(low, high))
        match rng.randrange(8):
            case 0 | 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at] ^= 1 << rng.randrange(8)
            case 3:
                data[at : at + 5] = b"\xff\xff\xff\xff\x0f"
            case 4:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
            case 5:
                del data[at : at + rng.randint(1, 6)]
            case 6:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF))
            case _:
                data[-8:-4] = rng.choice([0, 1, footer + 1, footer - 1, 2**31 - 1, 2**32 - 1]).to_bytes(4, "little")
    return bytes(data)


def corpus(seed: int, count: int) -> Iterator[bytes]:
    rng, sources = random.Random(seed), seeds()
    for _ in range(count):
        yield mutated(rng, rng.choice(sources))


class Reader:
    """The batch inspector, started again whenever a file ends it."""

    def __init__(self, path: Path) -> None:
        self.path, self.peak, self.ends = path, 0, collections.Counter[str]()
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(BATCH), str(SMALL), str(CPU)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=inspection._environment(),
            text=True,
        )

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self, data: bytes) -> str:
        """What becomes of a file: found, refused, memory, or the signal that it ends its reader with."""
        self.path.write_bytes(data)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{self.path}\n")
        self._process.stdin.flush()
        clock = threading.Timer(HANG, self._process.kill)
        clock.start()
        line = self._process.stdout.readline()
        clock.cancel()
        if line:
            said = json.loads(line)
            self.peak = max(self.peak, said.pop("peak"))
            (kind,) = said
        else:
            self._process.communicate()
            kind = signal.Signals(-self._process.returncode).name
            self._start()
        self.ends[kind] += 1
        return str(kind)


@pytest.mark.slow
def test_no_damaged_file_ends_or_fills_the_server(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "t.parquet")
    try:
        assert reader.read(parquet([[1, 2]], [0])) == "found"
        assert reader.read(craft.column_beyond_the_schema()) == "refused"
        assert reader.read(craft.histogram_of_another_size()) == "SIGABRT"
        assert reader.read(craft.page_beyond_its_column(400_000_000)) == "memory"
        crashing = [data for data in corpus(1, INPUTS) if reader.read(data).startswith("SIG")]
    finally:
        reader.close()
    print(dict(reader.ends), "peak", reader.peak >> 10, "MiB")
    assert sum(reader.ends.values()) == INPUTS + 4
    assert set(reader.ends) <= {"found", "refused", "memory", "SIGABRT", "SIGSEGV"}, "a kill or a file that hangs"
    assert reader.ends["found"] and reader.ends["refused"] and crashing, "the corpus shows nothing"
    assert reader.peak << 10 < SMALL
    _through_the_door(tmp_path, [*crashing[:50], *corpus(2, THROUGH_THE_DOOR)])


def _through_the_door(tmp_path: Path, files: list[bytes]) -> None:
    made_by_hand = [craft.column_beyond_the_schema(), craft.page_beyond_its_column(400_000_000)]
    with Server(tmp_path / "home") as server, server.client() as client:
        pid, peak, seen = server.process.pid, 0, collections.Counter[int]()
        for data in [*made_by_hand, *files]:
            answer = client.post(
                "/v1/files", files={"file": ("t.parquet", data)}, data={"purpose": "fine-tune"}, timeout=300
            )
            seen[answer.status_code] += 1
            if answer.status_code != 200:
                assert error(answer)["code"] == "bad_upload"
            peak = max(peak, psutil.Process(pid).memory_info().rss)
        print(dict(seen), "server's peak", peak >> 20, "MiB")
        assert set(seen) == {200, 400} and server.process.poll() is None
        assert client.get("/health").status_code == 200
        assert peak < 500 << 20
        assert len(client.get("/v1/files").json()["data"]) == seen[200]
