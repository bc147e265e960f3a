"""Every data set by name, from small folders in its published layouts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.metrics import glue, text
from milkglass.rows import tables
from milkglass.rows.examples import Example, checked_summary, read_examples
from milkglass.rows.sets.catalogue import PUBLIC_DATASETS, dataset_named, files_of_split, load_split
from milkglass.rows.write import write_examples
from tests.rows.sets.layouts import CHATS, Expected, lines, put, write_all

NAMES = [
    "sst2", "qnli", "cola", "mrpc", "rte", "stsb", "qqp", "mnli", "alpaca", "dolly", "dialogsum", "ifeval", "ag_news",
    "tweet_sentiment", "enron", "legal", "rotten_tomatoes", "wikitext2",
]  # fmt: skip
SPLITS = [(name, split) for name in NAMES for split in PUBLIC_DATASETS[name].splits]
LEFT_OUT = {
    ("qqp", "train"): "2 rows were left out of train.tsv: rows that a line break tore apart, or with an empty question",
    ("mnli", "train"): "1 row was left out of train.tsv: rows whose annotators did not agree on a label",
    ("alpaca", "train"): "1 row was left out of alpaca_data.json: rows without an answer",
}
SECRET = "zanzibar"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[tuple[str, str], list[Expected]]:
    return write_all(root)


def test_the_names_that_are_promised_are_there() -> None:
    assert sorted(PUBLIC_DATASETS) == sorted(NAMES)
    with pytest.raises(UsageError, match="'imdb'"):
        dataset_named("imdb")


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_a_split_reads_as_it_was_published(
    name: str, split: str, root: Path, expected: dict[tuple[str, str], list[Expected]]
) -> None:
    notes: list[str] = []
    found = list(load_split(name, root, split, notes.append))
    if (name, split) in CHATS:
        assert [(one.messages[0]["content"], one.messages[1]["content"]) for one in found] == CHATS[name, split]
        assert all([turn["role"] for turn in one.messages] == ["user", "assistant"] for one in found)
    else:
        assert [(one.text, one.pair, one.label) for one in found] == expected[name, split]
    assert notes == ([LEFT_OUT[name, split]] if (name, split) in LEFT_OUT else [])
    inside = files_of_split(name, root, split)[0].parent
    assert list(load_split(name, inside, split)) == found  # the data set's own folder is as good


@pytest.mark.parametrize("name", NAMES)
def test_a_description_holds_together(name: str) -> None:
    about = PUBLIC_DATASETS[name]
    assert about.licence and about.about and about.columns
    assert (about.task == "classification") == bool(about.labels)
    assert about.label_numbers == dict(zip(about.labels, range(len(about.labels)), strict=True))
    known = {*glue.MEASURES, *text.MEASURES, "perplexity"}
    assert set(about.metrics) <= known
    assert about.metrics or about.task == "prompts"
    assert set(about.splits) <= {"train", "validation", "validation_mismatched", "test"}


def test_the_metrics_are_glues_own() -> None:
    wanted = {
        "sst2": ("accuracy",), "qnli": ("accuracy",), "rte": ("accuracy",), "mnli": ("accuracy",),
        "cola": ("matthews",), "mrpc": ("accuracy", "f1"), "qqp": ("accuracy", "f1"), "stsb": ("pearson", "spearman"),
    }  # fmt: skip
    assert {name: PUBLIC_DATASETS[name].metrics for name in wanted} == wanted
    assert (
        PUBLIC_DATASETS["mrpc"].label_numbers["equivalent"] == PUBLIC_DATASETS["qqp"].label_numbers["duplicate"] == 1
    )  # the class of their F1
    assert PUBLIC_DATASETS["cola"].label_numbers["acceptable"] == PUBLIC_DATASETS["sst2"].label_numbers["positive"] == 1


def test_lines_are_those_of_the_file(root: Path, expected: dict[tuple[str, str], list[Expected]]) -> None:
    assert [one.line for one in load_split("sst2", root, "train")] == [2, 3]
    assert [one.line for one in load_split("cola", root, "train")] == [1, 2]
    assert [one.line for one in load_split("ag_news", root, "test")] == [1, 3]  # where the row begins
    assert [one.line for one in load_split("wikitext2", root, "test")] == [2, 4]
    assert [one.line for one in load_split("alpaca", root, "train")] == [1, 2]


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_what_is_exported_reads_back(
    name: str, split: str, root: Path, expected: dict[tuple[str, str], list[Expected]], tmp_path: Path
) -> None:
    before = list(load_split(name, root, split))
    score = PUBLIC_DATASETS[name].task == "regression"
    out = tmp_path / "out.jsonl"
    assert write_examples(load_split(name, root, split), out, score) == len(before)
    assert out.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]
    if score:  # what would otherwise be trained as hundreds of classes
        again = list(read_examples(out, are_scores=True))
        assert [float(a.label or "nan") for a in again] == [float(b.label or "nan") for b in before]
        if all(float(b.label or "nan").is_integer() for b in before):
            assert [a.label for a in read_examples(out)] == [f"{float(b.label or 'nan'):.0f}" for b in before]
            return
        with pytest.raises(CodecError, match=r"label of out\.jsonl"):
            checked_summary(out, None)
        return
    again = list(read_examples(out))
    assert [(a.kind, a.text, a.pair, a.label) for a in again] == [(b.kind, b.text, b.pair, b.label) for b in before]
    assert [[dict(m) for m in a.messages] for a in again] == [[dict(m) for m in b.messages] for b in before]


def test_an_export_may_be_of_the_first_rows_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    put(tmp_path, "train.tsv", "sentence\tlabel\na\t1\nb\t0\nc\t7\n")
    assert write_examples(load_split("sst2", tmp_path, "train"), tmp_path / "two.jsonl", max_count=2) == 2
    with pytest.raises(CodecError, match=r"line 4 of train\.tsv"):
        write_examples(load_split("sst2", tmp_path, "train"), tmp_path / "all.jsonl")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["train.tsv", "two.jsonl"]


def broken(name: str, split: str, folder: Path) -> CodecError:
    with pytest.raises(CodecError) as caught:
        list(load_split(name, folder, split))
    error = caught.value
    assert SECRET not in str(error) and SECRET not in repr(error)
    return error


@pytest.mark.parametrize(
    ("name", "file", "text", "message", "hint"),
    [
        ("sst2", "train.tsv", f"text\tlabel\n{SECRET}\t1\n", r"train\.tsv .*sentence$", ": text, label"),
        ("sst2", "train.tsv", f"a {SECRET} day\t1\n", r"train\.tsv .*sentence$", "2 cells"),
        ("sst2", "train.tsv", f"sentence\tlabel\tlabel\n{SECRET}\t1\t1\n", "label twice", "rename"),
        ("sst2", "train.tsv", f"sentence\tlabel\nok\t1\n{SECRET}\t1\tmore\n",
         r"line 3 of train\.tsv .*\b3 cells\b.*\b2 columns", "tabs"),
        ("sst2", "train.tsv", f"sentence\tlabel\nok\t{SECRET}\n", r"line 2 of train\.tsv .*label", ": 0, 1"),
        ("sst2", "train.tsv", "sentence\tlabel\n \t1\n", r"line 2 of train\.tsv .*empty sentence", "fill"),
        ("sst2", "train.tsv", "sentence\tlabel\n", r"train\.tsv .*no rows", "at least one"),
        ("sst2", "train.tsv", "", r"train\.tsv .*empty", "at least one"),
        ("cola", "train.tsv", f"gj04\t1\t{SECRET}\n", r"line 1 of train\.tsv .*\b3 cells\b.*\b4\b", "tabs"),
        ("stsb", "train.tsv", f"sentence1\tsentence2\tscore\na\tb\t{SECRET}\n",
         r"line 2 of train\.tsv .*score .*\b0 to 5\b", "check"),
        ("stsb", "train.tsv", "sentence1\tsentence2\tscore\na\tb\t5.2\n", r"score .*\b0 to 5\b", "check"),
        ("stsb", "train.tsv", "sentence1\tsentence2\tscore\na\tb\tnan\n", r"score .*\b0 to 5\b", "check"),
        ("ag_news", "train.csv", f'"1","{SECRET}"\n', r"line 1 of train\.csv .*\b2 cells\b.*\b3\b", "quotes"),
        ("ag_news", "train.csv", f'"1","a","b"\n"2","{SECRET}', r"line 2 of train\.csv .*\brow$", "quotes"),
        ("ag_news", "train.csv", f'"5","a","{SECRET}"\n', r"line 1 of train\.csv .*class", "1, 2, 3, 4"),
        ("dolly", "train.jsonl", f'{{"instruction": "{SECRET}\n', r"line 1 of train\.jsonl .*JSON$", "object"),
        ("dolly", "train.jsonl", f'["{SECRET}"]\n', r"line 1 of train\.jsonl .*JSON object", "object"),
        ("dolly", "train.jsonl", f'{{"instruction": "{SECRET}"}}\n', r"line 1 of train\.jsonl .*no response",
         ": instruction"),
        ("dolly", "train.jsonl", f'{{"instruction": 7, "response": "{SECRET}"}}\n',
         r"line 1 of train\.jsonl .*instruction .*string", "string"),
        ("dolly", "train.jsonl", f'{{"instruction": "a", "context": 3, "response": "{SECRET}"}}\n',
         r"line 1 of train\.jsonl .*context .*string", "string"),
        ("alpaca", "alpaca_data.json", f'{{"instruction": "{SECRET}"}}', r"^alpaca_data\.json .*JSON list", "write"),
        ("alpaca", "alpaca_data.json", f'["{SECRET}"]', r"entry 1 of alpaca_data\.json .*JSON object", "write"),
        ("enron", "sentences.json", f'["ok", "{SECRET}', r"entry 2 of sentences\.json .*JSON$", "cut off"),
        ("enron", "sentences.json", f'["ok" "{SECRET}"]', r"entry 1 of sentences\.json .*JSON$", "broken"),
        ("enron", "sentences.json", '["ok", " "]', r"entry 2 of sentences\.json .*empty", "leave"),
        ("enron", "sentences.json", "[]", r"sentences\.json .*no rows", "at least one"),
    ],
)  # fmt: skip
def test_a_broken_file_is_told_without_its_text(
    name: str, file: str, text: str, message: str, hint: str, tmp_path: Path
) -> None:
    put(tmp_path, file, text)
    error = broken(name, "train", tmp_path)
    assert re.search(message, error.message)
    assert hint in error.hint


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    put(tmp_path, "train.tsv", f"sentence\tlabel\n{SECRET} caf\xe9\t1\n", "latin-1")
    assert re.search(r"train\.tsv .*line 2 .*\(ISO-8859-1\)", broken("sst2", "train", tmp_path).message)
    put(tmp_path, "train.csv", f'"1","{SECRET} \xe9","b"\n', "latin-1")
    assert re.search(r"train\.csv .*line 1 .*\(ISO-8859-1\)", broken("ag_news", "train", tmp_path).message)
    put(tmp_path, "sentences.json", f'["{SECRET} \xe9"]', "latin-1")
    assert re.search(r"sentences\.json .*line 1 .*\(ISO-8859-1\)", broken("enron", "train", tmp_path).message)


@pytest.mark.parametrize(
    ("texts", "labels", "short"), [("a\nb\n", "1\n", "val_labels.txt"), ("a\n", "1\n0\n", "val_text.txt")]
)
def test_two_files_side_by_side_are_of_one_length(texts: str, labels: str, short: str, tmp_path: Path) -> None:
    put(tmp_path, "val_text.txt", texts)
    put(tmp_path, "val_labels.txt", labels)
    assert re.match(f"{re.escape(short)} .*fewer lines", broken("tweet_sentiment", "validation", tmp_path).message)


def test_a_folder_or_split_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="train split of mrpc") as caught:
        load_split("mrpc", tmp_path, "train")
    folders = ", ".join(map(str, (tmp_path / "mrpc", tmp_path / "MRPC", tmp_path)))
    assert f"train.tsv or msr_paraphrase_train.txt in {folders}" in caught.value.hint
    assert caught.value.hint.endswith("of mrpc: nothing")
    put(tmp_path, "dev.tsv", "x\n")
    with pytest.raises(UsageError) as caught:
        load_split("mrpc", tmp_path, "train")
    assert caught.value.hint.endswith("of mrpc: validation (dev.tsv)")
    with pytest.raises(UsageError, match="folder /nowhere"):
        load_split("mrpc", Path("/nowhere"), "train")
    put(tmp_path, "val_text.txt", "a\n")
    with pytest.raises(UsageError, match="validation split") as caught:
        load_split("tweet_sentiment", tmp_path, "validation")
    assert "val_text.txt with val_labels.txt in " in caught.value.hint
    with pytest.raises(UsageError, match="sst2 .*'test'") as caught:
        load_split("sst2", tmp_path, "test")
    assert caught.value.hint.endswith(": train, validation")


def test_rows_stream(tmp_path: Path) -> None:
    """The row that cannot be is met only when it is reached."""
    put(tmp_path, "train.tsv", "sentence\tlabel\n" + "fine\t1\n" * 5 + "worse\t9\n")
    rows = load_split("sst2", tmp_path, "train")
    assert [next(rows).text for _ in range(5)] == ["fine"] * 5
    with pytest.raises(CodecError, match="line 7"):
        next(rows)


@pytest.mark.parametrize("block", [1, 7, 4096])
@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('[\n{"text": "a"},\n{"text": "b" "c"},\n{"text": "d"}\n]', 3),
        ('[{"text": "a"},\n\n{"text": "b"}\n{"text": "c"}]', 4),
        ('[{"text": "a"},\n{"text": "b",\n"label": }]', 3),
        ('[{"text": "a"},\n{"text": "b', 2),
    ],
)
def test_a_broken_json_list_is_reported_with_its_line(
    content: str, line: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BLOCK_CHARACTERS", block)
    file = tmp_path / "rows.json"
    file.write_text(content)
    with pytest.raises(CodecError) as caught:
        list(tables.json_list(file))
    assert "entry 2 of rows.json" in caught.value.message and f"line {line}:" in caught.value.hint
    assert '"b' not in str(caught.value)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_a_json_list_is_read_in_blocks_of_any_size(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milkglass.rows.tables.BLOCK_CHARACTERS", block)
    put(tmp_path, "sentences.json", ' [ "a, b]" , "\\u00e9\\n\\"", "c" ]\n')
    assert [one.text for one in load_split("enron", tmp_path, "train")] == ["a, b]", '\xe9\n"', "c"]
    put(tmp_path, "sentences.json", '["a", "b"')
    with pytest.raises(CodecError, match="entry 2"):
        list(load_split("enron", tmp_path, "train"))


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("after", ['[{"text": "b"}]', "\n\n  {}", "x", ", 1]", "]"])
def test_what_follows_a_json_list_is_refused_and_not_dropped(
    after: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BLOCK_CHARACTERS", block)
    file = tmp_path / "rows.json"
    file.write_text('[{"text": "a"}]' + after)
    with pytest.raises(CodecError, match=r"rows\.json"):
        list(tables.json_list(file))
    file.write_text('[{"text": "a"}]' + " \n" * 5)
    assert [entry for _, entry in tables.json_list(file)] == [{"text": "a"}]


def test_a_headless_file_with_one_word_cells_shows_no_text_with_a_space(tmp_path: Path) -> None:
    put(tmp_path, "train.tsv", lines().strip() + f"my {SECRET} note\tcode-7\n")
    hint = broken("sst2", "train", tmp_path).hint
    assert ": code-7 and 1 more; if the first line is text" in hint and SECRET not in hint


def test_an_example_is_the_clients_own(root: Path, expected: dict[tuple[str, str], list[Expected]]) -> None:
    assert next(load_split("rte", root, "train")) == Example(2, "labelled", "Bo ran home.", "Bo ran.", "entailment")
    assert next(load_split("ifeval", root, "train")) == Example(1, "text", "Say no commas.")


def test_an_empty_row_of_a_plain_file_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "enron.jsonl", lines({"text": ""}))
    with pytest.raises(EmptyText, match=r"line 1 of enron\.jsonl .*text"):
        list(load_split("enron", tmp_path, "train"))
