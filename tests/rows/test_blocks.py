"""Rows in blocks, as sanitizers read them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.rows.blocks import blocks_of, require_rows, row_format_of


def test_blocks_depend_on_the_file_alone(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("apple banana cherry date elder fig.\n" * 1300)
    blocks = list(blocks_of(source, row_format_of(source)))
    assert [len(one.raw_rows) for one in blocks] == [512, 512, 276] and blocks[1].lines[0] == 513
    source.write_text(("x" * 200_000 + "\n") * 3)
    assert [len(one.raw_rows) for one in blocks_of(source, row_format_of(source))] == [2, 1]
    with pytest.raises(EmptyText):
        source.write_text("")
        list(blocks_of(source, row_format_of(source)))


def test_a_kept_conversation_stays_and_roles_need_conversations(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    chat = {"messages": [{"role": "user", "content": "a private name"}], "text": "b"}
    source.write_text(json.dumps(chat) + "\n", "utf-8")
    (block,) = blocks_of(source, row_format_of(source))
    assert len(row_format_of(source).parse(block)[1]) == 2
    kept = row_format_of(source, kept_names=frozenset({"messages"}))
    rows, slots, unchanged = kept.parse(block)
    assert rows == [chat] and [key for _, key in slots] == ["text"] and unchanged == {"messages"}
    require_rows(source, replace(row_format_of(source), roles=frozenset({"user"})))
    source.write_text('{"text": "b"}\n', "utf-8")
    with pytest.raises(CodecError, match="has messages"):
        require_rows(source, replace(row_format_of(source), roles=frozenset({"user"})))


@pytest.mark.parametrize("option", ["extra_names", "kept_names"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", '{"text": "a b", "noté": "private"}\n{"text": "c", "note": "d"}\n'),
        ("t.csv", "text,note\na b,private\n"),
        ("t.txt", "a b\n"),
    ],
)
def test_a_misspelt_column_is_refused_before_its_text_stays_in_the_clear(
    tmp_path: Path, name: str, content: str, option: str
) -> None:
    source = tmp_path / name
    source.write_text(content, "utf-8")
    words = "without columns" if name == "t.txt" else "nonte"
    with pytest.raises((CodecError, UsageError), match=words):
        row_format_of(source, **{option: frozenset({"nonte"})})
    if name == "t.jsonl":
        assert row_format_of(source, **{option: frozenset({"note", "noté"})})


def test_a_name_that_only_a_text_has_is_no_field(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "the \\"nonte\\" is", "note": "nonte"}\n')
    with pytest.raises(CodecError, match="'nonte'"):
        row_format_of(source, frozenset({"nonte"}))


def test_a_carriage_return_is_quoted_in_csv_and_text_in_tsv(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b'text,label\n"a\rb",x\n')
    (tmp_path / "in.tsv").write_bytes(b"text\tlabel\na\rb\tx\n")
    for name, written in (("in.csv", '"a\rb","x"\n'), ("in.tsv", "a\rb\tx\n")):
        shape = row_format_of(tmp_path / name)
        [block] = blocks_of(tmp_path / name, shape)
        rows, [(row, place)], _ = shape.parse(block)
        assert row[place] == "a\rb" and shape.write(rows) == written


@pytest.mark.parametrize("suffix", [".tsv", ".jsonl"])
def test_a_second_field_of_texts_is_not_left_in_the_clear_without_a_word(suffix: str, tmp_path: Path) -> None:
    """Of pairs under unusual names one half would cross; labels of several words and short notes are no texts."""
    source = tmp_path / f"claims{suffix}"
    rows = [
        {
            "premise": f"Ada said {n}",
            "claim": f"it was Ada who said number {n}",
            "verdict": "this does not follow at all",
        }
        for n in range(9)
    ]
    lines = (
        [*map(json.dumps, rows)]
        if suffix == ".jsonl"
        else ["\t".join(part) for part in (rows[0], *map(dict.values, rows))]
    )
    source.write_text("\n".join(lines) + "\n", "utf-8")
    with pytest.raises(UsageError, match="texts in claim too") as error:
        require_rows(source, row_format_of(source))
    assert error.value.hint is not None and "--text-column claim" in error.value.hint
    require_rows(source, row_format_of(source, extra_names=frozenset({"claim"})))
    require_rows(source, row_format_of(source, kept_names=frozenset({"claim"})))
