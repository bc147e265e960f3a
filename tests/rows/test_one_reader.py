"""All commands that read rows give the same texts, labels, pairs and messages for the same file, in every format."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from milkglass.cli.ui.columns import ColumnOptions
from milkglass.cli.ui.text_input import texts_to_classify
from milkglass.errors import CodecError, EmptyText, MilkglassError
from milkglass.federated.prepare import labels_of
from milkglass.rows.blocks import blocks_of, require_rows, row_format_of
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import checked_summary, examples_of, read_examples, read_texts, summarise
from milkglass.rows.lines import pairs_of
from milkglass.rows.sets.catalogue import load_split
from milkglass.rows.write import write_examples

SECRET = "zanzibar"
HEADER = ("Ticket No", "Question", "Asked", "Topic")
COLUMNS = ColumnOptions("Question", "Topic", "Asked")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
ODD = st.sampled_from(
    ["\ufefftext", '"', 'a "b"', "a;b", "a,b\tc|d", "two\nlines", "a\r\nb", "\0", "a\u2028b", "=1+1", "[", "{}", "nan"]
)
LABEL = st.sampled_from(["billing", "urgent", "Nan", "7b", "a;b", 'so "called"', "null "])
Row = tuple[str, str, str]
ROWS = st.lists(st.tuples(TEXT | ODD, TEXT | ODD, LABEL), min_size=1, max_size=6)


def table(rows: Sequence[Sequence[str]], mark: str, end: str = "\n") -> str:
    out = io.StringIO()
    quoting = csv.QUOTE_ALL if any("\r" in cell for row in rows for cell in row) else csv.QUOTE_MINIMAL
    csv.writer(out, delimiter=mark, lineterminator=end, quoting=quoting).writerows(rows)
    return out.getvalue()


def written(folder: Path, rows: list[Row]) -> list[Path]:
    """The same rows in every format that can hold them."""
    lists = [HEADER, *((str(n), *row) for n, row in enumerate(rows))]
    dicts = [dict(zip(HEADER, row, strict=True)) for row in lists[1:]]
    contents = {
        "comma.csv": table(lists, ","),
        "semicolon.csv": table(lists, ";", "\r\n"),
        "tab.csv": table(lists, "\t"),
        "semicolon.tsv": table(lists, ";"),
        "excel.csv": "\ufeff" + table(lists, ";", "\r\n"),
        "lines.jsonl": "".join(json.dumps(row) + "\n" for row in dicts),
        "marked.jsonl": "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in dicts),
        "list.json": json.dumps(dicts, ensure_ascii=False, indent=1),
    }
    if not any(sign in cell for row in lists for cell in row for sign in "\t\n\r"):
        contents["plain.tsv"] = "".join("\t".join(row) + "\n" for row in lists)
    for name, text in contents.items():
        (folder / name).write_bytes(text.encode())
    pq.write_table(pa.Table.from_pylist(dicts), folder / "rows.parquet")
    return [*(folder / name for name in contents), folder / "rows.parquet"]


def rewritten(path: Path, *columns: str) -> Path:
    """What `sanitize` writes if it changes nothing."""
    shape = row_format_of(path, frozenset(columns))
    rows = [row for block in blocks_of(path, shape) for row in shape.parse(block)[0]]
    out = path.with_name(f"again{path.suffix}")
    out.write_bytes((shape.write([shape.header]) if shape.header else "").encode() + shape.write(rows).encode())
    return out


def sanitized(path: Path, *columns: str) -> list[list[str]]:
    """The texts of each row as `sanitize` reads them."""
    shape = row_format_of(path, frozenset(columns))
    require_rows(path, shape)
    result = []
    for block in blocks_of(path, shape):
        for line, raw in zip(block.lines, block.raw_rows, strict=True):
            _, slots, _ = shape.parse(type(block)(0, (line,), (raw,)))
            result.append([container[key] for container, key in slots])
    return result


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
@pytest.mark.slow
def test_the_same_rows_are_read_from_every_format_by_every_command(rows: list[Row], tmp_path: Path) -> None:
    expected = [(text, pair, label.strip()) for text, pair, label in rows]
    for path in written(tmp_path, rows):
        file = COLUMNS.data_file(path)
        read = "text from Question, label from Topic, text_pair from Asked; not read: Ticket No"
        assert file.columns_text() == read, (path.name, rows)
        assert [(one.text, one.pair, one.label) for one in read_examples(file)] == expected, path.name
        assert [(one.text, one.pair) for one in read_texts(file)] == [one[:2] for one in expected], path.name
        found = texts_to_classify(None, path, COLUMNS)
        assert [one.text for one in found] == [text for text, _, _ in expected], path.name
        assert pairs_of(found) == [pair for _, pair, _ in expected], path.name
        assert sorted(summarise(file).labels) == sorted({label for _, _, label in expected}), path.name
        if path.suffix != ".parquet":  # which is not sanitized
            assert sanitized(path, "Question", "Asked") == [[text, pair] for text, pair, _ in expected], path.name
            again = COLUMNS.data_file(rewritten(path, "Question", "Asked"))
            assert [(one.text, one.pair, one.label) for one in read_examples(again)] == expected, path.name
        out = path.with_name("written.jsonl")
        write_examples(read_examples(file), out)
        assert [(one.text, one.pair, one.label) for one in read_examples(out)] == expected, path.name


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(TEXT, st.sampled_from("01")), min_size=1, max_size=6))
def test_a_data_set_by_name_is_read_as_a_file_of_ones_own(rows: list[tuple[str, str]], tmp_path: Path) -> None:
    names = {"0": "negative", "1": "positive"}
    rows = [("".join(sign for sign in text if sign not in "\t\r\n").strip() or "x", label) for text, label in rows]
    path = tmp_path / "train.tsv"
    path.write_bytes(("sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows)).encode())
    own, published = examples_of(path), list(load_split("sst2", tmp_path, "train"))
    assert [(one.line, one.text, names[str(one.label)]) for one in own] == [
        (one.line, one.text, one.label) for one in published
    ]
    assert sanitized(path) == [[one.text] for one in published]


def test_options_of_columns_make_rows_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a", "Asked": "b", "id": 7}) + "\n")
    [found] = texts_to_classify(None, path, ColumnOptions(pair_column="Asked"))
    assert (found.text, found.pair, found.output_id) == ("a", "b", "7")
    [found] = texts_to_classify(None, path, ColumnOptions(), id_column="id")
    assert (found.text, found.pair, found.output_id) == ("a", None, "7")
    [found] = texts_to_classify(None, path, ColumnOptions())
    assert (found.text, found.pair, found.output_id) == ("a", None, ""), "a line of its own has no place in a table"


# --- files that cannot be read: one message, whoever reads ------------------------------------------------------------
READERS: dict[str, Callable[[Path], Any]] = {
    "finetune": lambda path: checked_summary(DataFile(path), "classification"),
    "compare and audit": examples_of,
    "federated": lambda path: labels_of([path]),
    "classify": lambda path: texts_to_classify(None, path, ColumnOptions(text_column="text")),
    "split audit": lambda path: list(read_texts(path)),
    "data": lambda path: write_examples(read_examples(path), path.with_name("out.jsonl")),
    "sanitize": sanitized,
}
PLACE = {".csv": "line 3 of mine.csv", ".tsv": "line 3 of mine.tsv", ".jsonl": "line 2 of mine.jsonl"}
BAD: list[tuple[str, bytes, str]] = [
    ("mine.csv", b"text,label\nfine,a\ncaf\xe9 zanzibar,b\n", r"mine\.csv .*line 3 .*Latin-1"),
    ("mine.tsv", b"text\tlabel\nfine\ta\n\x93zanzibar\x94\tb\n", r"mine\.tsv .*line 3 .*Windows-1252"),
    ("mine.jsonl", b'{"text": "fine", "label": "a"}\n{"text": "zanzibar \xe9", "label": "b"}\n',
     r"mine\.jsonl .*line 2 .*Latin-1"),
    ("mine.json", b'[{"text": "zanzibar \xe9", "label": "b"}]', r"mine\.json .*line 1 .*Latin-1"),
    ("mine.csv", "text,label\nzanzibar,b\n".encode("utf-16"), r"mine\.csv .*UTF-16"),
    ("mine.jsonl", '{"text": "zanzibar", "label": "b"}'.encode("utf-16"), r"mine\.jsonl .*UTF-16"),
    ("mine.csv", b"text,label\n\xff\0zanzibar,b\n", r"mine\.csv .*text file"),
    ("mine.csv", b"text,label,text\nzanzibar,b,c\n", r"mine\.csv .*text twice.*\b1\b.*\b3\b"),
    ("mine.tsv", b"text\tlabel\tlabel\nzanzibar\tb\tc\n", r"mine\.tsv .*label twice.*\b2\b.*\b3\b"),
    ("mine.jsonl", b'{"text": "zanzibar", "label": "b", "text": "c"}\n', r"line 1 of mine\.jsonl .*text twice"),
    ("mine.json", b'[{"text": "zanzibar", "label": "b", "text": "c"}]', r"entry 1 of mine\.json .*text twice"),
    ("mine.csv", b"text,label\nfine,a\nzanzibar\n", r"line 3 of mine\.csv .*\b1 cells\b.*\b2 columns"),
    ("mine.tsv", b"text\tlabel\nfine\ta\nzanzibar\tb\tc\n", r"line 3 of mine\.tsv .*\b3 cells\b.*\b2 columns"),
    ("mine.csv", b'text,label\nfine,a\n"zanzibar,b\n', r"line 3 of mine\.csv .*\brow$"),
    ("mine.csv", b'text,label\nfine,a\n"zanzibar"x,b\n', r"line 3 of mine\.csv .*\brow$"),
    ("mine.jsonl", b'{"text": "fine", "label": "a"}\n{"text": "zanzibar\n', r"line 2 of mine\.jsonl .*JSON$"),
    ("mine.jsonl", b'{"text": "fine", "label": "a"}\n["zanzibar"]\n', r"line 2 of mine\.jsonl .*JSON object"),
    ("mine.json", b'[{"text": "fine", "label": "a"}, "zanzibar"]', r"entry 2 of mine\.json .*JSON object"),
    ("mine.json", b'[{"text": "fine", "label": "a"}, {"text": "zanzibar', r"entry 2 of mine\.json .*JSON$"),
    ("mine.jsonl", b'{"text": "a", "label": "a"}\n{"text": ["zanzibar"], "label": "b"}\n',
     r"line 2 of mine\.jsonl .*a text that .*string"),
    ("mine.csv", b"my zanzibar arm,b\nfine,a\n", r"header of mine\.csv .*text"),
    ("mine.jsonl", b'{"other words": "fine", "label": "a"}\n', r"line 1 of mine\.jsonl .*no text"),
    ("mine.csv", b"", r"mine\.csv .*empty"),
    ("mine.csv", b"\n\n", r"mine\.csv .*empty"),
    ("mine.csv", b"text,label\n", r"mine\.csv .*no rows"),
    ("mine.jsonl", b"\xef\xbb\xbf", r"mine\.jsonl .*no rows"),
    ("mine.json", b"[]", r"mine\.json .*no rows"),
    ("mine.jsonl", b'{"text": "a", "label": ' + b"[" * 100_000 + b"\n", r"line 1 of mine\.jsonl .*JSON$"),
]  # fmt: skip


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_a_file_that_cannot_be_read_is_refused_in_the_same_words(
    name: str, content: bytes, message: str, command: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CodecError) as caught:
        READERS[command](path)
    assert re.search(message, caught.value.message)
    assert SECRET not in str(caught.value) and SECRET not in repr(caught.value.__cause__)
    assert {one.name for one in tmp_path.iterdir()} == {name}, "nothing half written"


@pytest.mark.parametrize("command", ["finetune", "compare and audit", "federated", "classify", "split audit", "data"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mine.csv", "text,label\nfine,a\n ,b\n"),
        ("mine.tsv", "text\tlabel\nfine\ta\n\tb\n"),
        ("mine.jsonl", '{"text": "fine", "label": "a"}\n{"text": null, "label": "b"}\n'),
    ],
)
def test_an_empty_cell_is_named_by_its_place(name: str, content: str, command: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(EmptyText) as caught:
        READERS[command](path)
    assert caught.value.message.startswith(PLACE[path.suffix]) and "empty text" in caught.value.message


NOISE = [b"\n", b"\r", b",", b"\t", b'"', b";", b"\0", b"\xff", b"{", b"]", b"\xef\xbb\xbf"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    noise=st.lists(st.tuples(st.integers(0, 80), st.sampled_from(NOISE)), max_size=4),
    name=st.sampled_from(["a.csv", "a.tsv", "a.jsonl", "a.json", "a.txt"]),
)  # fmt: skip
def test_damaged_files_are_read_or_refused_and_never_end_in_a_traceback(
    noise: list[tuple[int, bytes]], name: str, tmp_path: Path
) -> None:
    whole = {
        "a.csv": b'text,label\n"a ""b"", c",x\nd,y\n', "a.tsv": b'text\tlabel\na "b c\tx\nd\ty\n',
        "a.jsonl": b'{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n', "a.txt": b"a\nb c\n",
        "a.json": b'[{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]',
    }  # fmt: skip
    content = bytearray(whole[name])
    for at, sign in noise:
        content[at % (len(content) + 1) : 0] = sign
    path = tmp_path / name
    path.write_bytes(bytes(content))
    readers: dict[str, Callable[[], list[str]]] = {
        "finetune": lambda: [one.text for one in examples_of(path)],
        "split audit": lambda: [one.text for one in read_texts(path)],
        "sanitize": lambda: [text for row in sanitized(path) for text in row if text.strip()],
    }
    found: dict[str, list[str]] = {}
    for command, read in readers.items():
        with suppress(MilkglassError):
            found[command] = read()
    assert len({tuple(texts) for texts in found.values()}) <= 1, found
