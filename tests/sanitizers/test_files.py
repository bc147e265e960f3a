"""Whole files: every shape, the same result from any number of workers, nothing half written, tables from files."""

from __future__ import annotations

import csv
import json
import re
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.errors import BadTable, CodecError, MilkglassError, UsageError
from milkglass.noise.stream import Stream
from milkglass.rows.blocks import require_rows, row_format_of
from milkglass.sanitizers.catalogue import SANITIZERS
from milkglass.sanitizers.files import count_occurrences, map_blocks, report_path, sanitize_file
from milkglass.sanitizers.santext import SanText
from milkglass.sanitizers.table import read_glove, tokens_of_model, words_of_model
from milkglass.sanitizers.text import WORD_CLASSES, TextSanitizer, WordReader
from tests import tiny
from tests.core.test_walls import SOURCE, imports
from tests.sanitizers import steps
from tests.sanitizers.kit import WORDS, table
from tests.warm import warm_pools

__all__ = ["warm_pools"]

TABLE = table(30, 4)
SECRET = "zanzibar"


def run(
    source: Path, out: Path, seed: int | None = 1, workers: int = 0, method: str = "custext", **fields: Any
) -> dict[str, Any]:
    shape = row_format_of(source, **{name: frozenset(value) for name, value in fields.items()})
    sanitizer = SANITIZERS.make(method, {"k": 5}).text_sanitizer(TABLE)
    return sanitize_file(sanitizer, source, shape, out, seed, {"method": method}, workers)


def lines_file(path: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    path.write_text("".join(" ".join(rng.choice(WORDS, 6)) + ".\n" for _ in range(count)))
    return path


def test_json_lines_keep_their_order_and_their_other_fields(tmp_path: Path) -> None:
    rows = [
        {"text": "apple 17 zanzibar", "label": "zanzibar 3", "n": 1.5, "ok": None},
        {"text": "pear", "text_pair": "grape", "label": 2},
        {"messages": [{"role": "user", "content": "apple zanzibar"}, {"role": "bot", "content": "fig"}], "id": "x"},
        {"instruction": "house", "input": "", "output": "river 12"},
    ]  # fmt: skip
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    report = run(source, out)
    found = [json.loads(line) if line else None for line in out.read_text().splitlines()]
    assert found[4] is None and [list(one) for one in found[:4]] == [list(one) for one in rows]
    assert found[0]["label"] == "zanzibar 3" and found[0]["n"] == 1.5 and found[1]["label"] == 2
    assert found[2]["messages"][0]["role"] == "user" and found[3]["input"] == ""
    texts = [found[0]["text"], found[1]["text"], found[1]["text_pair"], found[3]["instruction"], found[3]["output"]]
    texts += [one["content"] for one in found[2]["messages"]]
    assert all(word in WORDS for text in texts for word in text.split())
    assert report["fields_left_as_they_are"] == ["id", "label", "n", "ok"]
    assert (report["rows"], report["texts"]) == (5, 8)
    assert json.loads(report_path(out).read_text()) == report
    assert SECRET not in report_path(out).read_text()
    assert out.stat().st_mode & 0o777 == 0o600


def test_tables_with_a_header(tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([["label", "text"], ["a,b", 'apple "pear",\ngrape'], ["c", ""]])
    run(source, out)
    with out.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["label", "text"] and [row[0] for row in rows] == ["label", "a,b", "c"] and rows[2][1] == ""
    assert rows[1][1].count('"') == 2 and ",\n" in rows[1][1]
    source, out = tmp_path / "in.tsv", tmp_path / "out.tsv"
    source.write_text('sentence\tlabel\n"apple zanzibar\t1\nfig\t0\n')
    run(source, out)
    lines = out.read_text().splitlines()
    assert lines[0] == "sentence\tlabel" and lines[1].startswith('"') and lines[1].endswith("\t1")
    assert SECRET not in lines[1]


def test_lines_of_text_keep_their_ends(tmp_path: Path) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b'apple\r\n\nfig {"text": 1}\nlast')
    run(source, out)
    raw = out.read_bytes()
    assert raw.count(b"\r\n") == 1 and raw.split(b"\n")[1] == b"" and not raw.endswith(b"\n")


def test_named_columns_are_texts_or_stay(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"text": "zanzibar", "note": "zanzibar"}) + "\n")
    run(source, tmp_path / "a.jsonl", extra_names=["note"])
    assert SECRET not in (tmp_path / "a.jsonl").read_text()
    report = run(source, tmp_path / "b.jsonl", extra_names=["note"], kept_names=["text"])
    assert json.loads((tmp_path / "b.jsonl").read_text())["text"] == SECRET
    assert report["fields_left_as_they_are"] == ["text"]
    (tmp_path / "in.csv").write_text("text\nx\n")
    with pytest.raises(CodecError, match=r"in\.csv .*note"):
        run(tmp_path / "in.csv", tmp_path / "c.csv", extra_names=["note"])


