"""Training rows as they are written: scrambled ids and numbers, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milkglass.client.codec.codec import Codec
from milkglass.client.codec.encoded import IGNORED_LABEL
from milkglass.client.data.training_rows import BATCH_ROWS, write_parquet
from milkglass.client.key.key import Key, KeyInfo
from milkglass.client.upload_names import tokenizer_digest
from milkglass.errors import CodecError, TooLong
from tests import tiny

SECRET = "zanzibar"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = tiny.save("llama-tied", tmp_path_factory.mktemp("model") / "llama")
    key = Key.new("sha256:test", tiny.VOCAB, (), KeyInfo({"tokenizer_sha256": tokenizer_digest(folder)}))
    return Codec.open(key, folder)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def test_columns_of_classification(tmp_path: Path, codec: Codec) -> None:
    rows = [{"text": tiny.TEXTS[i % 4], "label": "ab"[i % 2]} for i in range(BATCH_ROWS + 5)]
    told: list[int] = []
    out = tmp_path / "out.parquet"
    done = write_parquet(codec, lines(tmp_path / "a.jsonl", *rows), out, {"a": 0, "b": 1}, progress=told.append)
    table = pq.read_table(out)
    assert table.schema.field("input_ids").type == pa.list_(pa.int32())
    assert table.schema.field("attention_mask").type == pa.list_(pa.int8())
    assert table.schema.field("labels").type == pa.int32()
    assert done.row_count == table.num_rows == sum(told) == BATCH_ROWS + 5
    assert done.token_count == sum(map(len, table["input_ids"].to_pylist()))
    assert table["labels"].to_pylist()[:3] == [0, 1, 0]
    assert codec.decode(table["input_ids"][1].as_py()) == tiny.TEXTS[1]
    assert table["attention_mask"][1].as_py() == [1] * len(table["input_ids"][1])


def test_columns_of_conversations(tmp_path: Path, codec: Codec) -> None:
    row = {"instruction": tiny.TEXTS[0], "input": "", "output": tiny.TEXTS[1]}
    out = tmp_path / "out.parquet"
    write_parquet(codec, lines(tmp_path / "a.jsonl", row), out)
    table = pq.read_table(out)
    assert table.schema.field("labels").type == pa.list_(pa.int32())
    ids, labels = table["input_ids"][0].as_py(), table["labels"][0].as_py()
    assert len(ids) == len(labels) and labels[0] == IGNORED_LABEL
    assert codec.decode([one for one in labels if one != IGNORED_LABEL]) == tiny.TEXTS[1]


def test_long_rows_are_cut_and_counted(tmp_path: Path, codec: Codec) -> None:
    rows = [{"text": "please " * n, "label": "a"} for n in (1, 50)]
    done = write_parquet(codec, lines(tmp_path / "a.jsonl", *rows), tmp_path / "out.parquet", {"a": 0}, max_length=20)
    lengths = [len(ids) for ids in pq.read_table(tmp_path / "out.parquet")["input_ids"].to_pylist()]
    assert done.cut_count == 1 and max(lengths) == 20


def test_the_same_data_is_the_same_file(tmp_path: Path, codec: Codec) -> None:
    """So that an interrupted upload is found again."""
    source = lines(tmp_path / "a.jsonl", {"text": tiny.TEXTS[0], "label": "a"})
    for name in ("one", "two"):
        write_parquet(codec, source, tmp_path / name, {"a": 0})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path, codec: Codec) -> None:
    rows = [{"text": "fine", "label": "a"}] * (BATCH_ROWS + 1) + [{"text": "fine", "label": "b"}]
    source = lines(tmp_path / "a.jsonl", *rows)
    with pytest.raises(CodecError, match=f"line {BATCH_ROWS + 2} of a.jsonl has a label that the training file lacks"):
        write_parquet(codec, source, tmp_path / "out.parquet", {"a": 0})
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_nothing_but_scrambled_ids_is_written(tmp_path: Path, codec: Codec) -> None:
    row = {"text": f"the {SECRET} called", "label": SECRET}
    out = tmp_path / "out.parquet"
    write_parquet(codec, lines(tmp_path / "a.jsonl", row), out, {SECRET: 0})
    raw = out.read_bytes()
    assert SECRET.encode() not in raw and b"a.jsonl" not in raw
    plain = codec.tokenizer([row["text"]])["input_ids"][0]
    assert pq.read_table(out)["input_ids"][0].as_py() != plain
    assert out.stat().st_mode & 0o077 == 0


def talk(words: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "please " * words}, {"role": "assistant", "content": "no"}]}


def test_conversations_without_room_are_refused_all_at_once(tmp_path: Path, codec: Codec) -> None:
    """The hint's length is the smallest that keeps them all: one token less refuses the longest again."""
    rows = [talk(1)] + [talk(6 + n % 7) for n in range(BATCH_ROWS + 3)] + [talk(1)]
    path, out = lines(tmp_path / "a.jsonl", *rows), tmp_path / "out.parquet"
    with pytest.raises(TooLong) as caught:
        write_parquet(codec, path, out, max_length=30)
    assert caught.value.message == (
        f"{BATCH_ROWS + 3:,} of the {BATCH_ROWS + 5:,} rows of a.jsonl have no answer within 30 tokens: "
        f"lines 2, 3, 4 and {BATCH_ROWS:,} more"
    )
    assert "--skip-long" in caught.value.hint
    least = int(caught.value.hint.split("more than ")[1].split()[0])
    assert write_parquet(codec, path, out, max_length=least + 1).row_count == BATCH_ROWS + 5
    longest = sum(n % 7 == 6 for n in range(BATCH_ROWS + 3))
    with pytest.raises(TooLong, match=f"^{longest} of the "):
        write_parquet(codec, path, out, max_length=least)


def test_conversations_without_room_are_left_out_and_counted(tmp_path: Path, codec: Codec) -> None:
    """What is left is what a file without them gives, to the byte; what can be cut is cut as before."""
    long_answer = {"instruction": "no", "output": "please " * 50}
    mixed = lines(tmp_path / "mixed.jsonl", talk(60), talk(1), talk(60), long_answer)
    done = write_parquet(codec, mixed, tmp_path / "mixed", max_length=30, skip_long=True)
    assert (done.row_count, done.cut_count, [one.number for one in done.left_out_places]) == (2, 1, [1, 3])
    write_parquet(codec, lines(tmp_path / "short.jsonl", talk(1), long_answer), tmp_path / "short", max_length=30)
    assert (tmp_path / "mixed").read_bytes() == (tmp_path / "short").read_bytes()
    with pytest.raises(TooLong, match="none of the 1 rows of only.jsonl has an answer within 30 tokens"):
        write_parquet(codec, lines(tmp_path / "only.jsonl", talk(60)), tmp_path / "out", max_length=30, skip_long=True)
