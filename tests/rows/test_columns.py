"""Files as people have them: columns of any name, any delimiter, lists, Parquet, lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milkglass.client.training_request import require_hyperparameters
from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.federated.prepare import labels_of
from milkglass.rows.blocks import row_format_of
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import Example, checked_summary, no_labels_error, read_examples, read_texts, summarise

SECRET = "zanzibar"
ROWS = [
    {"id": "7", "body": 'my "left", arm', "asks": "why?", "kind": "wound"},
    {"id": "8", "body": "the invoice", "asks": "how much?", "kind": "money"},
]
DECLARED = '\ufeffsep=;\r\nbody;kind\r\n"my left, arm";wound\r\nthe invoice;money\r\n'
SUFFIXES = [".jsonl", ".json", ".csv", ".tsv", ".parquet"]


def write(folder: Path, suffix: str, rows: list[dict[str, Any]], mark: str = "") -> Path:
    path = folder / f"mine{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    elif suffix == ".json":
        path.write_text(json.dumps(rows, indent=2), "utf-8")
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        mark = mark or ("," if suffix == ".csv" else "\t")
        plain = suffix == ".tsv" and mark == "\t"
        quoted = [[str(cell) if plain else '"' + str(cell).replace('"', '""') + '"' for cell in row.values()]
                  for row in rows]  # fmt: skip
        path.write_text("\n".join(mark.join(cells) for cells in [list(rows[0]), *quoted]) + "\n", "utf-8")
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_of_any_kind(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path, suffix, ROWS)
    found = list(read_examples(DataFile(path, "body", "kind", "asks")))
    first = 2 if suffix in (".csv", ".tsv") else 1  # under the header
    noun = {".json": "entry", ".parquet": "row"}.get(suffix, "line")
    assert found == [
        Example(first + n, "labelled", row["body"], row["asks"], row["kind"], noun=noun) for n, row in enumerate(ROWS)
    ]
    plain = list(read_examples(DataFile(path, "body")))
    assert [(one.kind, one.text, one.label) for one in plain] == [("text", row["body"], None) for row in ROWS]


@pytest.mark.parametrize("delimiter", [None, ";"])
def test_a_line_that_declares_the_delimiter_is_no_row(delimiter: str | None, tmp_path: Path) -> None:
    """Spreadsheets write `sep=;` above the header."""
    path = tmp_path / "mine.csv"
    path.write_text(DECLARED, "utf-8", newline="")
    file = DataFile(path, "body", label="kind", delimiter=delimiter)
    assert [(one.line, one.text) for one in read_texts(file)] == [(3, "my left, arm"), (4, "the invoice")]
    assert summarise(file).labels == ("money", "wound")
    path.write_text(DECLARED + "one cell\r\n", "utf-8", newline="")
    with pytest.raises(CodecError, match="line 5 of mine.csv has 1 cells"):
        list(read_texts(file))


def test_a_sanitized_file_keeps_the_declared_delimiter(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(DECLARED, "utf-8", newline="")
    row_format = row_format_of(path, frozenset({"body"}))
    assert (row_format.delimiter, row_format.header) == (";", ("body", "kind"))


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_the_delimiter_is_found(mark: str, suffix: str, tmp_path: Path) -> None:
    """Excel writes semicolons in much of Europe, whatever it calls the file."""
    rows = [{"text": f"one, two; {n}", "label": "ab"[n % 2]} for n in range(30)]
    path = write(tmp_path, suffix, rows, mark)
    assert [(one.text, one.label) for one in read_examples(path)] == [(row["text"], row["label"]) for row in rows]
    assert summarise(DataFile(path, delimiter=mark)).labels == ("a", "b")
    other = ";" if mark != ";" else ","
    with pytest.raises(CodecError, match="text or sentence"):
        summarise(DataFile(path, delimiter=other))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_column_that_is_not_there(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="no (column )?subject") as caught:
        list(read_examples(DataFile(write(tmp_path, suffix, ROWS), "body", "subject")))
    assert caught.value.hint.endswith(": id, body, asks, kind")
    assert "arm" not in str(caught.value)


def test_a_column_given_as_a_hyperparameter_is_told_apart() -> None:
    with pytest.raises(UsageError, match="'text_column'") as caught:
        require_hyperparameters({"text_column": "Nachricht"}, str)
    assert "DataFile(path, text=NAME)" in caught.value.hint


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_read_is_said(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path, suffix, [{"Ticket No": "7", "Question": "a", "Topic": "x"}])
    file = DataFile(path, text="Question", label="Topic")
    assert file.columns_text() == "text from Question, label from Topic; not read: Ticket No"
    assert file.columns_text(reads_labels=False, identifier="Ticket No") == (
        "text from Question, id from Ticket No; not read: Topic"
    )


def test_lines_of_text_have_no_columns_to_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n", "utf-8")
    assert DataFile(tmp_path / "a.txt").columns_text() == ""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_columns_of_known_names_are_found(suffix: str, tmp_path: Path) -> None:
    pairs = [{"id": "7", "sentence1": "a", "sentence2": "b", "label": "x"}]
    path = write(tmp_path, suffix, pairs)
    assert DataFile(path).columns_by_role() == {"text": "sentence1", "label": "label", "text_pair": "sentence2"}
    assert DataFile(path, label="id").columns_by_role() == {
        "text": "sentence1",
        "label": "id",
        "text_pair": "sentence2",
    }
    assert DataFile(path, text="sentence2").columns_by_role() == {
        "text": "sentence2",
        "label": "label",
        "text_pair": None,
    }
    with pytest.raises(CodecError, match="no text|no column text") as caught:
        DataFile(write(tmp_path, suffix, ROWS)).columns_by_role()
    assert ": id, body, asks, kind; --text-column " in caught.value.hint
    assert "DataFile(path, text=NAME)" in caught.value.hint


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_label_column_is_answered_with_those_there_are(suffix: str, tmp_path: Path) -> None:
    """`airline_sentiment,text` is read as text alone, and whoever needs labels says which columns there are."""
    path = write(tmp_path, suffix, [{"mood": "good", "text": SECRET}])
    error = no_labels_error(path, summarise(path))
    assert error.message.startswith(f"mine{suffix} has no labels")
    assert ": mood, text; --label-column " in error.hint
    assert summarise(DataFile(path, label="mood")).labels == ("good",)


@pytest.mark.parametrize(
    ("value", "label"), [("billing", "billing"), (3, "3"), (3.0, "3"), (True, "true"), (" a ", "a"), (0, "0")]
)
def test_labels(value: Any, label: str, tmp_path: Path) -> None:
    path = write(tmp_path, ".parquet", [{"t": "x", "l": value}])
    assert [one.label for one in read_examples(DataFile(path, "t", "l"))] == [label]


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"t": SECRET, "l": float("inf")}, CodecError, "a l that"),
        ({"t": SECRET, "l": None}, EmptyText, "empty l"),
        ({"t": SECRET, "l": float("nan")}, EmptyText, "empty l"),
        ({"t": None, "l": SECRET}, EmptyText, "empty t"),
        ({"t": float("nan"), "l": SECRET}, EmptyText, "empty t"),
        ({"t": SECRET, "l": [SECRET]}, CodecError, "a l that"),
        ({"t": SECRET, "l": " "}, EmptyText, "empty l"),
        ({"t": " ", "l": SECRET}, EmptyText, "empty t"),
        ({"t": 7, "l": SECRET}, CodecError, "a t that .*string"),
        ({"l": SECRET}, EmptyText, "no t"),
        ({"t": SECRET}, EmptyText, "no l"),
    ],
)
def test_rows_that_cannot_be(row: dict[str, Any], error: type[CodecError], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, ".jsonl", [{"t": "fine", "l": "a"}, row])
    rows = read_examples(DataFile(path, "t", "l"))
    assert next(rows).text == "fine"
    with pytest.raises(error, match=rf"line 2 of mine\.jsonl .*{message}\b") as caught:
        next(rows)
    assert type(caught.value) is error
    assert SECRET not in str(caught.value)


def test_alpacas_own_file(tmp_path: Path) -> None:
    """One JSON list, pretty or on one line, read as JSON Lines are; a fault names the entry."""
    rows = [{"instruction": "Sum up.", "input": "A text.", "output": "Sum."}] * 3
    for indent in (None, 2):
        path = tmp_path / "alpaca_data.json"
        path.write_text(json.dumps(rows, indent=indent), "utf-8-sig")
        lined = write(tmp_path, ".jsonl", rows)
        assert [one.messages for one in read_examples(path)] == [one.messages for one in read_examples(lined)]
    path.write_text(json.dumps([*rows, {**rows[0], "output": ""}]), "utf-8")
    with pytest.raises(EmptyText, match=r"entry 4 of alpaca_data\.json .*output"):
        summarise(path)
    path.write_text(json.dumps(["zanzibar"]), "utf-8")
    with pytest.raises(CodecError, match=r"entry 1 of alpaca_data\.json .*JSON object"):
        summarise(path)


def test_lines_of_text(tmp_path: Path) -> None:
    """WikiText begins with a byte order mark and a blank line: neither is a text, and blank lines are counted."""
    path = tmp_path / "valid.txt"
    path.write_text("\n = Robert = \n\nhe said\x85so\n \nlast", "utf-8-sig")
    assert [(one.line, one.text) for one in read_examples(path)] == [
        (2, " = Robert = "),
        (4, "he said\x85so"),
        (6, "last"),
    ]
    assert (summarise(path).row_count, summarise(path).blank_count, summarise(path).task) == (3, 3, "causal-lm")
    with pytest.raises(UsageError, match=r"valid\.txt .*columns"):
        summarise(DataFile(path, "text"))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv"])
def test_blank_lines_are_skipped_and_counted(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path, suffix, [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    content = path.read_text("utf-8").splitlines()
    path.write_text("\n\n".join(content) + "\n\n\n", "utf-8-sig")
    found = summarise(path)
    assert (found.row_count, found.blank_count) == (2, len(content) + 1)


def test_a_headless_file_does_not_show_its_first_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"my {SECRET} left,0\n", "utf-8")
    for columns in (DataFile(path, "body"), DataFile(path)):
        with pytest.raises(CodecError) as caught:
            list(read_examples(columns))
        assert SECRET not in str(caught.value)
        assert "2 cells" in caught.value.hint


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "mine.docx").write_text("a\n")
    with pytest.raises(UsageError, match=r"mine\.docx"):
        summarise(tmp_path / "mine.docx")
    with pytest.raises(UsageError, match=r"no file .*other\.csv"):
        summarise(tmp_path / "other.csv")
    with pytest.raises(UsageError, match=f"{tmp_path} is a folder"):
        summarise(tmp_path)
    (tmp_path / "mine.parquet").write_text(SECRET)
    with pytest.raises(CodecError, match=r"mine\.parquet .*Parquet") as caught:
        summarise(tmp_path / "mine.parquet")
    assert SECRET not in str(caught.value)
    whole = write(tmp_path, ".parquet", [{"text": SECRET, "label": "a"}] * 50).read_bytes()
    damaged = tmp_path / "damaged.parquet"
    for place in range(4, len(whole) - 8, 16):
        damaged.write_bytes(whole[:place] + b"\xff" * 16 + whole[place + 16 :])
        try:
            summarise(damaged)
        except CodecError as error:  # and no error of Arrow, which names no file
            assert "damaged.parquet" in error.message and SECRET not in str(error)
    with pytest.raises(UsageError, match=r"mine\.jsonl .*delimiters"):
        summarise(DataFile(write(tmp_path, ".jsonl", ROWS), "body", delimiter=";"))


def test_texts_alone_do_not_look_at_labels(tmp_path: Path) -> None:
    path = write(tmp_path, ".csv", [{"text": "a", "label": ""}, {"text": "b", "label": "7"}])
    assert [(str(one.place(path)), one.text, one.label) for one in read_texts(path)] == [
        ("line 2 of mine.csv", "a", None), ("line 3 of mine.csv", "b", None),
    ]  # fmt: skip
    with pytest.raises(EmptyText, match=r"line 2 of mine\.csv .*label"):
        summarise(path)


def test_columns_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the column t was given twice"):
        DataFile(tmp_path / "a.csv", "t", "t")
    path = write(tmp_path, ".jsonl", ROWS)
    with pytest.raises(CodecError, match="asks .*label") as caught:
        summarise(DataFile(path, "body", pair="asks"))
    assert "--label-column" in caught.value.hint


# --- cells that hold nothing, and numbers as labels: one rule for all kinds -------------------------------------------
def cell_of(suffix: str, value: Any) -> Any:
    """A value as pandas writes it to such a file."""
    if suffix in (".csv", ".tsv"):
        return "" if value is None or value != value else str(value)
    return value


def as_written(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    if suffix == ".parquet":
        labels = [row["label"] for row in rows]
        truths = all(isinstance(one, bool) for one in labels)
        numbers = all(one is None or isinstance(one, float) for one in labels)
        kind = pa.bool_() if truths else pa.float64() if numbers else pa.string()
        columns = {
            "text": pa.array([row["text"] for row in rows], pa.string(), from_pandas=True),
            "label": pa.array(labels, kind, from_pandas=False),
        }
        pq.write_table(pa.table(columns), folder / "mine.parquet")
        return folder / "mine.parquet"
    return write(folder, suffix, [{name: cell_of(suffix, one) for name, one in row.items()} for row in rows])


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("column", ["text", "label"])
@pytest.mark.parametrize("nothing", [None, float("nan"), " "])
def test_a_cell_that_holds_nothing_is_refused_or_left_out(
    nothing: Any, column: str, suffix: str, tmp_path: Path
) -> None:
    rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(6)]
    if suffix == ".parquet" and isinstance(nothing, float):
        nothing = None  # a column of texts has no NaN there
    rows[3] = {**rows[3], column: nothing}
    path = as_written(tmp_path, suffix, rows)
    with pytest.raises(EmptyText, match=f"empty {column}") as caught:
        summarise(path)
    assert " 5 of" in caught.value.message if suffix in (".csv", ".tsv") else " 4 of" in caught.value.message
    assert "--skip-empty" in caught.value.hint
    found = summarise(DataFile(path, skip_empty=True))
    assert (found.row_count, found.empty_count, found.labels) == (5, 1, ("a", "b"))
    assert [one.text for one in read_examples(DataFile(path, skip_empty=True))] == [
        row["text"] for n, row in enumerate(rows) if n != 3
    ]
    if column == "text":
        skipped = list[int]()
        assert len(list(read_texts(DataFile(path, skip_empty=True), on_empty=skipped.append))) == 5
        assert skipped == [1]
        with pytest.raises(EmptyText, match="empty text"):
            list(read_texts(path))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_words_for_nothing_stay_text(suffix: str, tmp_path: Path) -> None:
    words = ["NaN", "nan", "None", "null", "N/A"]
    path = as_written(tmp_path, suffix, [{"text": word, "label": word} for word in words])
    assert [(one.text, one.label) for one in read_examples(path)] == [(word, word) for word in words]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_whole_numbers_written_as_floats_are_whole_numbers(suffix: str, tmp_path: Path) -> None:
    labels = [1.0, 0.0, 2.0, -1.0, 10.0]
    path = as_written(tmp_path, suffix, [{"text": "x", "label": one} for one in labels])
    assert [one.label for one in read_examples(path)] == ["1", "0", "2", "-1", "10"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("cells", "read"),
    [
        ([True, False], ["true", "false"]), (["True", "FALSE"], ["true", "false"]), (["True", "b"], ["true", "b"]),
        (["b", 1.0], ["b", "1.0"]), (["b", 1], ["b", "1"]), ([True, 1.0], ["true", "1.0"]),
    ],
)  # fmt: skip
def test_a_label_has_one_name_in_every_kind_of_file(suffix: str, cells: Any, read: list[str], tmp_path: Path) -> None:
    """Tables as programs write them; a column of Parquet has one type."""
    if suffix == ".parquet" and len({type(one) for one in cells}) > 1:
        cells = [str(one) for one in cells]
    path = as_written(tmp_path, suffix, [{"text": "x", "label": one} for one in cells])
    assert [one.label for one in read_examples(path)] == read


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("nothing", [None, float("nan")])
def test_a_gap_among_numbers_is_a_missing_label(nothing: Any, suffix: str, tmp_path: Path) -> None:
    path = as_written(tmp_path, suffix, [{"text": "x", "label": one} for one in (1.0, nothing, 0.0)])
    with pytest.raises(EmptyText, match="empty label"):
        summarise(path)
    found = summarise(DataFile(path, skip_empty=True))
    assert (found.labels, found.row_count, found.empty_count) == (("0", "1"), 2, 1)
    scored = summarise(DataFile(path, skip_empty=True), are_scores=True)
    assert (scored.row_count, scored.empty_count) == (2, 1)
    with pytest.raises(EmptyText, match="empty label"):
        summarise(path, are_scores=True)


@pytest.mark.parametrize(
    ("cells", "read"),
    [
        (["1.0", "0", "2."], ["1", "0", "2"]),  # some written as floats, some not
        (["1.0", "1.1", "2.0"], ["1.0", "1.1", "2.0"]),  # read as they are; as classes refused, see below
        (["1.0", "none of it"], ["1.0", "none of it"]),
        (["1.000e+00", "0.000e+00"], ["1", "0"]),  # as numpy.savetxt writes them
        (["12e4", "1"], ["12e4", "1"]),
        (["007", "1.0"], ["007", "1"]),
        (["1.0e300", "1.0"], ["1.0e300", "1.0"]),  # a float of that size names no whole number
    ],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_texts_that_are_numbers(suffix: str, cells: list[str], read: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, suffix, [{"text": "x", "label": one} for one in cells])
    assert [one.label for one in read_examples(path)] == read


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_words_for_nothing_among_numbers_are_missing_labels(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path, suffix, [{"text": "x", "label": one} for one in ("1.0", "nan", "0.0")])
    with pytest.raises(EmptyText, match="empty label"):
        summarise(path)
    assert summarise(DataFile(path, skip_empty=True)).labels == ("0", "1")
    assert summarise(DataFile(path, skip_empty=True), are_scores=True).row_count == 2


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("cells", [[0.0, 0.5, 1.0, 0.5], ["0.0", "1e-1", "nan", ".5"], [0.25, 0.5, 0.75, 2.5]])
def test_labels_with_a_fraction_are_no_classes(suffix: str, cells: list[Any], tmp_path: Path) -> None:
    path = as_written(tmp_path, suffix, [{"text": "x", "label": one} for one in cells])
    file = DataFile(path, skip_empty=True)
    with pytest.raises(CodecError, match="column label of mine") as caught:
        checked_summary(file, None)
    assert "--task regression" in caught.value.hint
    with pytest.raises(CodecError, match="column label of mine"):
        labels_of([file])
    assert checked_summary(file, "regression").scale is not None
    assert checked_summary(file, "classification").row_count == len(cells) - cells.count(
        "nan"
    )  # names, such as versions


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_column_that_is_there_twice_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 3, ["text", "label", "text"]), path)
    else:
        path.write_text(",".join(["text", "label", "text"]).replace(",", "\t" if suffix == ".tsv" else ",") + "\n")
    for source in (DataFile(path), DataFile(path, label="label")):
        with pytest.raises(CodecError, match=r"text twice.*\b1\b.*\b3\b"):
            summarise(source)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_key_that_is_there_twice_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine{suffix}"
    row = '{"text": "a", "label": "b", "text": "c"}'
    path.write_text(row if suffix == ".jsonl" else f"[{row}]")
    with pytest.raises(CodecError, match="text twice"):
        summarise(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_row_that_lacks_a_column_of_the_others(suffix: str, tmp_path: Path) -> None:
    rows = [{"label": "a", "text": "x"}, {"text": "y"}, {"label": "b"}, {"text": "z", "label": "b"}]
    path = write(tmp_path, suffix, rows)
    with pytest.raises(EmptyText, match="no label") as caught:
        summarise(path)
    assert ": text)" in caught.value.hint and "--skip-empty" in caught.value.hint
    assert [one.text for one in read_examples(DataFile(path, skip_empty=True))] == ["x", "z"]


def test_nothing_is_left_by_skipping(tmp_path: Path) -> None:
    path = write(tmp_path, ".csv", [{"text": "", "label": "a"}] * 2)
    with pytest.raises(EmptyText, match="--skip-empty .*: line 3 of mine"):
        summarise(DataFile(path, skip_empty=True))


def test_ids_of_a_column_with_gaps(tmp_path: Path) -> None:
    path = write(tmp_path, ".parquet", [{"id": 7.0, "text": "a"}, {"id": None, "text": "b"}])
    assert [one.row_id for one in read_texts(path)] == ["7", ""]


@pytest.mark.parametrize("nothing", [None, float("nan"), ""])
def test_an_instruction_without_input(nothing: Any, tmp_path: Path) -> None:
    row = {"instruction": "Say hi.", "input": nothing, "output": "Hi."}
    (one,) = read_examples(write(tmp_path, ".jsonl", [row]))
    assert one.messages[0]["content"] == "Say hi."


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("words,kind\na b,c\n", "utf-8")
    by_name = DataFile(str(tmp_path / "rows.csv"), text="words", label="kind")  # type: ignore[arg-type]
    by_name.require()
    assert by_name == DataFile(tmp_path / "rows.csv", text="words", label="kind") and by_name.name == "rows.csv"
