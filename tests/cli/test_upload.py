"""`encode` to training rows, and `upload`: what was scrambled here leaves, nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load

from tests import tiny
from tests.cli.kit import SECRET, Owner, call, document, refused
from tests.client.stub import Stub


def rows_of(path: Path, *labels: Any) -> Path:
    rows = [{"text": f"{SECRET} {tiny.TEXTS[n % 4]}", "label": label} for n, label in enumerate(labels)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encode(owner: Owner, data: Path, out: Path, *more: Any) -> dict[str, Any]:
    return document(call("encode", "--in", data, "--out", out, "--key", owner.path, "--json", *more))


def test_a_dataset_is_encoded_here_and_uploaded(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    encoder.reset()
    data, out = rows_of(tmp_path / "data.jsonl", "urgent", "billing", "urgent", "billing"), tmp_path / "mine.parquet"
    before = document(call("key", "status", encoder.path, "--json"))
    encoded = encode(encoder, data, out)
    assert (encoded["rows"], encoded["task"], encoded["cut"], encoded["file"]) == (4, "classification", 0, str(out))
    counted = document(call("key", "status", encoder.path, "--json"))
    assert (counted["texts"], counted["tokens"]) == (before["texts"] + 4, before["tokens"] + encoded["tokens"])
    mark = json.loads((tmp_path / "mine.parquet.milkglass.json").read_text())
    assert mark["key_id"] == encoder.key.identifier
    assert set(encoder.about["labels"]) == {"urgent", "billing"}, "the numbers can be read again"

    file = document(call("upload", out, "--json"))["file"]
    sent = load(stub.content[file])
    numbers = encoder.about["labels"]
    assert sent["labels"].tolist() == [numbers[name] for name in ("urgent", "billing") * 2]
    assert encoder.codec.decode(sent["input_ids"][: sent["lengths"][0]].tolist()) == f"{SECRET} {tiny.TEXTS[0]}"
    wire = b"".join(repr(one).encode() for one in stub.calls)
    assert not [word for word in (SECRET, "urgent", "mine.parquet") if word.encode() in wire]
    encoder.reset()


def test_scores_and_conversations_are_encoded_too(encoder: Owner, decoder: Owner, tmp_path: Path) -> None:
    encoder.reset()
    scores = rows_of(tmp_path / "scores.jsonl", 1, 2, 4)
    assert encode(encoder, scores, tmp_path / "s.parquet", "--task", "regression")["task"] == "regression"
    assert pq.read_schema(tmp_path / "s.parquet").field("labels").type == pa.float32() and encoder.about["scale"]
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"instruction": "hi", "output": "we will call"}) + "\n")
    assert encode(decoder, talk, tmp_path / "t.parquet")["task"] == "causal-lm"
    assert call("encode", "--in", talk, "--out", tmp_path / "u.parquet", "--key", decoder.path).stdout.startswith(
        "wrote "
    )
    encoder.reset()


def test_training_rows_come_from_a_file(encoder: Owner, tmp_path: Path) -> None:
    run = ("encode", "--key", encoder.path, "--out", tmp_path / "a.parquet")
    data = rows_of(tmp_path / "data.jsonl", "a", "b")
    for more in (("text",), ("--in", data, "--chat"), ("--in", data, "--truncate"), ()):
        refused(call(*run, *more), 2, "a.parquet would be training rows")
    refused(call("encode", "--key", encoder.path, "x", "--task", "regression"), 2, "--task is for training rows")
    refused(call(*run, "--in", data, "--task", "causal-lm"), 5, "is data for classification")
    assert not (tmp_path / "a.parquet").exists()


def test_ids_of_an_ordinary_tokenizer_stay_here(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    raw = tmp_path / "raw.parquet"
    ids = encoder.codec.tokenizer([SECRET, "the nurse"])["input_ids"]
    columns = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "labels": pa.array([0, 1], pa.int32())}
    pq.write_table(pa.table(columns), raw)
    result = call("upload", raw)
    refused(result, 2, "has no raw.parquet.milkglass.json beside it, so nothing says that it is scrambled")
    assert "milkglass encode --in DATA --out FILE.parquet" in result.stderr and not stub.calls


@pytest.mark.parametrize("content", [b"PAR1 zanzibar", b""])
def test_a_changed_file_stays_here(stub: Stub, encoder: Owner, tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "mine.parquet"
    encode(encoder, rows_of(tmp_path / "data.jsonl", "a", "b"), out)
    out.write_bytes(content)
    refused(call("upload", out), 2, "is not the file that mine.parquet.milkglass.json was written for")
    assert not stub.calls
    encoder.reset()


def test_a_stray_file_is_named_here_and_nowhere_else(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "scrambled"
    shutil.copytree(encoder.scrambled, folder)
    shutil.copy(folder / "model.safetensors", folder / "patients-John-Doe.safetensors")
    refused(call("upload", folder), 2, "holds patients-John-Doe.safetensors, which is not a file of this model")
    assert not stub.calls


def test_names_that_no_model_has_are_reported_before_the_model_is_scrambled(encoder: Owner, tmp_path: Path) -> None:
    import shutil

    import numpy as np
    from safetensors.numpy import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(encoder.model, model)
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "bert.John-Doe": np.zeros(3, np.float32)}, model / "model.safetensors", {"format": "pt"})
    run = ("obfuscate", model, tmp_path / "out", "--key", tmp_path / "k", "--k", 4, "--set", "beta=0.9")
    refused(call(*run), 3, "1 tensors have names that no supported model has, the first is 'bert.John-Doe'")
    assert not (tmp_path / "out").exists() and not (tmp_path / "k").exists()


def test_a_name_that_cannot_be_is_refused_before_the_server_is_asked(stub: Stub, encoder: Owner) -> None:
    refused(call("upload", encoder.scrambled, "--name", "a/b"), 2, "the model's name has other characters")
    assert not stub.calls
