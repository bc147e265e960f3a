"""Headers of safetensors files: what is read is what the library reads, or less, and notes have one place."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from milkglass.errors import CorruptCheckpoint
from milkglass.models.safetensors_header import MAX_TENSORS, has_notes, read_header, read_tensors_and_notes
from tests.mutations import mutated

ENTRY = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
PLAIN = '{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}'
TWO = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
}
BODY = bytes(range(24))
INSIDE = PLAIN[1:-1]


def file_of(header: bytes, body: bytes = BODY, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def with_tensor(*texts: str) -> bytes:
    return ("{" + ",".join([*texts, INSIDE]) + "}").encode("utf-8", "surrogatepass")


def with_fields(fields: str) -> bytes:
    return PLAIN.replace('"dtype":"F32"', fields).encode()


WALKED_AROUND = {  # each may carry a note, or may be read in two ways
    "a field in a tensor's entry": with_fields('"note":"private","dtype":"F32"'),
    "a second __metadata__": with_tensor('"__metadata__":{"note":"private"}', '"__metadata__":{"format":"pt"}'),
    "a field twice": with_fields('"dtype":"private","dtype":"F32"'),
    "a tensor twice": with_tensor('"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}'),
    "a note twice": with_tensor('"__metadata__":{"format":"private","format":"pt"}'),
    "a byte order mark": b"\xef\xbb\xbf" + PLAIN.encode(),
    "UTF-16": PLAIN.encode("utf-16"),
    "UTF-16, little end first": PLAIN.encode("utf-16-le"),
    "UTF-16, big end first": PLAIN.encode("utf-16-be"),
    "UTF-32": PLAIN.encode("utf-32"),
    "Latin-1": PLAIN.replace("a", "\u00e9", 1).encode("latin-1"),
    "a space in front": b" " + PLAIN.encode(),
    "a comment behind": PLAIN.encode() + b"\n/* private */",
    "metadata that are none": with_tensor('"__metadata__":null'),
    "metadata in a list": with_tensor('"__metadata__":["private"]'),
    "metadata that are nested": with_tensor('"__metadata__":{"format":{"private":"x"}}'),
    "half a surrogate pair": with_tensor('"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'),
    "true for 1": PLAIN.replace("[0,24]", "[false,24]").encode(),
    "a float": PLAIN.replace("[6]", "[6.0]").encode(),
    "minus zero": PLAIN.replace("[0,24]", "[-0,24]").encode(),
    "an exponent": PLAIN.replace("[6]", "[6e0]").encode(),
    "a number of 5,000 digits": PLAIN.replace("[6]", "[" + "9" * 5000 + "]").encode(),
    "lists in lists": b'{"a":' + b"[" * 100_000,
    "a list": b"[]",
    "not a number": with_tensor('"__metadata__":{"format":NaN}'),
}


def found_by_library(path: Path) -> bool:
    try:
        with safe_open(path, "np") as file:
            list(file.keys())
    except (SafetensorError, OSError, UnicodeError):
        return False
    return True


@pytest.mark.parametrize("name", WALKED_AROUND)
def test_a_header_that_could_be_read_in_two_ways_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(WALKED_AROUND[name]))
    for read in (read_header, has_notes):
        with pytest.raises(CorruptCheckpoint):
            read(path)


@pytest.mark.parametrize(
    ("header", "notes"),
    [
        (PLAIN.encode(), False),
        (with_tensor('"__metadata__":{"format":"pt"}'), False),
        (with_tensor('"__metadata__":{"format":"pt","x":"private"}'), True),
        (with_tensor('"__metadata__":{"x":"private"}'), True),
        (PLAIN.encode() + b" " * 5000, False),
        (json.dumps(json.loads(PLAIN), indent=2).encode(), False),
        (with_tensor('"na\\u00efve":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'), False),
    ],
)
def test_what_the_library_reads_is_read(header: bytes, notes: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(header))
    assert read_header(path)["a"].shape == (6,) and has_notes(path) is notes and found_by_library(path)


# --- more than a model has -------------------------------------------------------------------------------------------
FIELDS = '"dtype":"U8","shape":[0],"data_offsets":[0,0]'


def entries(count: int, fields: str = FIELDS) -> bytes:
    return ("{" + ",".join(f'"{number}":{{{fields}}}' for number in range(count)) + "}").encode()


def tree(depth: int) -> bytes:
    """Lists in lists, each shorter than the one around it."""
    return b"[" + b",".join([tree(depth - 1)] * depth) + b"]" if depth else b"[]"


BLOATED = {
    "empty objects, then the key again": (b'{"a":[' + b"{}," * 8_000_000 + b'{}],"a":', b"}", "more values"),
    "objects, then the key again": (b'{"a":[' + b'{"":0},' * 3_300_000 + b'{}],"a":', b"}", r"\d strings"),
    "numbers, then the key again": (b'{"a":[' + b"999," * 6_000_000 + b'9],"a":', b"}", "more values"),
    "names without entries": (b"{" + b'"a":0,' * 3_000_000 + b'"b":', b"}", r"\d strings"),
    "trees of lists": (b'{"a":[' + (tree(8) + b",") * 60 + b'0],"a":', b"}", r"\d lists|more values"),
    "levels": (b'{"a":' + b"[" * 900 + b"]" * 900 + b',"b":', b"}", "900 lists"),
    "quotes that are not closed": (b'{"a":' + b'\\"' * 6_000_000 + b'":', b"}", "not JSON"),
    "backslashes": (b'{"a":"' + b"\\" * 12_000_001 + b'":', b"}", "not JSON"),
}


@pytest.mark.parametrize("name", BLOATED)
def test_a_header_is_bounded_before_objects_are_built(name: str, tmp_path: Path) -> None:
    before, behind, named = BLOATED[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(before + json.dumps(ENTRY).encode() + behind))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint, match=named):
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * path.stat().st_size + (1 << 20)


@pytest.mark.parametrize(
    "header",
    [
        with_tensor(r'"__metadata__":{"json":"{\"a\": [{, [[' + "[{" * 500 + r'\\"}'),
        with_tensor(r'"a[0].{\"b\"":{"data_offsets":[0,0],"shape":[0,1,2,3,4,5,6,7],"dtype":"U8"}'),
        with_tensor('"__metadata__":{' + ",".join(f'"{n}":""' for n in range(5000)) + "}"),
        with_tensor('"b":{"shape":[0],"dtype":"U8","data_offsets":[0,0]}', '"\u00e9":{' + FIELDS + "}"),
    ],
    ids=["JSON in notes", "brackets in a name", "many notes", "order of fields"],
)
def test_punctuation_in_strings_does_not_count(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(header))
    assert "a" in read_header(path) and found_by_library(path)


@pytest.mark.parametrize("count", [20_000, pytest.param(MAX_TENSORS, marks=pytest.mark.slow)])
def test_a_large_model_is_read(count: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(entries(count), b""))
    assert len(read_tensors_and_notes(path)[0]) == count


def test_too_many_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(entries(MAX_TENSORS + 100), b""))
    with pytest.raises(CorruptCheckpoint, match="200000 tensors"):
        read_header(path)


def test_reading_a_header_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, milkglass.models.safetensors_header; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- at random --------------------------------------------------------------------------------------------------------
VALUES: list[Any] = [None, True, False, -1, 0, 1, 2, 16, 24, 25, 2**31, 2**40, 2**63, 2**64, 10**50, 1.0, 1.5,
    1e400, "F32", "F64", "F8_E4M3", "I64", "F4", "BOOL", "x", "", [], [0], [2, 2], [2**40, 0], [0] * 9, [1] * 8,
    [-1], [0, 16], [16, 0], [0, 24], [16, 24], {}, "\ud800", [True, 16], [0, 16, 16], [[0], 16]]  # fmt: skip


def other_entries(draw: random.Random) -> bytes:
    header: dict[str, Any] = json.loads(json.dumps(TWO))
    for _ in range(draw.randint(1, 3)):
        name, kind = draw.choice([*header] or ["a"]), draw.random()
        entry = header.get(name)
        if kind < 0.6 and isinstance(entry, dict) and entry:
            entry[draw.choice(["dtype", "shape", "data_offsets", "note"])] = draw.choice(VALUES)
        elif kind < 0.7:
            header[name] = draw.choice(VALUES)
        elif kind < 0.8:
            offsets = draw.choice([[0, 16], [16, 24], [24, 24], [0, 4], [20, 24]])
            header[f"n{draw.randint(0, 3)}"] = {
                "dtype": draw.choice(["F32", "U8", "BF16"]),
                "shape": draw.choice([[1], [2, 2], [0], []]),
                "data_offsets": offsets,
            }
        else:
            header.pop(name, None)
    return file_of(json.dumps(header).encode())


def other_bytes(draw: random.Random) -> bytes:
    original = file_of(json.dumps(TWO).encode())
    return mutated(original, draw, 6, [struct.pack("<Q", one) for one in (0, 1, 2**31, 2**63, len(original))])


@pytest.mark.parametrize(
    "count", [pytest.param(600, id="few"), pytest.param(20_000, id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("make", [other_entries, other_bytes])
def test_what_is_read_the_library_reads_too(make: Callable[[random.Random], bytes], count: int, tmp_path: Path) -> None:
    draw, path, seen = random.Random(count), tmp_path / "model.safetensors", Counter[str]()
    for _ in range(count):
        data = make(draw)
        path.write_bytes(data)
        try:
            read_header(path)
        except CorruptCheckpoint:
            seen["refused"] += 1
            continue
        seen["read"] += 1
        assert found_by_library(path), data
    assert seen["refused"] > count // 2 and seen["read"]
