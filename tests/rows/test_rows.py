"""Encodings, delimiters and places: what a message may say of a file, and what it must not guess."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from milkglass.errors import CodecError, UsageError
from milkglass.rows.encoding import numbered_lines
from milkglass.rows.place import Place, columns_hint, places_text
from milkglass.rows.tables import delimiter_of, parse_delimiter

KNOWN = ("text", "label")


@pytest.mark.parametrize(
    ("encoding", "text", "likely", "name"),
    [
        ("latin-1", "fine\ngr\u00fcn\n", r"line 2 .*\(ISO-8859-1\)", "ISO-8859-1"),
        ("cp1252", "fine\nfine\n\u201cgr\u00fcn\u201d \u2013 5 \u20ac\n", "line 3 .*Windows-1252", "WINDOWS-1252"),
        ("cp1252", "fine\ngr\u00fcn\nfine\n5 \u20ac\n", "line 2 .*Windows-1252", "WINDOWS-1252"),
        ("utf-16", "gr\u00fcn\n", "UTF-16", "UTF-16"),
    ],
)
def test_the_likely_encoding_is_named_and_iconv_converts(
    encoding: str, text: str, likely: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "my data.txt"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(CodecError) as caught:
        list(numbered_lines(path))
    assert re.match(rf"my data\.txt .*{likely}", caught.value.message)
    command = caught.value.hint.partition("convert it: ")[2]
    assert command.startswith(f"iconv -f {name} ")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert [line for _, line in numbered_lines(tmp_path / "my data.utf8.txt")] == text.splitlines()


def test_a_file_that_is_not_text_is_not_called_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"PK\x03\x04\x14\0\x06\xff\xfe\n")
    with pytest.raises(CodecError, match=r"a\.txt .*text file"):
        list(numbered_lines(path))


@pytest.mark.parametrize(
    ("name", "content", "delimiter"),
    [
        ("a.csv", "text,label\na;b,1\n", ","),
        ("a.csv", "text;label\na, b;1\nc, d;2\n", ";"),
        ("a.csv", "body;kind\na, b;1\nc;2\n", ";"),
        ("a.csv", "text;label\na;b;1\nc;2\n", ";"),  # a broken row: the header decides, and the row is reported
        ("a.csv", "text,label\na\n", ","),
        ("a.csv", "text\na, b\n", ","),
        ("a.csv", 'text|label\n"a|b\nc"|1\n', "|"),
        ("a.csv", "text\tlabel\na\t1\n", "\t"),
        ("a.tsv", 'text\tlabel\n"a\t1\n', "\t"),
        ("a.tsv", "text;label\na;1\n", ";"),
        ("a.tsv", "text\tlabel\na;b\tc;d\n", "\t"),
        ("a.csv", "\ufefftext;label\n\na;1\n", ";"),
        ("a.csv", "", ","),
        ("a.csv", "sep=;\r\ntext;label\r\na, b;1, 2\r\n", ";"),
        ("a.csv", "\ufeffSEP=|\ntext,x|label\na,b|1\n", "|"),
        ("a.tsv", "sep=;\ntext;label\na;1\n", ";"),
        ("a.csv", "sep=;x\ntext,label\n", ","),
    ],
)
def test_the_delimiter_by_the_first_rows(name: str, content: str, delimiter: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, "utf-8")
    assert delimiter_of(tmp_path / name, KNOWN) == delimiter


def test_half_a_row_at_the_end_of_what_is_looked_at_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("body;kind\n" + f"{'x' * 20_000};1\n" * 9, "utf-8")
    assert delimiter_of(path, KNOWN) == ";"


def test_delimiters_by_name() -> None:
    assert [parse_delimiter(one) for one in ("tab", "\\t", "\t", "semicolon", ";", "pipe", "|", "comma")] == [
        "\t", "\t", "\t", ";", ";", "|", "|", ",",
    ]  # fmt: skip
    for bad in ("", "ab", '"', "x", "\n", "3"):
        with pytest.raises(UsageError, match=f"{re.escape(repr(bad))} .*one sign"):
            parse_delimiter(bad)


def test_places_are_listed() -> None:
    places = [Place("a.jsonl", number) for number in (3, 7, 9, 11, 12)]
    assert places_text(places[:1]) == "line 3"
    assert places_text(places[:2]) == "lines 3 and 7"
    assert places_text(places[:3]) == "lines 3, 7 and 9"
    assert places_text(places) == "lines 3, 7, 9 and 2 more"
    assert places_text([Place("a.json", 1, "entry"), Place("a.json", 2, "entry")]) == "entries 1 and 2"


def test_columns_that_there_are_and_what_a_wrong_delimiter_leaves() -> None:
    assert columns_hint(["instruction"]).endswith(": instruction")
    assert "--delimiter" in columns_hint(["ticket;customer said;mood"])
    assert "2 cells" in columns_hint(["the wound", "is open again"])


@pytest.mark.parametrize(
    ("header", "known"),
    [(["ticket", "customer said", "mood"], ("mood",)),  # a column that the user named
     (["ticket", "customer said", "label"], ()),  # one that is always looked for
     (["ticket", "Customer Said", "mood"], ("customer_said",))],
)  # fmt: skip
def test_a_header_is_shown_whole_once_a_cell_is_a_column_that_is_looked_for(
    header: list[str], known: tuple[str, ...]
) -> None:
    assert columns_hint(header, known).endswith(f": {', '.join(header)}")


def test_a_first_line_that_may_be_a_row_of_text_shows_single_words_alone() -> None:
    hint = columns_hint(["4711", "my arm hurts", "urgent"], ("body", "_"))
    assert ": urgent and 2 more; if the first line is text" in hint and "arm" not in hint


def test_a_name_in_a_message_is_printable_and_bounded() -> None:
    assert columns_hint(["label", "a\x1b[2J b", "c " * 99]).split(", ")[1:] == ["a\ufffd[2J b", "c " * 32 + "..."]
