"""Training rows as flat tensors: what is taken, what is refused, and that a worker meets what a client encoded."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save
from starlette.testclient import TestClient

from milkglass.client.codec.codec import Codec
from milkglass.client.data.marked_rows import parquet_tensors, write_tensors
from milkglass.client.data.training_rows import write_parquet
from milkglass.client.key.key import Key, KeyInfo
from milkglass.client.upload_names import tokenizer_digest
from milkglass.errors import BadUpload
from milkglass.rows.labels import Scale
from milkglass.server import spec
from milkglass.server.jobs.data import TrainingDataset
from milkglass.server.storage import training_rows
from milkglass.server.storage.recording import Recording
from milkglass.server.storage.store import ModelRecord, Store
from milkglass.server.storage.training_rows import MAX_HEADER_BYTES, MAX_ROW_IDS, TrainingRows, check_training_file
from tests import tiny
from tests.server.kit import announce, error, flat_tensors, put, rows_file, running

NOTES = {"format": "rows/1"}
VECTORS = Path(__file__).parents[2] / "vectors"
Change = Callable[[dict[str, Any]], dict[str, Any]]


def old_parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"input_ids": pa.array([[1, 2]], pa.list_(pa.int32())), "labels": [0]}), buffer)
    return buffer.getvalue()


def send(client: TestClient, data: bytes, name: str = "train.safetensors") -> Any:
    return client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "fine-tune"})


def changed(**tensors: Any) -> bytes:
    """Two rows, three ids and two, with these tensors; None leaves one out."""
    kept = {**flat_tensors([[1, 2, 3], [4, 5]], [0, 1]), **tensors}
    return save({name: values for name, values in kept.items() if values is not None}, NOTES)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (changed()[:-4], "cut off"),
        (changed() + b"\0", "1 bytes after"),
        (b"PAR1" + b"\0" * 50 + b"PAR1", "Parquet"),
        (
            struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{" * (MAX_HEADER_BYTES + 1),
            f"claims {MAX_HEADER_BYTES + 1} bytes; at most {MAX_HEADER_BYTES}",
        ),
        (struct.pack("<Q", 2**63) + b"{}", f"claims {2**63} bytes"),
        (b"", "not a safetensors file"),
        (save(flat_tensors([[1]], [0])), "metadata"),
        (save(flat_tensors([[1]], [0]), {**NOTES, "note": "private"}), "metadata"),
        (save(flat_tensors([[1]], [0]), {"format": "pt"}), "metadata"),
        (changed(private=ints(1)), "1 tensors that are not of rows/1"),
        (changed(labels=None), "the file has input_ids, lengths"),
        (changed(lengths=None), "the file has input_ids, labels"),
        (changed(scores=np.array([1, 2], np.float32)), "the file has input_ids, labels, lengths, scores"),
        (changed(input_ids=np.array([1, 2, 3, 4, 5])), "input_ids is I64 of shape [5]; I32 of one dimension"),
        (changed(input_ids=ints(1, 2, 3, 4)[None]), "input_ids is I32 of shape [1, 4]"),
        (changed(labels=np.array([0, 1], np.float32)), "labels is F32"),
        (changed(lengths=ints(), labels=ints()), "0 rows of 5 ids"),
        (changed(lengths=ints(1, 1, 1, 1, 1, 1), labels=ints(0, 0, 0, 0, 0, 0)), "6 rows of 5 ids"),
        (changed(labels=ints(0, 1, 1)), "labels holds 3 numbers; 2 are needed"),
        (changed(labels=None, token_labels=ints(0, 1)), "token_labels holds 2 numbers; 5 are needed"),
        (changed(token_type_ids=np.zeros(2, np.int8)), "token_type_ids holds 2 numbers; 5 are needed"),
        (changed(lengths=ints(2, 2)), "the lengths add up to 4; input_ids holds 5"),
        (changed(lengths=ints(2**31 - 1, 2**31 - 1)), f"a row has {2**31 - 1} ids; 1 to {MAX_ROW_IDS}"),
        (changed(lengths=ints(5, 0)), "a row has 0 ids"),
        (changed(lengths=ints(6, -1)), "a row has -1 ids"),
        (changed(input_ids=ints(1, 2, 3, 4, -5)), "outside 0 to"),
        (changed(token_type_ids=np.array([0, 0, 0, 0, -1], np.int8)), "negative"),
        (changed(labels=None, scores=np.array([1, np.inf], np.float32)), "not finite"),
    ],
)
def test_what_is_not_training_data(client: TestClient, data: bytes, named: str) -> None:
    answer = send(client, data)
    assert answer.status_code == 400 and error(answer)["code"] == "bad_upload", answer.text
    assert named in error(answer)["message"] and "private" not in answer.text
    assert client.get("/v1/files").json()["data"] == []


def test_parquet_of_an_old_client_is_refused_before_it_is_sent(client: TestClient) -> None:
    body = {"filename": "data.parquet", "bytes": 10, "sha256": "0" * 64, "purpose": "fine-tune"}
    for answer in (client.post("/v1/uploads", json=body), send(client, old_parquet(), "data.parquet")):
        assert answer.status_code == 400 and "update Milkglass" in error(answer)["hint"]
    answer = send(client, old_parquet())
    assert answer.status_code == 400 and "update Milkglass" in error(answer)["hint"]


def test_a_file_of_an_old_server_starts_no_job(client: TestClient, folders: dict[str, Path]) -> None:
    from tests.server.kit import register

    register(client, "bert", folders["bert"])
    key = send(client, changed()).json()["id"]
    store = client.app.state.context.store  # type: ignore[attr-defined]
    store.files.update(key, lambda file: setattr(file, "filename", "data.parquet"))
    answer = client.post("/v1/fine_tuning/jobs", json={"model": "bert", "training_file": key})
    assert answer.status_code == 400 and "Parquet" in error(answer)["message"]


def test_a_refusal_at_complete_leaves_nothing_to_be_repeated(tmp_path: Path) -> None:
    data, home = changed(lengths=ints(2, 2)), tmp_path / "home"
    with running(home) as client:
        key = announce(client, "t.safetensors", data, "fine-tune")
        put(client, key, 0, data)
        assert client.post(f"/v1/uploads/{key}/complete").status_code == 400
        assert client.post(f"/v1/uploads/{key}/complete").status_code == 404  # the client asks again
    with running(home) as client:
        assert client.get("/v1/uploads").json()["data"] == client.get("/v1/files").json()["data"] == []
        assert not [path for room in ("uploads", "files", "work") for path in (home / room).iterdir()]


@pytest.mark.parametrize(("limit", "value"), [("MAX_ROW_IDS", 39), ("MAX_FILE_IDS", 639)])
def test_limits_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    path = tmp_path / "t"
    path.write_bytes(rows_file([[1]] * 300 + [[1] * 40] + [[1]] * 300, [0] * 601))
    monkeypatch.setattr(training_rows, "NUMBERS_PER_PART", 50)
    assert check_training_file(path).tokens == 640 and check_training_file(path).longest == 40
    monkeypatch.setattr(training_rows, limit, value)
    with pytest.raises(BadUpload, match=f"{value}"):
        check_training_file(path)


def test_a_large_file_is_not_read_into_memory(tmp_path: Path) -> None:
    """Of 400 MB, neither the check nor a dataset of it takes more than a few parts."""
    count, path = 50_000_000, tmp_path / "t"
    header: dict[str, Any] = {"__metadata__": NOTES}
    at = 0
    for name, size in (("lengths", count // 5000), ("input_ids", count), ("token_labels", count)):
        header[name] = {"dtype": "I32", "shape": [size], "data_offsets": [at, at + 4 * size]}
        at += 4 * size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + np.full(count // 5000, 5000, np.int32).tobytes())
        file.truncate(8 + len(text) + at)
    before = psutil.Process().memory_info().rss
    assert check_training_file(path).tokens == count
    rows = TrainingDataset(path, "causal-lm", 64)
    assert len(rows) == count // 5000 and len(rows[7]["input_ids"]) == 64
    assert psutil.Process().memory_info().rss - before < 60 << 20


def mutated(rng: random.Random, whole: bytes) -> bytes:
    """A few changes, half of them in the header."""
    data = bytearray(whole)
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(rng.choice([1, 1, 2, 3, 6])):
        at = rng.randrange(min(header, len(data))) if rng.random() < 0.5 else rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
            case _:
                del data[at : at + rng.randint(1, 6)]
    return bytes(data)


def test_damaged_files_are_refused_or_safe_to_train_with(tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "t"
    ids = [[rng.randrange(1000) for _ in range(rng.randint(1, 12))] for _ in range(40)]
    sources = [rows_file(ids, [0] * 40), rows_file(ids, [[-100] * len(one) for one in ids]), rows_file(ids, [0.5] * 40)]
    ends = {"refused": 0, "taken": 0}
    for _ in range(3000):
        path.write_bytes(mutated(rng, rng.choice(sources)))
        try:
            about = check_training_file(path)
        except BadUpload:
            ends["refused"] += 1
            continue
        ends["taken"] += 1
        rows = TrainingRows.open(path)
        task: Any = {"labels": "classification", "scores": "regression", "token_labels": "causal-lm"}[rows.label_tensor]
        dataset = TrainingDataset(path, task, 8)
        taken = [dataset[row] for row in range(len(dataset))]
        assert len(taken) == about.rows and all(1 <= len(one["input_ids"]) <= 8 for one in taken)
        assert all(one["input_ids"].min() >= 0 and one["input_ids"].max() <= about.max_id for one in taken)
    assert all(ends.values()), ends


def test_a_row_that_a_worker_can_use_is_short_enough() -> None:
    assert MAX_ROW_IDS == 8 * spec.MAX_ROW_TOKENS


def test_recording_survives_a_damaged_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad").write_bytes(b"x")
    store = Store(tmp_path / "state.sqlite")
    model = ModelRecord(id="m", kind="encoder", vocab_size=9, positions=9, token_types=0, sha256={})
    Recording(tmp_path / "seen", store).record_training(model, tmp_path / "bad")
    store.close()
    assert "could not record (BadUpload)" in caplog.text


# --- what a client encoded is what a worker trains with ---------------------------------------------------------------
def codec_of(name: str, folder: Path) -> Codec:
    model = tiny.save(name, folder / name)
    key = Key.new("sha256:test", tiny.VOCAB, (), KeyInfo({"tokenizer_sha256": tokenizer_digest(model)}))
    return Codec.open(key, model)


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Codec]:
    return {name: codec_of(name, tmp_path_factory.mktemp("models")) for name in ("bert", "gpt2")}


WORDS = st.lists(st.sampled_from(" ".join(tiny.TEXTS).split()), min_size=1, max_size=12).map(" ".join)


@settings(max_examples=25, deadline=None)
@given(
    task=st.sampled_from(["classification", "regression", "causal-lm"]),
    texts=st.lists(WORDS, min_size=2, max_size=30),
    pairs=st.booleans(),
    length=st.integers(4, 20),
    seed=st.integers(0, 99),
)
def test_a_worker_trains_with_the_rows_that_were_encoded(
    codecs: dict[str, Codec], tmp_path_factory: pytest.TempPathFactory, task: Any, texts: list[str], pairs: bool,
    length: int, seed: int,
) -> None:  # fmt: skip
    folder, rng = tmp_path_factory.mktemp("rows"), random.Random(seed)
    codec = codecs["gpt2" if task == "causal-lm" else "bert"]
    labels = [rng.choice("ab") if task == "classification" else rng.randrange(50) / 7 for _ in texts]
    rows: list[dict[str, Any]] = [{"text": one} for one in texts]
    numbers: Any = None
    if task != "causal-lm":
        rows = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
        if pairs:
            rows = [{**row, "text_pair": row["text"][::-1]} for row in rows]
        numbers = {"a": 1, "b": 0} if task == "classification" else Scale(2.0, 3.0)
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    write_parquet(codec, folder / "a.jsonl", folder / "a.parquet", numbers, length)
    write_tensors(folder / "a.safetensors", parquet_tensors(folder / "a.parquet"))
    about = check_training_file(folder / "a.safetensors")
    dataset = TrainingDataset(folder / "a.safetensors", task, spec.MAX_ROW_TOKENS)
    assert len(dataset) == about.rows == len(texts)
    if task == "causal-lm":
        done = codec.encode_causal(texts, length, truncate=True)
        for row, (ids, expected) in enumerate(zip(done.ids, done.labels, strict=True)):
            assert dataset[row]["input_ids"].tolist() == ids.tolist()
            assert dataset[row]["labels"].tolist() == expected.tolist()
        return
    second = [row["text_pair"] for row in rows] if pairs else None
    encoded = codec.encode(texts, second, length, truncate=True)
    types = encoded.token_type_ids
    for row, ids in enumerate(encoded.ids):
        example = dataset[row]
        assert example["input_ids"].tolist() == ids.tolist()
        assert ("token_type_ids" in example) == (types is not None)
        assert types is None or example["token_type_ids"].tolist() == types[row].tolist()
        expected = numbers[labels[row]] if task == "classification" else np.float32(numbers.standardise(labels[row]))
        assert example["labels"] == expected


def test_the_vector_of_the_format(tmp_path: Path) -> None:
    vector = json.loads((VECTORS / "rows-1.json").read_text())
    tensors = {name: np.array(one) for name, one in vector["tensors"].items()}
    halves = [{"lengths": tensors["lengths"][:1]} | {n: v[:3] for n, v in tensors.items() if n != "lengths"}]
    halves += [{"lengths": tensors["lengths"][1:]} | {n: v[3:] for n, v in tensors.items() if n != "lengths"}]
    write_tensors(tmp_path / "t", halves)
    assert (tmp_path / "t").read_bytes().hex() == vector["file"]
    assert {name: one.tolist() for name, one in load_file(tmp_path / "t").items()} == vector["tensors"]
    dataset = TrainingDataset(tmp_path / "t", "causal-lm", 9)
    rows = [dataset[0], dataset[1]]
    assert [[row["input_ids"].tolist(), row["labels"].tolist()] for row in rows] == vector["rows"]
