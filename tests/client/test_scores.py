"""Numbers of a regression: standardised on their way out, read back, refused where they are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milkglass.client.codec.codec import Codec
from milkglass.client.data.training_rows import write_parquet
from milkglass.client.key.key import Key, KeyInfo
from milkglass.client.upload_names import tokenizer_digest
from milkglass.errors import CodecError
from milkglass.rows.examples import read_examples, summarise
from milkglass.rows.labels import Scale
from tests import tiny

SECRET = "zanzibar"
SCORES = [0.5, 3, 5.0, "1.25"]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = tiny.save("llama-tied", tmp_path_factory.mktemp("model") / "llama")
    key = Key.new("sha256:test", tiny.VOCAB, (), KeyInfo({"tokenizer_sha256": tokenizer_digest(folder)}))
    return Codec.open(key, folder)


def write(path: Path, scores: list[Any]) -> Path:
    rows = [
        {"text": tiny.TEXTS[i % 4], "text_pair": f"{SECRET} again", "label": score} for i, score in enumerate(scores)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_a_scale_gives_mean_0_and_spread_1_and_reads_back(scores: list[float]) -> None:
    spread = float(np.std(scores))
    if spread <= 1e-6 * max(1.0, abs(float(np.mean(scores)))):
        return
    scale = Scale.of(scores)
    assert scale.mean == pytest.approx(np.mean(scores), abs=1e-6)
    assert scale.spread == pytest.approx(spread, rel=1e-6)
    sent = [scale.standardise(one) for one in scores]
    assert np.mean(sent) == pytest.approx(0, abs=1e-4)
    assert np.std(sent) == pytest.approx(1, rel=1e-4)
    assert [scale.restore(one) for one in sent] == pytest.approx(scores, rel=1e-6, abs=1e-6)
    assert Scale.from_document(json.loads(json.dumps(scale.document()))) == scale


@pytest.mark.parametrize("scores", [[], [2.0], [3.0, 3.0, 3.0], [1e308, -1e308, 1e308]])
def test_scores_that_teach_nothing(scores: list[float]) -> None:
    with pytest.raises(CodecError, match=f"the {len(scores)} scores do not differ"):
        Scale.of(scores)


def test_a_scale_stands_for_data_that_is_like_its_own() -> None:
    known = Scale(2.5, 1.5)
    assert known.suits(Scale(3.9, 2.9)) and known.suits(Scale(1.1, 0.8))
    assert not known.suits(Scale(4.1, 1.5)) and not known.suits(Scale(2.5, 3.1)) and not known.suits(Scale(2.5, 0.7))


def test_the_summary_of_scores(tmp_path: Path) -> None:
    found = summarise(write(tmp_path / "a.jsonl", SCORES), are_scores=True)
    assert (found.task, found.row_count, found.has_pairs, found.labels) == ("regression", 4, True, ())
    assert found.scale == Scale.of([0.5, 3, 5, 1.25])
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nthe nurse\t1\nthe scan\t-2e1\n")
    assert [one.label for one in read_examples(tmp_path / "a.tsv", are_scores=True)] == ["1.0", "-20.0"]


def test_whole_numbers_are_classes_unless_it_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [1, 2, 3])
    assert (summarise(path).task, summarise(path).labels) == ("classification", ("1", "2", "3"))
    assert summarise(path, are_scores=True).task == "regression"


@pytest.mark.parametrize("bad", [True, "zanzibar", "inf", [1], 10**400])
def test_what_is_no_number_is_named_and_never_quoted(tmp_path: Path, bad: Any) -> None:
    path = write(tmp_path / "a.jsonl", [1.0, bad])
    with pytest.raises(CodecError, match=r"^line 2 of a.jsonl has a label that is not a number") as caught:
        summarise(path, are_scores=True)
    assert SECRET not in str(caught.value) and caught.value.__cause__ is None


def test_a_row_without_a_label(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "zanzibar"}\n')
    with pytest.raises(CodecError, match="^line 1 of a.jsonl has no label") as caught:
        summarise(tmp_path / "a.jsonl", are_scores=True)
    assert SECRET not in str(caught.value)


def test_columns_of_a_regression(tmp_path: Path, codec: Codec) -> None:
    path, out = write(tmp_path / "a.jsonl", SCORES), tmp_path / "out.parquet"
    scale = Scale(2.0, 2.0)
    assert write_parquet(codec, path, out, scale).row_count == 4
    table = pq.read_table(out)
    assert table.schema.field("labels").type == pa.float32()
    assert table["labels"].to_pylist() == [-0.75, 0.5, 1.5, -0.375]
    assert SECRET not in codec.decode(table["input_ids"][0].as_py()[:3]) and set(table.column_names) == {
        "input_ids", "attention_mask", "labels",
    }  # fmt: skip
