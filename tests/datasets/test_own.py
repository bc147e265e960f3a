"""The user's own tables, with columns of any name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milkglass.client.data.dataset import Example
from milkglass.datasets.own import Columns, columns_of, read
from milkglass.errors import CodecError, EmptyText, UsageError

SECRET = "zanzibar"
ROWS = [
    {"id": "7", "body": 'my "left", arm', "asks": "why?", "kind": "wound"},
    {"id": "8", "body": "the invoice", "asks": "how much?", "kind": "money"},
]
WANTED = [
    Example(2, "labelled", 'my "left", arm', "why?", "wound"),
    Example(3, "labelled", "the invoice", "how much?", "money"),
]


def write(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"mine{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        quoted = [['"' + str(cell).replace('"', '""') + '"' if suffix == ".csv" else str(cell) for cell in row.values()]
                  for row in rows]  # fmt: skip
        mark = "," if suffix == ".csv" else "\t"
        path.write_text("\n".join(mark.join(cells) for cells in [list(rows[0]), *quoted]) + "\n", "utf-8")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_a_table_of_any_kind(suffix: str, tmp_path: Path) -> None:
    found = list(read(write(tmp_path, suffix, ROWS), Columns("body", "kind", "asks")))
    first = 1 if suffix in (".jsonl", ".parquet") else 2  # under the header
    assert [one.line for one in found] == [first, first + 1]
    assert [(one.text, one.pair, one.label) for one in found] == [(one.text, one.pair, one.label) for one in WANTED]
    plain = list(read(write(tmp_path, suffix, ROWS), Columns("body")))
    assert [(one.kind, one.text, one.label) for one in plain] == [("text", row["body"], None) for row in ROWS]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_a_column_that_is_not_there(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="no (column )?subject") as caught:
        list(read(write(tmp_path, suffix, ROWS), Columns("body", "subject")))
    assert caught.value.hint == "the columns there are: id, body, asks, kind"
    assert "arm" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "label"), [("billing", "billing"), (3, "3"), (3.0, "3"), (True, "true"), (" a ", "a"), (0, "0")]
)
def test_labels(value: Any, label: str, tmp_path: Path) -> None:
    path = write(tmp_path, ".parquet", [{"t": "x", "l": value}])
    assert [one.label for one in read(path, Columns("t", "l"))] == [label]


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"t": SECRET, "l": 2.5}, CodecError, "line 2 of mine.jsonl has a l that is neither a name nor a whole number"),
        ({"t": SECRET, "l": None}, CodecError, "line 2 of mine.jsonl has a l that is neither a name"),
        ({"t": SECRET, "l": [SECRET]}, CodecError, "line 2 of mine.jsonl has a l that is neither a name"),
        ({"t": SECRET, "l": " "}, EmptyText, "line 2 of mine.jsonl has an empty l"),
        ({"t": " ", "l": SECRET}, EmptyText, "line 2 of mine.jsonl has an empty t"),
        ({"t": 7, "l": SECRET}, CodecError, "line 2 of mine.jsonl has a t that is not text"),
        ({"l": SECRET}, CodecError, "line 2 of mine.jsonl has no t"),
        ({"t": SECRET}, CodecError, "line 2 of mine.jsonl has no l"),
    ],
)
def test_rows_that_cannot_be(row: dict[str, Any], error: type[CodecError], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, ".jsonl", [{"t": "fine", "l": "a"}, row])
    rows = read(path, Columns("t", "l"))
    assert next(rows).text == "fine"
    with pytest.raises(error, match=message.replace(".", r"\.")) as caught:
        next(rows)
    assert SECRET not in str(caught.value)


def test_a_headless_file_does_not_show_its_first_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"my {SECRET} left,0\n", "utf-8")
    with pytest.raises(CodecError) as caught:
        list(read(path, Columns("body")))
    assert SECRET not in str(caught.value)
    assert "looks like no header" in caught.value.hint


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a\n")
    with pytest.raises(UsageError, match=r"mine\.txt is of no kind that is read"):
        read(tmp_path / "mine.txt", Columns("t"))
    with pytest.raises(UsageError, match="there is no file"):
        read(tmp_path / "other.csv", Columns("t"))
    (tmp_path / "mine.parquet").write_text(SECRET)
    with pytest.raises(CodecError, match=r"mine\.parquet is not a Parquet file") as caught:
        list(read(tmp_path / "mine.parquet", Columns("t")))
    assert SECRET not in str(caught.value)
    (tmp_path / "mine.jsonl").write_text("\n")
    with pytest.raises(EmptyText, match=r"mine\.jsonl has no rows"):
        list(read(tmp_path / "mine.jsonl", Columns("t")))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_columns_of_known_names_are_found(suffix: str, tmp_path: Path) -> None:
    pairs = [{"id": "7", "sentence1": "a", "sentence2": "b", "label": "x"}]
    assert columns_of(write(tmp_path, suffix, pairs)) == Columns("sentence1", "label", "sentence2")
    assert columns_of(write(tmp_path, suffix, pairs), "id") == Columns("sentence1", "id", "sentence2")
    unlabelled = [{"text": "a", "sentence": "b", "text_pair": "c"}]
    assert columns_of(write(tmp_path, suffix, unlabelled)) == Columns("text")
    with pytest.raises(UsageError, match="no column of mine") as caught:
        columns_of(write(tmp_path, suffix, ROWS))
    assert caught.value.hint == "give --text-column; the columns there are: id, body, asks, kind"


def test_columns_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="a pair column without a label column"):
        Columns("t", pair="p")
    with pytest.raises(UsageError, match="one and the same"):
        Columns("t", "t")
