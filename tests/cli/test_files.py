"""Files as people have them, from the command line: other columns, semicolons, lists, long rows, other encodings."""

from __future__ import annotations

import errno
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from milkglass.cli.ui.columns import classes_text
from milkglass.rows.examples import Summary
from tests import tiny
from tests.cli.kit import SECRET, Owner, call, document, has_model_of, refused
from tests.cli.test_commands import job_server
from tests.client.stub import Handler, Stub, rows_of

ROWS = [(f"{SECRET} {tiny.TEXTS[i % 4]}", ("urgent", "billing")[i % 2]) for i in range(8)]


def tweets(folder: Path, mark: str = ";", suffix: str = ".csv") -> Path:
    path = folder / f"tweets{suffix}"
    body = "".join(f'{n}{mark}{mood}{mark}"{text}"\n' for n, (text, mood) in enumerate(ROWS))
    path.write_text(f"id{mark}mood{mark}tweet\n\n{body}", "utf-8-sig")
    return path


def test_a_full_disk_is_named_with_the_next_step(
    encoder: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that fills the disk is told of its target: the library names the source first."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "source", None, "target")

    monkeypatch.setattr("milkglass.files.atomic_write", fails)
    result = call("encode", "the nurse", "--key", encoder.path, "--out", tmp_path / "ids.jsonl")
    refused(result, 1, "no space left on device (target)\n  hint: free some space, or give a place on another disk")


def sent(stub: Stub, asked: dict[str, Any]) -> Any:
    return rows_of(stub.content[asked["training_file"]])


@pytest.mark.parametrize(("mark", "options"), [(";", ()), ("\t", ()), (";", ("--delimiter", "semicolon"))])
def test_finetune_reads_columns_of_any_name(
    stub: Stub, encoder: Owner, tmp_path: Path, mark: str, options: tuple[str, ...]
) -> None:
    encoder.reset()
    asked = job_server(stub)
    run = ("finetune", "mine", tweets(tmp_path, mark), "--key", encoder.path, *options)
    done = call(*run, "--text-column", "tweet", "--label-column", "mood")
    assert done.exit_code == 0, done.stderr
    assert "1 blank line of tweets.csv skipped" in done.stderr
    counts = Counter(mood for _, mood in ROWS)
    assert all(f"{mood} {count}" in done.stderr for mood, count in counts.items())
    assert "tweets.csv: text from tweet, label from mood; not read: id" in done.stderr
    table = sent(stub, asked)
    assert [encoder.codec.decode(ids) for ids in table["input_ids"]] == [text for text, _ in ROWS]
    assert {*encoder.about["labels"]} == {"urgent", "billing"}


def test_a_column_of_second_texts_may_have_any_name(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    encoder.reset()
    asked = job_server(stub)
    path = tmp_path / "pairs.csv"
    path.write_text("question,reply,fits\nis it open,it is,yes\nis it open,the bill,no\n" * 3, "utf-8")
    columns = ("--text-column", "question", "--pair-column", "reply", "--label-column", "fits")
    done = call("finetune", "mine", path, "--key", encoder.path, *columns)
    assert done.exit_code == 0, done.stderr
    assert "pairs.csv: text from question, label from fits, text_pair from reply\n" in done.stderr
    [first, *_] = sent(stub, asked)["input_ids"]
    assert list(first) == encoder.codec.encode(["is it open"], ["it is"]).ids[0].tolist()


def test_a_column_that_is_missing_is_answered_with_those_there_are(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    run = ("finetune", "mine", tweets(tmp_path), "--key", encoder.path)
    there = "the columns there are: id, mood, tweet; --text-column names the column of texts"
    refused(call(*run, passphrase="wrong"), 4, "the passphrase is wrong")  # before the rows are read
    result = call(*run)
    refused(result, 5, "the header of tweets.csv names no column text or sentence")
    assert there in result.stderr and SECRET not in result.stderr
    refused(call(*run, "--text-column", "tweets"), 5, "names no column tweets")
    result = call(*run, "--text-column", "tweet", "--label-column", "label")
    refused(result, 5, "names no column label")
    result = call(*run, "--text-column", "tweet", "--task", "classification")
    refused(result, 5, "tweets.csv has no labels: its rows are texts alone")
    assert "the columns there are: id, mood, tweet; --label-column names the column of labels" in result.stderr
    assert not stub.calls


def test_rows_without_labels_for_an_encoder_name_the_columns(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    has_model_of(stub, encoder)
    result = call("finetune", "mine", tweets(tmp_path), "--key", encoder.path, "--text-column", "tweet")
    assert result.exit_code == 5 and "has no labels" in result.stderr and "--label-column" in result.stderr
    assert not stub.count("POST /v1/uploads")


def test_long_rows_are_left_out_or_refused_before_anything_is_sent(stub: Stub, decoder: Owner, tmp_path: Path) -> None:
    decoder.reset()
    has_model_of(stub, decoder, kind="decoder")
    asked = job_server(stub)
    rows = [{"instruction": "please " * n, "input": "", "output": "we will call"} for n in (1, 12, 1, 12, 1)]
    path = tmp_path / "alpaca_data.json"
    path.write_text(json.dumps(rows), "utf-8")
    run = ("finetune", "mine", path, "--key", decoder.path, "--max-length", 64, "--batch-size", 1)
    before = decoder.about
    result = call(*run)
    refused(result, 5, "2 of the 5 rows of alpaca_data.json have no answer within 64 tokens: entries 2 and 4")
    assert "--skip-long" in result.stderr and "set --max-length to more than " in result.stderr
    assert not stub.count("POST /v1/uploads") and decoder.about == before
    late = call(*run[:2], tmp_path / "short.jsonl", *run[3:], "--validation", path)
    assert late.exit_code == 2  # there is no such file
    (tmp_path / "short.jsonl").write_text(json.dumps(rows[0]) + "\n")
    late = call(*run[:2], tmp_path / "short.jsonl", *run[3:], "--validation", path)
    refused_late = "2 of the 5 rows of alpaca_data.json have no answer"
    assert late.exit_code == 5 and refused_late in late.stderr and not stub.count("POST /v1/uploads")
    done = call(*run, "--skip-long")
    assert done.exit_code == 0, done.stderr
    assert (
        "left out: 2 of 5 rows of alpaca_data.json, without an answer within 64 tokens (entries 2 and 4)" in done.stderr
    )
    assert len(sent(stub, asked)["input_ids"]) == 3


def test_rows_with_an_empty_field_are_left_out_or_refused(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    encoder.reset()
    has_model_of(stub, encoder)
    asked = job_server(stub)
    path = tmp_path / "t.jsonl"
    rows = [*({"text": text, "label": mood} for text, mood in ROWS), {"text": " ", "label": "urgent"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [rows[-1], *rows]), "utf-8")
    run = ("finetune", "mine", path, "--key", encoder.path)
    result = call(*run)
    refused(result, 5, "line 1 of t.jsonl has an empty text")
    assert "--skip-empty" in result.stderr
    done = call(*run, "--skip-empty")
    assert done.exit_code == 0 and "2 rows with an empty field of t.jsonl skipped" in done.stderr, done.stderr
    assert len(sent(stub, asked)["input_ids"]) == len(ROWS)
    path.write_text(json.dumps(rows[-1]) + "\n", "utf-8")
    refused(call(*run, "--skip-empty"), 5, "t.jsonl has no rows")


def test_another_encoding_is_named_with_the_command_that_converts_it(
    stub: Stub, encoder: Owner, tmp_path: Path
) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("text,label\nfine,a\ngr\u00fcn,b\n".encode("latin-1"))
    for run in (("finetune", "mine", path), ("audit", "--text", path), ("classify", "mine", "--in", path)):
        result = call(*run, "--key", encoder.path)
        assert result.exit_code == 5, result.stderr
        assert "latin.csv is not UTF-8 text: line 3 looks like Latin-1" in result.stderr
        assert "iconv -f ISO-8859-1 -t UTF-8 latin.csv > latin.utf8.csv" in result.stderr


def test_a_table_is_classified_row_by_row(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    encoder.reset()
    has_model_of(stub, encoder)

    def answer(handler: Handler) -> None:
        rows = json.loads(handler.body)["input"]
        data = [{"index": i, "label": "LABEL_1", "probs": [0.25, 0.75]} for i in range(len(rows))]
        handler.answer(200, {"data": data})

    stub.replies["POST /classify"] = answer
    done = call("classify", "mine", "--in", tweets(tmp_path), "--key", encoder.path, "--text-column", "tweet")
    assert done.exit_code == 0, done.stderr
    named = [f"LABEL_1\t0.750\t{number}" for number in range(len(ROWS))]
    assert done.stdout.splitlines() == named, "by the column `id`, after what scripts read"
    ids = [one for name, _, body in stub.calls if name == "POST /classify" for one in json.loads(body)["input"]]
    assert [encoder.codec.decode(one) for one in ids] == [text for text, _ in ROWS]
    run = ("classify", "mine", "--in", tweets(tmp_path), "--key", encoder.path, "--text-column", "tweet")
    by_mood = call(*run, "--id-column", "mood").stdout.splitlines()
    assert [one.split("\t")[2] for one in by_mood] == [mood for _, mood in ROWS]
    assert [one["row"] for one in document(call(*run, "--json"))["results"]] == [str(n) for n in range(len(ROWS))]
    refused(call(*run, "--id-column", "number"), 5, "line 3 of tweets.csv has no number")
    (tmp_path / "bare.csv").write_text("text\nthe nurse\n\nan arm\n", "utf-8")
    bare = call("classify", "mine", "--in", tmp_path / "bare.csv", "--key", encoder.path)
    assert bare.stdout == "LABEL_1\t0.750\t2\nLABEL_1\t0.750\t4\n", "the line of each row"
    refused(call("classify", "mine", "a", "--id-column", "id", "--key", encoder.path), 2, "the texts have no columns")
    (tmp_path / "gaps.jsonl").write_text('{"text": "an arm"}\n{"text": null}\n{"text": "NaN"}\n', "utf-8")
    run = ("classify", "mine", "--in", tmp_path / "gaps.jsonl", "--key", encoder.path, "--text-column", "text")
    refused(call(*run), 5, "line 2 of gaps.jsonl has an empty text")
    done = call(*run, "--skip-empty")
    assert done.stdout == "LABEL_1\t0.750\t1\nLABEL_1\t0.750\t3\n", done.stderr
    assert "1 row with an empty field of gaps.jsonl skipped" in done.stderr


def test_rows_without_labels_are_no_training_rows_of_an_encoder(encoder: Owner, tmp_path: Path) -> None:
    """One-hot `labels` are a column that is not looked for: without a label the rows would be a generator's."""
    path = tmp_path / "onehot.jsonl"
    path.write_text("".join(json.dumps({"text": text, "labels": [1, 0]}) + "\n" for text in tiny.TEXTS), "utf-8")
    run = ("encode", "--in", path, "--out", tmp_path / "rows.parquet", "--key", encoder.path)
    for more in ((), ("--task", "causal-lm"), ("--layout", "jsonl")):
        result = call(*run, *more)
        refused(result, 5, "onehot.jsonl has no labels: its rows are texts alone, and the model is an encoder")
        assert "the columns there are: text, labels; --label-column" in result.stderr
    assert not (tmp_path / "rows.parquet").exists()


def test_a_byte_order_mark_is_no_text(encoder: Owner, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the nurse called\n", "utf-8-sig")
    plain = call("encode", "the nurse called", "--key", encoder.path).stdout
    assert call("encode", "--in", tmp_path / "a.txt", "--key", encoder.path).stdout == plain


def test_an_audit_says_how_many_blank_lines_it_skips(encoder: Owner, tmp_path: Path) -> None:
    path = tmp_path / "valid.txt"
    path.write_text("\n".join([*tiny.TEXTS * 10, "", "the nurse"]), "utf-8-sig")
    result = call("audit", "--key", encoder.path, "--text", path, "--out", tmp_path / "audit", "--budget", "1s")
    assert "1 blank line of valid.txt skipped" in result.stderr


def test_obfuscate_reads_the_rows_before_the_model(encoder: Owner, tmp_path: Path) -> None:
    run = ("obfuscate", tmp_path / "no-model", tmp_path / "out", "--key", tmp_path / "k", "--scheme", "coarse")
    refused(call(*run, "--data", tweets(tmp_path)), 5, "names no column text or sentence")
    refused(call(*run, "--data", tweets(tmp_path), "--text-column", "tweet", "--delimiter", "ab"), 2, "is not one sign")
    known = call(*run, "--data", tweets(tmp_path), "--text-column", "tweet", "--label-column", "mood")
    assert known.exit_code == 3 and "no-model" in known.stderr  # the rows are right, and the model is looked for


def test_the_option_is_where_rows_are_read() -> None:
    for words in (
        ("finetune",), ("classify",), ("audit",), ("obfuscate",), ("encode",), ("data",), ("split", "train"),
        ("split", "classify"), ("split", "audit"), ("federated", "run"), ("federated", "prepare"),
        ("federated", "audit"),
    ):  # fmt: skip
        shown = call(*words, "--help").stdout
        assert all(option in shown for option in ("--text-column", "--label-column", "--delimiter")), words
    assert "--delimiter" in call("sanitize", "--help").stdout
    assert document(call("data", "--json"))["data_sets"]


def test_a_rare_class_is_shown_among_many() -> None:
    labels = tuple(f"topic {n}" for n in range(20))
    found = Summary("labelled", 211, False, (*labels, "null"), label_counts=(*range(20, 40), 1))
    words = classes_text(found)
    assert words.startswith("21 classes: topic 19 39, ") and words.endswith("null 1") and "and 12 more" in words


def test_a_label_of_several_lines_is_named_on_one() -> None:
    summary = Summary("labelled", 3, False, ("late\nbill", "paid"), label_counts=(2, 1))
    assert classes_text(summary) == "2 classes: late bill 2, paid 1"
