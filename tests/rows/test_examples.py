"""The user's rows: every shape, every broken line, and that no message quotes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from milkglass.errors import CodecError
from milkglass.rows.blocks import blocks_of, row_format_of
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import number_labels, read_examples, summarise

SECRET = "zanzibar"


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def test_labelled_lines(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "one", "label": "b"}, "", {"text": "two", "label": "a", "id": 7})
    assert [(e.line, e.text, e.label) for e in read_examples(path)] == [(1, "one", "b"), (3, "two", "a")]
    found = summarise(path)
    assert (found.kind, found.task, found.row_count, found.has_pairs, found.labels) == (
        "labelled", "classification", 2, False, ("a", "b"),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["weight", "sample_weight", "train", "loss", "mask"])
@pytest.mark.parametrize("labelled", [False, True])
def test_a_row_that_is_weighed_is_refused(name: str, labelled: bool, tmp_path: Path) -> None:
    row: dict[str, Any] = {"text": "a", **({"label": "x"} if labelled else {})}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**row, name: None}) + "\n" + json.dumps({**row, name: 0}))
    with pytest.raises(CodecError, match=rf"line 2 of rows\.jsonl has {name},") as refused:
        list(read_examples(path))
    assert "--text-column" in refused.value.hint and "--label-column" in refused.value.hint
    named = DataFile(path, text="text", label="label" if labelled else None)
    assert [one.text for one in read_examples(named)] == ["a", "a"]


def test_a_table_with_a_column_of_weights_is_refused_and_other_columns_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label,loss,mask\na,x,1,2\n")
    assert [one.label for one in read_examples(tmp_path / "rows.csv")] == ["x"]
    for name in ("weight", "sample_weight"):
        path = tmp_path / f"{name}.csv"
        path.write_text(f"text,label,{name}\na,x,0\n")
        with pytest.raises(CodecError, match=f"has {name},"):
            list(read_examples(path))
        with pytest.raises(CodecError, match=f"has {name},"):
            list(read_examples(DataFile(path, label="label")))
        assert [one.label for one in read_examples(DataFile(path, text="text", label="label"))] == ["x"]
        assert [one.label for one in read_examples(DataFile(path, label=name))] == ["0"], "it is what is learnt"


def test_numbers_as_labels_keep_their_order(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": "x", "label": n} for n in (10, 2, 0)))
    assert summarise(path).labels == ("0", "2", "10")


def test_instructions_become_conversations(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"instruction": "Sum up.", "input": "A text.", "output": "Sum."},
        {"instruction": "Greet.", "input": "", "output": "Hi."},
    )
    first, second = read_examples(path)
    assert first.messages == (
        {"role": "user", "content": "Sum up.\n\nA text."},
        {"role": "assistant", "content": "Sum."},
    )
    assert second.messages[0]["content"] == "Greet."
    assert summarise(path).task == "causal-lm"


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"instruction": "Who?", "context": "Bo ran.", "response": "Bo.", "category": "closed_qa"}, "Who?\n\nBo ran."),
        ({"instruction": "Who?", "response": "Bo."}, "Who?"),
        ({"prompt": "Who?", "response": "Bo."}, "Who?"),
    ],
)
def test_answers_in_other_usual_columns(tmp_path: Path, row: dict[str, str], question: str) -> None:
    path = lines(tmp_path / "a.jsonl", row)
    (example,) = read_examples(path)
    user, assistant = example.messages
    assert (user["content"], assistant["content"]) == (question, "Bo.")
    assert "response" in DataFile(path).columns_text()


def test_a_context_is_sanitized_with_its_question(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"instruction": "Who?", "context": f"{SECRET} ran.", "response": "Bo."})
    row_format = row_format_of(path)
    (block,) = blocks_of(path, row_format)
    _, slots, unchanged_names = row_format.parse(block)
    assert [container[name] for container, name in slots] == ["Who?", f"{SECRET} ran.", "Bo."]
    assert not unchanged_names


def test_tsv_as_glue_writes_it(tmp_path: Path) -> None:
    """Quotes mean nothing, and the header says `sentence`."""
    path = lines(tmp_path / "dev.tsv", "sentence\tlabel", 'it "is" good\t1', '"half a quote\t0')
    assert [(e.text, e.label) for e in read_examples(path)] == [('it "is" good', "1"), ('"half a quote', "0")]


def test_csv_with_quotes_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,text_pair,label\n"one, two\nthree",other,yes\n', "utf-8-sig")
    (example,) = read_examples(path)
    assert (example.text, example.pair, example.label) == ("one, two\nthree", "other", "yes")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ('{"text": "zanzibar", ', "JSON$"),
        ("[" * 100_000, "JSON$"),
        ('["zanzibar"]', "JSON object"),
        ({"txt": SECRET, "label": "a"}, "no text"),
        ({"text": 5, "label": "a"}, "a text that .*string"),
        ({"text": " ", "label": SECRET}, "empty text"),
        ({"text": SECRET, "label": None}, "empty label"),
        ({"text": SECRET, "label": [True]}, "a label that"),
        ({"text": SECRET, "label": float("inf")}, "a label that"),
        ('{"text": "zanzibar", "label": "a", "text": "b"}', "text twice"),
        ({"text": SECRET}, "no label"),
        ({"text": SECRET, "text_pair": SECRET, "label": "a"}, "kind of row"),
        ({"text": SECRET, "text_pair": SECRET}, "no label"),
        ({"messages": SECRET}, "list of messages"),
        ({"messages": [{"role": SECRET, "content": "x"}]}, "message 1 .*role"),
        ({"messages": [{"role": "user", "content": SECRET}]}, "no assistant"),
        ({"instruction": SECRET, "output": ""}, "empty output"),
    ],
)
def test_broken_lines_are_named_and_never_quoted(tmp_path: Path, row: Any, fault: str) -> None:
    path = lines(tmp_path / "data.jsonl", {"text": "fine", "label": "a"}, row)
    with pytest.raises(CodecError) as caught:
        summarise(path)
    assert re.match(rf"line 2 of data\.jsonl\b.*{fault}", caught.value.message)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.tsv", "body\tlabel\nx\ty\n", r"header of a\.tsv .*text"),
        ("a.tsv", "text\tlabel\nzanzibar\n", r"line 2 of a\.tsv .*\b1 cells\b.*\b2 columns"),
        ("a.csv", 'text,label\n"zanzibar" x,y\n', r"line 2 of a\.csv .*\brow$"),
        ("a.csv", "", r"a\.csv .*empty"),
        ("a.jsonl", "", r"a\.jsonl .*empty"),
        ("a.jsonl", "\n\n", r"a\.jsonl .*no rows"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: str, fault: str) -> None:
    (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(CodecError) as caught:
        summarise(tmp_path / name)
    assert re.search(fault, caught.value.message)
    assert SECRET not in str(caught.value)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "grün", "label": "a"}'.encode("latin-1"))
    with pytest.raises(CodecError, match=r"a\.jsonl .*UTF-8"):
        summarise(tmp_path / "a.jsonl")


# --- labels -----------------------------------------------------------------------------------------------------------
def test_labels_keep_their_numbers() -> None:
    known = {"urgent": 0, "billing": 1, "other": 2}
    assert number_labels(("billing", "urgent"), known) == known
    assert number_labels(("billing", "new"), known) == {"billing": 0, "new": 1}
    assert number_labels(("a", "b"), None) == {"a": 0, "b": 1}
