"""`milkglass data` as the first step: what it writes is read by every other command without options of columns."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from milkglass.cli.ui import terminal
from milkglass.cli.ui.columns import ColumnOptions
from milkglass.cli.ui.text_input import texts_to_classify
from milkglass.compare.rows import ComparisonRows
from milkglass.errors import CodecError
from milkglass.rows.blocks import require_rows, row_format_of
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import Summary, read_examples, summarise
from tests.cli.kit import SECRET, Owner, call, refused

TEXTS = [f"the nurse called about the results on monday, {n}" for n in range(100)]
TOPICS = ["billing", "urgent"]


def excel(path: Path) -> None:
    """As Excel writes it: a mark, semicolons, a header with a blank in a name."""
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["Ticket No", "Question", "Topic"])
        writer.writerows([n, text, TOPICS[n % 2]] for n, text in enumerate(TEXTS, 4711))


def pairs(path: Path) -> None:
    lines = [f"{n}\thow much?\t{text}\t{TOPICS[n % 2]}" for n, text in enumerate(TEXTS)]
    path.write_text("\n".join(["No\tAsked\tFound\tSame", *lines]) + "\n", "utf-8")


def listed(path: Path) -> None:
    rows = [{"Nr": n, "Question": text, "Topic": TOPICS[n % 2]} for n, text in enumerate(TEXTS)]
    path.write_text(json.dumps(rows, indent=1), "utf-8")


def instructions(path: Path) -> None:
    rows = [{"instruction": "which desk?", "input": text, "output": TOPICS[n % 2]} for n, text in enumerate(TEXTS)]
    path.write_text(json.dumps(rows), "utf-8")


def chats(path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "the desk"}]}
        for text in TEXTS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def summaries(path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [["id", "dialogue", "summary"], *([n, one, "a call"] for n, one in enumerate(TEXTS))]
        )


Write = Callable[[Path], None]
OF_TEXTS = ("--text-column", "Question", "--label-column", "Topic")
LABELLED: list[tuple[str, Write, Sequence[str], bool]] = [
    ("mine.csv", excel, OF_TEXTS, False),
    ("mine.json", listed, OF_TEXTS, False),
    ("mine.tsv", pairs, ("--text-column", "Asked", "--pair-column", "Found", "--label-column", "Same"), True),
]
CHATS: list[tuple[str, Write]] = [("a.json", instructions), ("a.jsonl", chats), ("a.csv", summaries)]


def clean(tmp_path: Path, name: str, write: Write, options: Sequence[str]) -> Path:
    source, out = tmp_path / name, tmp_path / "rows.jsonl"
    write(source)
    done = call("data", source, *options, "--out", out)
    assert done.exit_code == 0, done.stderr
    return out


@pytest.mark.parametrize(("name", "write", "options", "paired"), LABELLED)
def test_rows_with_labels_are_read_by_all(
    name: str, write: Write, options: Sequence[str], paired: bool, tmp_path: Path, encoder: Owner
) -> None:
    rows = clean(tmp_path, name, write, options)
    none = ColumnOptions()
    of_training: Summary = none.read_training(rows)[1]
    assert (of_training.row_count, of_training.has_pairs, of_training.label_counts) == (100, paired, (50, 50))
    own = ComparisonRows.read(DataFile(rows), None, seed=0)
    assert len(own.train.texts) + len(own.held_out.texts) == 100 and (own.train.pairs is not None) is paired
    assert summarise(none.read_texts(rows)).row_count == 100
    asked = texts_to_classify(None, rows, none)
    assert len(asked) == 100 and (asked[7].pair is not None) is paired
    assert (asked[7].pair if paired else asked[7].text) == TEXTS[7]
    shape = row_format_of(rows)
    require_rows(rows, shape)
    assert {"text"} | ({"text_pair"} if paired else set()) <= shape.text_fields
    for more in (("--out", tmp_path / "rows.parquet"), ("--out", tmp_path / "ids.jsonl")):
        encoded = call("encode", "--in", rows, "--key", encoder.path, *more)
        assert encoded.exit_code == 0, encoded.stderr


@pytest.mark.parametrize(("name", "write"), CHATS)
def test_conversations_are_read_by_all_that_take_them(name: str, write: Write, tmp_path: Path, decoder: Owner) -> None:
    rows = clean(tmp_path, name, write, ())
    none = ColumnOptions()
    assert none.read_training(rows)[1].task == "causal-lm"
    assert summarise(none.read_texts(rows)).row_count == 100
    require_rows(rows, row_format_of(rows))
    done = call("encode", "--in", rows, "--key", decoder.path, "--out", tmp_path / "rows.parquet")
    assert done.exit_code == 0, done.stderr


def test_a_summary_answers_what_asks_for_one(tmp_path: Path) -> None:
    rows = clean(tmp_path, "a.csv", summaries, ())
    first = json.loads(rows.read_text("utf-8").splitlines()[0])["messages"]
    assert first == [
        {"role": "user", "content": f"Summarize the following dialogue.\n\n{TEXTS[0]}"},
        {"role": "assistant", "content": "a call"},
    ]


def test_what_was_read_is_said_and_what_comes_next(tmp_path: Path) -> None:
    source, out = tmp_path / "mine.csv", tmp_path / "rows.jsonl"
    excel(source)
    done = call("data", source, *OF_TEXTS, "--out", out)
    assert done.stdout == f"100 rows in {out}; text from Question, label from Topic; not read: Ticket No\n"
    no_names, *lines = done.stderr.splitlines()
    assert no_names.startswith("warning: 0 of 100 texts have a word that is taken for a name")
    assert lines == [
        "2 classes: billing 50, urgent 50",
        "warning: `milkglass compare` tests with 40 of these rows: of two ways of using a model, it may not see which "
        "is better unless they differ by some 21 points. Four times as many rows halve that",
        f"next: milkglass compare demo:minilm {out} --quick",
    ]
    many = tmp_path / "many.csv"
    with many.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *((f"text {i} of Many", str(i % 2)) for i in range(900))])
    assert "warning" not in call("data", many, "--out", tmp_path / "many.jsonl").stderr


def test_what_a_spreadsheet_writes_otherwise_is_said(tmp_path: Path) -> None:
    """A decimal comma makes classes of scores, and quotation marks belong to the text in a TSV."""
    scores = tmp_path / "scores.csv"
    scores.write_text("Comment;Score\n" + "".join(f"it is fine {i};{i % 5},5\n" for i in range(100)), "utf-8")
    found = call("data", scores, "--text-column", "Comment", "--label-column", "Score", "--out", tmp_path / "s.jsonl")
    assert "decimal comma" in found.stderr
    quoted = tmp_path / "quoted.tsv"
    lines = (f'"he said ""no"" {i}"\t{"ab"[i % 2]}\n' for i in range(100))
    quoted.write_text("text\tlabel\n" + "".join(lines), "utf-8")
    assert (
        "100 of 100 texts begin and end with quotation marks"
        in call("data", quoted, "--out", tmp_path / "q.jsonl").stderr
    )


@pytest.mark.parametrize(
    ("mark", "is_said"),
    [
        ("Israel #39;s rule", True), ("R&amp;D", True), ("&lt;b&gt;", True), ("quot;so quot;", True),
        ("#39 is her number; so", False), ("salt & pepper", False),
    ],
)  # fmt: skip
def test_texts_with_html_escapes_are_pointed_out(mark: str, is_said: bool, tmp_path: Path) -> None:
    """Their pieces count as words and numbers, of which each would be read."""
    source = tmp_path / "mine.csv"
    with source.open("w", newline="", encoding="utf-8") as file:
        rows = ((f"{mark if i < 30 else 'a rule'} and case {i}", str(i % 2)) for i in range(900))
        csv.writer(file).writerows([("text", "label"), *rows])
    said = call("data", source, "--out", tmp_path / "rows.jsonl").stderr
    assert ("30 of 900 texts have characters that are escaped as in HTML" in said) == is_said


def test_html_escapes_are_replaced_on_request(tmp_path: Path) -> None:
    """The texts, the second texts and the messages; a label stays as it is."""
    source = tmp_path / "mine.csv"
    with source.open("w", newline="", encoding="utf-8") as file:
        pairs = (
            ("Israel #39;s R&amp;D &lt;b&gt;", "quot;so&quot; &amp;amp; 5&nbsp;km", "a&amp;b"),
            ("salt & pepper #39 &unknown;", "plain", "c"),
        )
        csv.writer(file).writerows([("text", "text_pair", "label"), *pairs])
    out = tmp_path / "rows.jsonl"
    assert call("data", source, "--out", out, "--unescape").exit_code == 0
    assert [json.loads(line) for line in out.read_text("utf-8").splitlines()] == [
        {"text": "Israel 's R&D <b>", "text_pair": '"so" &amp; 5 km', "label": "a&amp;b"},
        {"text": "salt & pepper #39 &unknown;", "text_pair": "plain", "label": "c"},
    ]
    chats = tmp_path / "chats.jsonl"
    message = {"role": "user", "content": "R&amp;D?"}
    chats.write_text(json.dumps({"messages": [message, {"role": "assistant", "content": "&quot;Yes&quot;"}]}) + "\n")
    assert call("data", chats, "--out", tmp_path / "c.jsonl", "--unescape").exit_code == 0
    row = json.loads((tmp_path / "c.jsonl").read_text("utf-8"))
    assert [message["content"] for message in row["messages"]] == ["R&D?", '"Yes"']
    refused(call("data", "mrpc", "--from", tmp_path, "--out", tmp_path / "m.jsonl", "--unescape"), 2, "--unescape")


@pytest.mark.parametrize("form", ["lines", "list"])
def test_half_a_character_is_named_with_its_line(form: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    lines = ['{"text": "we see it", "label": "a"}', '{"text": "cut \\ud83d", "label": "b"}']
    path.write_text("\n".join(lines) if form == "lines" else f"[{','.join(lines)}]", "utf-8")
    refused(call("data", path, "--out", tmp_path / "out.jsonl"), 5, "2 of cut.jsonl has half of a character")
    whole = tmp_path / "whole.jsonl"
    whole.write_text("\n".join(lines).replace("\\ud83d", "\\ud83d\\ude00"), "utf-8")
    assert call("data", whole, "--out", tmp_path / "out.jsonl").exit_code == 0


def test_pairs_without_labels_can_be_asked_about(tmp_path: Path) -> None:
    source, out = tmp_path / "new.tsv", tmp_path / "new.jsonl"
    source.write_text("premise\thypothesis\nit rains\tit is wet\n", "utf-8")
    done = call("data", source, "--out", out)
    assert done.stdout.endswith("; text from premise, text_pair from hypothesis; no labels (--label-column)\n")
    (row,) = texts_to_classify(None, out, ColumnOptions())
    assert (row.text, row.pair) == ("it rains", "it is wet")


@pytest.mark.parametrize(
    ("header", "taken"),
    [
        ("index\tquestion\tsentence\tlabel", ("question", "sentence")),  # GLUE's QNLI
        ("idx\tsentence1\tsentence2\tlabel", ("sentence1", "sentence2")),
        ("id\tpremise\thypothesis\tlabel", ("premise", "hypothesis")),
        ("id\tquestion1\tquestion2\tlabel", ("question1", "question2")),
        ("id\tsentence\tlabel\tnote", ("sentence", None)),
    ],
)
def test_columns_of_pairs_are_known_by_their_names(header: str, taken: tuple[str, str | None], tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text(f"{header}\n1\ta\tb\tc\n", "utf-8")
    found = DataFile(path).columns_by_role()
    assert (found["text"], found["text_pair"]) == taken


def test_a_column_that_is_named_is_the_only_text(tmp_path: Path) -> None:
    path = tmp_path / "qnli.tsv"
    path.write_text("index\tquestion\tsentence\tlabel\n1\ta\tb\tc\n", "utf-8")
    assert DataFile(path, text="sentence").columns_by_role() == {
        "text": "sentence",
        "label": "label",
        "text_pair": None,
    }
    assert DataFile(path, text="sentence").columns_text().endswith("; not read: index, question")
    assert DataFile(path, label="question").columns_by_role()["text"] == "sentence"


def test_names_of_columns_are_shown_if_they_stand_above_numbers(tmp_path: Path) -> None:
    """A first line may be private text, and is shown only if it is a header; an error may come into a log."""
    path = tmp_path / "mine.csv"
    excel(path)
    refused(call("data", path, "--out", tmp_path / "a.jsonl"), 5, "the columns there are: Ticket No, Question, Topic;")
    refused(call("sanitize", path, tmp_path / "b.csv"), 5, "the columns there are: Ticket No, Question, Topic")
    listed = tmp_path / "rows.json"
    listed.write_text(json.dumps([{"Ticket No": 4, "What was said": "a text", "Desk": "b"}]))
    for options in ((), ("--text-column", "Said"), ("--text-column", "What was said", "--label-column", "Topic")):
        result = call("data", listed, *options, "--out", tmp_path / "c.jsonl")
        refused(result, 5, "the columns there are: Ticket No, What was said, Desk")
        assert "first line" not in result.stderr, "a list of objects has fields"
    texts: list[Any] = [[f"my {SECRET} hurts", "4711", "question"], *(["my arm", str(n), "urgent"] for n in range(30))]
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows(texts)
    said = call("data", path, "--out", tmp_path / "a.jsonl")
    assert said.exit_code == 5 and SECRET not in said.stderr


@pytest.mark.parametrize(
    ("labels", "count", "said"),
    [
        (
            [f"T-{i}" for i in range(89)] + ["T-0"],
            90,
            "does it hold ids, or texts?",
        ),
        (["billing", "urgent"] * 20, 40, "needs 80 different rows at least, and there are 40"),
    ],
)
def test_a_comparison_is_not_recommended_for_rows_that_it_would_refuse(
    labels: list[str], count: int, said: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "tickets.csv", tmp_path / "rows.jsonl"
    source.write_text("text,label\n" + "".join(f"text {i},{label}\n" for i, label in enumerate(labels)))
    result = call("data", source, "--out", out)
    assert result.exit_code == 0 and f"{count} rows" in result.stdout
    assert said in result.stderr and "next:" not in result.stderr
    refused(call("compare", "demo:minilm", out), 5, "rows.jsonl" if "ids" in said else "80")


def test_a_label_of_one_row_among_many_is_pointed_out(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "rows.jsonl"
    lines = [f"the nurse called ward {n},{'late' if n % 2 else 'early'}" for n in range(60)]
    rows.write_text("\n".join(["text,label", *lines, "the doctor called,latte"]) + "\n", "utf-8")
    found = call("data", rows, "--out", out)
    assert "a label occurs in one row only: 'latte'; misspelt?" in found.stderr
    out.unlink()
    rows.write_text("\n".join(["text,label", *lines, *("the doctor called,Late",) * 4]) + "\n", "utf-8")
    assert (
        "differ in capitals, spaces or the encoding of a character alone: " in call("data", rows, "--out", out).stderr
    )
    out.unlink()
    rows.write_text("\n".join(["text,label", *lines]) + "\n", "utf-8")
    assert "misspelt" not in call("data", rows, "--out", out).stderr


def test_the_name_of_a_file_is_not_read_as_a_text(tmp_path: Path, encoder: Owner, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text\nthe nurse called\n", "utf-8")
    refused(call("encode", "rows.csv", "--key", encoder.path), 2, "rows.csv is a file, and its name would be read")
    for text in ("other.csv", "a long text " * 500 + "ends in.txt"):
        assert call("encode", text, "--truncate", "--key", encoder.path).exit_code == 0, "no such file: it is a text"


@pytest.mark.parametrize("command", ["encode", "decode"])
def test_no_file_is_replaced(command: str, tmp_path: Path, encoder: Owner) -> None:
    """Neither the one that is read, nor the key itself."""
    rows, words = tmp_path / "rows.txt", ("the nurse called",) if command == "encode" else ("5",)
    rows.write_text("5\n", "utf-8")
    before = encoder.path.read_bytes()
    for given, out in (((*words,), encoder.path), ((*words,), rows), (("--in", rows), rows)):
        refused(call(command, *given, "--key", encoder.path, "--out", out), 2, "exists already")
    assert encoder.path.read_bytes() == before and rows.read_text("utf-8") == "5\n"


def test_a_spreadsheet_is_named_as_one(tmp_path: Path, encoder: Owner) -> None:
    named, hidden = tmp_path / "rows.xlsx", tmp_path / "rows.csv"
    for path in (named, hidden):
        path.write_bytes(b"PK\x03\x04\x14\0\x06\0" + bytes(range(256)))
    refused(call("classify", "--local", tmp_path, "--in", named), 2, "rows.xlsx is a spreadsheet")
    refused(call("sanitize", named, tmp_path / "out.csv", "--method", "mask"), 2, "rows.xlsx")
    found = call("data", hidden, "--out", tmp_path / "o.jsonl")
    refused(found, 5, "rows.csv is not a text file")
    assert "a spreadsheet?" in found.stderr


def test_a_compressed_file_and_a_ragged_one_are_named_as_what_they_are(tmp_path: Path) -> None:
    packed, tabs, commas = tmp_path / "rows.csv", tmp_path / "rows.tsv", tmp_path / "others.csv"
    packed.write_bytes(gzip.compress(b"text,label\na,b\n"))
    refused(call("data", packed, "--out", tmp_path / "o.jsonl"), 5, "rows.csv is compressed (gzip)")
    tabs.write_text("text\tlabel\na\tb\tc\n")
    found = call("data", tabs, "--out", tmp_path / "o.jsonl")
    refused(found, 5, "has 3 cells, and there are 2 columns")
    assert "a cell cannot hold one here" in found.stderr
    commas.write_text("text,label\na,b,c\n")
    assert "a cell that holds the delimiter needs quotes" in call("data", commas, "--out", tmp_path / "o.jsonl").stderr


def test_what_is_nearly_right_is_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("Kommentar,Urteil\ngut,a\n", "utf-8")
    found = call("data", rows, "--text-column", "Komentar", "--label-column", "Urteil", "--out", tmp_path / "o.jsonl")
    refused(found, 5, "names no column Komentar")
    assert "is it Kommentar?" in found.stderr
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    refused(call("compare", "demo:minilm", tmp_path / "rows.xlsx"), 2, "rows.xlsx is a spreadsheet")
    refused(call("data", tmp_path, "--text-column", "a", "--out", tmp_path / "o.jsonl"), 2, "is a folder")
    for name in ("mine.xlsx", "mine"):
        refused(call("data", name, "--text-column", "a", "--out", tmp_path / "o.jsonl"), 2, f"no file {name}")
    refused(call("data", "sst2", "--text-column", "a", "--out", tmp_path / "o.jsonl"), 2, "columns are known")


def test_a_file_that_is_nearly_there_is_named(tmp_path: Path, encoder: Owner) -> None:
    (tmp_path / "claims.csv").write_text("text,label\na,b\n")
    refused(call("data", tmp_path / "claim.csv", "--out", tmp_path / "o.jsonl"), 2, "did you mean claims.csv?")
    refused(call("compare", "demo:minilm", tmp_path / "claim.csv"), 2, "did you mean claims.csv?")
    refused(call("data", tmp_path / "october.csv", "--out", tmp_path / "o.jsonl"), 2, "there is claims.csv; ")
    refused(call("compare", "demo:minilm", tmp_path / "claims.csv", "--ways", "mask,plan"), 2, "did you mean plain?")
    refused(call("sanitize", tmp_path / "claims.csv", "--method", "maks"), 2, "did you mean mask?")
    refused(call("models", "demo:minlm"), 3, "did you mean demo:minilm?")
    refused(call("key", "status", tmp_path), 4, f"{tmp_path} is a folder, not a key file")


def test_a_row_of_several_lines_is_named_by_its_first(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text('text,label\r\n"one\r\ntwo",a\r\nthree,b\r\n"four\r\nfive",\r\n', "utf-8", newline="")
    numbers = [place.number for place, _ in DataFile(table).rows()]
    assert numbers == [2, 4, 5]


def test_a_terminal_alone_shows_a_first_line_that_may_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person sees what their own file has; a log, JSON and the error itself never do."""
    path = tmp_path / "rows.csv"
    path.write_text("Customer comment,Topic code\nthe wound is open,urgent\n", "utf-8")
    run = ("data", path, "--out", tmp_path / "out.jsonl")
    assert "Customer" not in call(*run).stderr and "Customer" not in call(*run, "--json").stderr
    with pytest.raises(CodecError) as caught:
        list(read_examples(DataFile(path)))
    assert "Customer" not in f"{caught.value} {caught.value!r}"
    monkeypatch.setattr(terminal, "is_stderr_terminal", lambda: True)
    assert "its first line: Customer comment | Topic code" in call(*run).stderr
    path.write_text("id,body\n1,the wound is open\n", "utf-8")
    assert "the columns there are: id, body" in call(*run).stderr and "first line" not in call(*run).stderr