# --- workers and seeds ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["custext", "santext"])
def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path: Path, method: str) -> None:
    source = lines_file(tmp_path / "in.txt", 3000)
    sanitizer = SANITIZERS[method].text_sanitizer(table(400, 20), None)
    outs, reports = [], []
    for workers in (1, 3):
        out = tmp_path / f"{workers}.txt"
        reports.append(sanitize_file(sanitizer, source, row_format_of(source), out, 7, {}, workers))
        outs.append(out.read_bytes())
    assert outs[0] == outs[1] and reports[0] == reports[1]
    assert outs[0].count(b"\n") == 3000


def test_blocks_draw_independently(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("apple banana cherry date elder fig grape house\n" * 2048)  # four blocks, all alike
    run(source, tmp_path / "out.txt")
    lines = (tmp_path / "out.txt").read_text().splitlines()
    blocks = [lines[at : at + 512] for at in range(0, 2048, 512)]
    for one in range(4):
        for other in range(one):
            alike = np.mean([a == b for a, b in zip(blocks[one], blocks[other], strict=True)])
            assert alike < 0.01


def test_without_a_seed_no_two_results_are_alike_and_none_is_told(tmp_path: Path) -> None:
    source = lines_file(tmp_path / "in.txt", 50)
    first, second = run(source, tmp_path / "a", None), run(source, tmp_path / "b", None)
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()
    run(source, tmp_path / "c", 1)
    run(source, tmp_path / "d", 1)
    run(source, tmp_path / "e", 2)
    assert (tmp_path / "c").read_text() == (tmp_path / "d").read_text() != (tmp_path / "e").read_text()
    assert first["seed_given"] is False and "seed" not in first and first.keys() == second.keys()


def test_the_report_adds_up(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("the apple zanzibar 12\n" * 1000)
    words = run(source, tmp_path / "out.txt")["words"]
    assert words["all"]["words"] == 4000
    for count in ("words", "drawn", "replaced"):
        assert words["all"][count] == sum(words[name][count] for name in WORD_CLASSES)
    assert [words[name]["words"] for name in WORD_CLASSES] == [0, 1000, 2000, 0, 1000]
    assert words["number"]["replaced_share"] == words["unknown"]["replaced_share"] == 1


def test_counting(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("apple Apple fig 12\nfig fig zanzibar\n")
    reported: list[int] = []
    counts = count_occurrences(WordReader(TABLE), source, row_format_of(source), 0, reported.append)
    assert counts.sum() == 5 and counts[WORDS.index("apple")] == 2 and counts[WORDS.index("fig")] == 3
    assert reported == [36]


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.jsonl", '{"text": "a"}\nzanzibar\n', r"line 2 of a\.jsonl .*JSON$"),
        ("a.jsonl", '{"text": "a"}\n["zanzibar"]\n', r"line 2 of a\.jsonl .*JSON object"),
        ("a.jsonl", '{"label": "zanzibar"}\n', r"line 1 of a\.jsonl .*no text"),
        ("a.jsonl", '{"text": ["zanzibar"]}\n', r"line 1 of a\.jsonl .*a text that .*string"),
        ("a.jsonl", '{"messages": [{"content": 3}]}\n', r"line 1 of a\.jsonl .*messages"),
        ("a.csv", "label\nzanzibar\n", r"a\.csv .*text or sentence"),
        ("a.csv", 'text,label\na,b\nzanzibar\n', r"line 3 of a\.csv .*\b1 cells\b.*\b2 columns"),
        ("a.csv", 'text\n"zanzibar\n', r"a\.csv .*\brow$"),
        ("a.txt", "", r"a\.txt .*empty"),
        ("a.csv", "", r"a\.csv .*empty"),
        ("a.csv", "text\n", r"a\.csv .*no rows"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("workers", [0, 1])
def test_bad_files_are_named_by_line_never_quoted_and_leave_nothing(
    tmp_path: Path, name: str, text: str, error: str, workers: int
) -> None:
    source, out = tmp_path / name, tmp_path / f"out{Path(name).suffix}"
    source.write_text(text)
    with pytest.raises(CodecError) as caught:
        run(source, out, workers=workers)
    assert re.search(error, caught.value.message)
    assert SECRET not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_text_that_is_not_utf8_and_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in.txt"
    source.write_bytes(b"apple\n\xff\xfe\n")
    with pytest.raises(CodecError, match=r"in\.txt .*UTF-8"):
        run(source, tmp_path / "out.txt")
    monkeypatch.setattr("milkglass.rows.encoding.MAX_LINE_CHARACTERS", 100)
    source.write_text("apple\n" + "x" * 200)
    with pytest.raises(CodecError, match=r"line 2 of in\.txt .*\b100\b"):
        run(source, tmp_path / "out.txt")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = lines_file(tmp_path / "in.txt", 3)
    for there in ("out.txt", "out.txt.report.json"):
        (tmp_path / there).write_text("mine")
        with pytest.raises(UsageError, match="exists"):
            run(source, tmp_path / "out.txt")
        assert (tmp_path / there).read_text() == "mine"
        (tmp_path / there).unlink()
    with pytest.raises(UsageError, match=f"folder {tmp_path / 'none'}"):
        run(source, tmp_path / "none" / "out.txt")


# --- streaming --------------------------------------------------------------------------------------------------------
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    most = {}
    for count in (5_000, 25_000):
        source = lines_file(tmp_path / f"{count}.txt", count)
        tracemalloc.start()
        run(source, tmp_path / f"{count}.out")
        most[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most[25_000] < 1.2 * most[5_000] + 3e5


def test_few_blocks_are_read_ahead() -> None:
    read = 0

    def blocks() -> Iterator[int]:
        nonlocal read
        for number in range(40):
            read += 1
            yield number

    for done, (block, result) in enumerate(map_blocks(partial(steps.double, 2), blocks(), 2)):
        assert (block, result) == (done, 2 * done)
        assert read <= done + 6


def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(MilkglassError, match="worker"):
        list(map_blocks(partial(steps.end, 0), range(3), 1))


# --- tables -----------------------------------------------------------------------------------------------------------
def test_a_glove_file(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("the 1 0\n, 0 1\nn't 1 1\napple 0.5 -2e-1\nnew york 3 4\napple 9 9\n<unk> 7 7\n1990 2 2\n")
    found = read_glove(path)
    assert found.words == ("the", "n't", "apple", "1990") and found.name == "glove.txt"
    np.testing.assert_allclose(found.vectors[2], [0.5, -0.2])
    path.write_text("2 2\nfig 1 0\npear 0 1\n")
    assert read_glove(path).words == ("fig", "pear")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", r"g\.txt .*words"),
        (". 1 2\n", r"g\.txt .*words"),
        ("fig 1 2\npear 1\n", r"line 2 of g\.txt .*\b1 numbers\b.*\b2\b"),
        ("fig 1 2\npear 1 x\n", r"g\.txt .*a number"),
        ("fig 1 2\npear nan 1\n", "not finite"),
        ("fig\n", r"line 1 of g\.txt .*no numbers"),
        ("fig 1 2\n", r"\b1 words\b.*\b2\b"),
        ("x" * 70000, r"line 1 of g\.txt .*\d characters"),
    ],
)
def test_files_that_are_no_table(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "g.txt").write_text(text)
    with pytest.raises(BadTable, match=error):
        read_glove(tmp_path / "g.txt")


def test_a_models_whole_words_are_one_token_each(tmp_path: Path) -> None:
    folder = tiny.save("bert", tmp_path / "model")
    words = words_of_model(folder, "mine")
    tokenizer = tiny.tokenizer()
    assert {"the", "a", "and"} <= set(words.words) and not {"athe", "nd", "ter"} & set(words.words)
    assert all(len(tokenizer.tokenize(" " + word)) == 1 for word in words.words)
    row = words.words.index("the")
    whole = tokens_of_model(folder, "mine")
    np.testing.assert_array_equal(words.vectors[row], whole.vectors[tokenizer.convert_tokens_to_ids("\u0120the")])
    assert len(whole) == tiny.VOCAB and whole.special is not None
    assert whole.special[:4].all() and whole.special[len(tokenizer) :].all() and not whole.special[10]
    text = TextSanitizer(SanText(words, 1.0))
    out = text.text("the nurse called zanzibar on 12 monday", Stream.of_seed(0))
    assert set(out.split()) <= set(words.words)


def test_sanitizers_stay_within_their_walls() -> None:
    for path in (SOURCE / "sanitizers").glob("*.py"):
        rooms = {name.split(".")[0] for name in imports(path)}
        assert not rooms & {"client", "server", "attacks", "schemes", "cli", "demo", "experiments"}, path.name


@pytest.mark.parametrize("mark", [";", "\t"])
def test_tables_and_lists_as_people_have_them(mark: str, tmp_path: Path) -> None:
    """The delimiter is found and written again; a JSON list becomes JSON Lines; a fault names its entry."""
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(f'id{mark}text\n\n1{mark}apple garden\n2{mark}"garden{mark} apple"\n', "utf-8-sig")
    shape = row_format_of(source)
    assert (shape.header, shape.delimiter, shape.kind) == (("id", "text"), mark, "csv")
    sanitize_file(TextSanitizer(SanText(TABLE, 400.0)), source, shape, out, 1, {})
    assert out.read_bytes().startswith(b"\xef\xbb\xbfid")  # by which Excel knows UTF-8
    assert out.read_text("utf-8-sig") == f'id{mark}text\n1{mark}apple garden\n2{mark}"garden{mark} apple"\n'
    with pytest.raises(CodecError, match="column sentence") as caught:
        row_format_of(source, kept_names=frozenset({"text"}))
    assert ": id, text" in caught.value.hint
    listed = tmp_path / "in.json"
    listed.write_text(
        json.dumps([{"text": "apple", "label": "a"}, {"text": "garden", "label": "b"}], indent=1), "utf-8"
    )
    sanitize_file(TextSanitizer(SanText(TABLE, 400.0)), listed, row_format_of(listed), tmp_path / "out.json", 1, {})
    rows = [json.loads(line) for line in (tmp_path / "out.json").read_text("utf-8").splitlines()]
    assert rows == [{"text": "apple", "label": "a"}, {"text": "garden", "label": "b"}]
    listed.write_text('[{"text": "apple"}, {"text": 5}]', "utf-8")
    with pytest.raises(CodecError, match=r"entry 2 of in\.json .*string"):
        require_rows(listed, row_format_of(listed))
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"in\.parquet"):
        row_format_of(tmp_path / "in.parquet")


@pytest.mark.parametrize("nothing", ["null", "NaN"])
def test_an_empty_field_of_json_stays_as_the_empty_cell_of_a_table_does(nothing: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(f'{{"text": "apple 17"}}\n{{"text": {nothing}, "label": 1}}\n')
    run(source, out)
    assert out.read_text().splitlines()[1] == f'{{"text": {nothing}, "label": 1}}'


def test_conversations_with_calls_of_tools_and_text_in_parts(tmp_path: Path) -> None:
    """What is no text stays, and the report names it."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "apple zanzibar"}, {"type": "text", "text": "fig"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"messages": messages}) + "\n")
    report = run(source, out)
    made = json.loads(out.read_text())["messages"]
    assert made[1] == messages[1] and made[0]["content"][0]["text"] != "apple zanzibar"
    assert "zanzibar" not in out.read_text() and "messages.tool_calls" in json.dumps(report)


def test_what_workers_run_does_not_show_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a pool of processes may show it."""
    seen = list[str]()

    def showing(work: Any, blocks: Any, workers: Any) -> Any:
        seen.append(repr(work))
        return map_blocks(work, blocks, workers)

    monkeypatch.setattr("milkglass.sanitizers.files.map_blocks", showing)
    run(lines_file(tmp_path / "in.txt", 3), tmp_path / "out.txt", seed=123456789)
    assert seen and not [text for text in seen if "123456789" in text]
