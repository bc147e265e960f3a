"""Training rows: only a file that was scrambled here leaves, and of it only its columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load

from milkglass.client.codec.codec import Codec
from milkglass.client.data.marked_rows import RowsMark, mark_path_of, require_marked, sendable_copy, write_mark
from milkglass.client.data.training_rows import write_parquet
from milkglass.client.key.key import Key, KeyInfo
from milkglass.client.remote.remote import Remote
from milkglass.client.upload_names import tokenizer_digest
from milkglass.errors import UsageError
from tests import tiny
from tests.client.stub import TOKEN, Stub

SECRET = b"PRIVATE"
List32, List8 = pa.list_(pa.int32()), pa.list_(pa.int8())
IDS, ONES = [[5, 6], [7]], [[1, 1], [1]]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = tiny.save("bert", tmp_path_factory.mktemp("model") / "bert")
    key = Key.new("sha256:test", tiny.VOCAB, (), KeyInfo({"tokenizer_sha256": tokenizer_digest(folder)}))
    return Codec.open(key, folder)


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.chunk_bytes = 1 << 20
    return stub


@pytest.fixture
def remote(stub: Stub) -> Iterator[Remote]:
    with Remote(stub.url, TOKEN) as made:
        yield made


def written(codec: Codec, folder: Path) -> Path:
    source, out = folder / "source.jsonl", folder / "rows.parquet"
    lines = [
        json.dumps({"text": text, "text_pair": "again", "label": "ab"[n % 2]}) for n, text in enumerate(tiny.TEXTS)
    ]
    source.write_text("\n".join(lines) + "\n", "utf-8")
    write_parquet(codec, source, out, {"a": 0, "b": 1})
    return out


def test_what_milkglass_wrote_leaves_written_anew(stub: Stub, remote: Remote, codec: Codec, tmp_path: Path) -> None:
    out = written(codec, tmp_path)
    found = require_marked(out)
    assert found.key_id == codec.key_id and json.loads(mark_path_of(out).read_text())["format"] == "milkglass-rows/1"
    sent = stub.content[remote.upload(out)]
    tensors, ids = load(sent), pq.read_table(out)
    assert tensors.keys() == {"lengths", "input_ids", "labels"}
    assert tensors["lengths"].tolist() == [len(row) for row in ids["input_ids"].to_pylist()]
    assert tensors["input_ids"].tolist() == sum(ids["input_ids"].to_pylist(), [])
    assert tensors["labels"].tolist() == ids["labels"].to_pylist()
    assert remote.upload(out) == "file-0", "the same bytes each time: an upload that was cut off goes on"
    assert not [call for call in stub.calls if b"rows.parquet" in repr(call).encode()]


def table(**columns: Any) -> pa.Table:
    return pa.table({"input_ids": pa.array(IDS, List32), "labels": pa.array([0, 1], pa.int32()), **columns})


def test_a_file_without_a_mark_stays_here(stub: Stub, remote: Remote, tmp_path: Path) -> None:
    """The ids of an ordinary tokenizer look like scrambled ones."""
    raw = tmp_path / "raw.parquet"
    pq.write_table(table(), raw)
    with pytest.raises(UsageError, match=r"has no raw.parquet.milkglass.json beside it") as caught:
        remote.upload(raw)
    assert "milkglass encode --in DATA --out FILE.parquet" in caught.value.hint
    assert not stub.calls


def test_a_mark_is_of_one_file(stub: Stub, remote: Remote, codec: Codec, tmp_path: Path) -> None:
    out = written(codec, tmp_path)
    other = tmp_path / "other.parquet"
    pq.write_table(table(), other)
    mark_path_of(out).rename(mark_path_of(other))
    with pytest.raises(UsageError, match=r"is not the file that other.parquet.milkglass.json was written for"):
        remote.upload(other)
    assert not stub.calls


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: {**raw, "note": "x"},
        lambda raw: {**raw, "format": "milkglass-scrambled/1"},
        lambda raw: {**raw, "key_id": None},
        lambda raw: {**raw, "sha256": "0"},
        lambda raw: {"format": raw["format"]},
        lambda raw: [raw],
    ],
)
def test_a_mark_that_is_none(codec: Codec, tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    out = written(codec, tmp_path)
    mark_path_of(out).write_text(json.dumps(change(json.loads(mark_path_of(out).read_text()))))
    with pytest.raises(UsageError, match="is not a mark of the format milkglass-rows/1"):
        require_marked(out)
    mark_path_of(out).write_text("zanzibar")
    with pytest.raises(UsageError, match="is not a mark of the format milkglass-rows/1"):
        RowsMark.read(out)


def test_a_codec_that_does_not_scramble_leaves_no_mark(codec: Codec, tmp_path: Path) -> None:
    out = written(codec.without_scrambling, tmp_path)
    assert out.is_file() and not mark_path_of(out).exists()


# --- even a marked file is not sent as it is --------------------------------------------------------------------------
def with_notes(path: Path) -> None:
    inner = pa.list_(pa.field("PRIVATE_name", pa.int32(), metadata={b"n": SECRET}))
    field = pa.field("input_ids", inner, metadata={b"note": SECRET})
    schema = pa.schema([field, pa.field("labels", pa.int32())], metadata={b"note": SECRET})
    pq.write_table(table().cast(schema), path, use_compliant_nested_type=False)


def test_notes_and_names_of_a_marked_file_stay_here(stub: Stub, remote: Remote, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with_notes(path)
    write_mark(path, "0" * 32)
    assert SECRET in path.read_bytes()
    sent = stub.content[remote.upload(path)]
    assert SECRET not in b"".join(repr(call).encode() for call in stub.calls) and SECRET not in sent
    assert load(sent)["input_ids"].tolist() == sum(IDS, [])


@pytest.mark.parametrize(
    "columns",
    [
        {"text": ["a", "b"]},
        {"labels": ["a", "b"]},
        {"labels": pa.array([[1.5], [2.5]], pa.list_(pa.float32()))},
        {"attention_mask": pa.array(["a", "b"]).dictionary_encode()},
        {"token_type_ids": pa.array(IDS, pa.list_(pa.int64()))},
        {"attention_mask": pa.array([[[1]], [[1]]], pa.list_(List8))},
    ],
)
def test_other_columns_stay_here(stub: Stub, remote: Remote, tmp_path: Path, columns: dict[str, Any]) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(**columns), path)
    write_mark(path, "0" * 32)
    with pytest.raises(UsageError, match="holds more than ids and labels|holds other values than ids and labels"):
        remote.upload(path)
    assert not stub.calls


def test_the_copy_is_removed(codec: Codec, tmp_path: Path) -> None:
    with sendable_copy(written(codec, tmp_path)) as copy:
        assert copy.is_file()
    assert not copy.parent.exists()