def test_texts_that_do_not_look_english_are_named(tmp_path: Path) -> None:
    """The included models and masking know English alone, which a person cannot see from a verdict."""
    path = tmp_path / "kritiken.jsonl"
    german = "der film war leider viel zu lang und die handlung nicht sehr spannend, nummer"
    rows = [{"text": f"{german} {number}", "label": "gut" if number % 2 else "schlecht"} for number in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert "warning: Texts do not look English" in call("data", path, "--out", tmp_path / "out.jsonl").stderr
    compared = call("compare", "demo:minilm", path, "--quick", "--ways", "commonest", "--out", tmp_path / "c")
    assert "Texts do not look English" in compared.stderr and compared.exit_code == 0
    english = [{"text": f"it is the end of the film and we are not in it {number}"} for number in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in english), "utf-8")
    assert "English" not in call("data", path, "--out", tmp_path / "other.jsonl").stderr


@pytest.mark.parametrize("is_lower", [True, False])
def test_texts_whose_names_cannot_be_seen_are_pointed_out(is_lower: bool, tmp_path: Path) -> None:
    """Names are told by capitals. Without any, no share of names is measured, and the user should know beforehand."""
    source = tmp_path / "rows.jsonl"
    texts = [f"I met Adam Sandler on day {i}" for i in range(40)]
    rows = [{"text": text.lower() if is_lower else text, "label": str(i % 2)} for i, text in enumerate(texts)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    result = call("data", source, "--out", tmp_path / "out.jsonl")
    assert ("warning: 0 of 40 texts have a word that is taken for a name" in result.stderr) == is_lower
    assert "warning: `milkglass compare` needs" in result.stderr


def test_a_column_that_looks_like_a_second_text_is_pointed_out(tmp_path: Path) -> None:
    """Who forgets the claim beside the evidence would compare models that cannot know the answer."""
    source = tmp_path / "claims.csv"
    with source.open("w", newline="", encoding="utf-8") as file:
        texts = [
            (f"the wall of number {n} fell", f"number {n} was never built", "open", n, "ab"[n % 2]) for n in range(90)
        ]
        csv.writer(file).writerows([("evidence", "the claim", "state of it", "id", "verdict"), *texts])
    given = ("--text-column", "evidence", "--label-column", "verdict")
    said = call("data", source, *given, "--out", tmp_path / "a.jsonl").stderr
    assert "the column the claim is not read, and looks like a second text" in said, said
    assert "give --pair-column 'the claim'" in said
    assert DataFile(source, text="evidence", label="verdict", pair="the claim").likely_second_text() is None
    with_pairs = call("data", source, *given, "--pair-column", "the claim", "--out", tmp_path / "b.jsonl").stderr
    assert "second text" not in with_pairs
    assert DataFile(source, text="evidence").likely_second_text() is None, "texts without labels"
    assert DataFile(source, text="the claim", label="state of it").likely_second_text() == "evidence"
