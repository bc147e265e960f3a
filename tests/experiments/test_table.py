"""The tables that a run leaves: what stands in them, and that nothing in a recipe can break out of them."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from milkglass.errors import UsageError
from milkglass.experiments.record import ResultRecord, read_records
from milkglass.experiments.report import curves, table
from tests.experiments.test_recipes import RUN, shipped

NASTY = '<script>alert(1)</script> | `x` *y* [z](http://w) \\ & "q" $m$\nnext'
RESULT: dict[str, Any] = {
    "recipe": "small",
    "paper": "A paper, Table 1",
    "model": "demo:minilm",
    "seed": 1,
    "variants": {"plain": {}, "k=4": {"k": 4, "epsilon": 1.0}},
    "public": {"other kind": ["wiki.txt"]},
    "made": {"milkglass": "0.1.0", "commit": "abc", "date": "2026-11-21"},
    "figures": [
        {"measure": "accuracy", "variant": "plain", "value": 90.0, "published": 92.02, "why": "a smaller model"},
        {"measure": "accuracy", "variant": "k=4", "value": 85.0, "half_width": 1.5, "published": 89.11,
         "why": "a smaller model"},
        {"measure": "accuracy loss", "value": 5.0, "published": 2.91, "asked": "at most 4"},
        {"measure": "knn top-1", "value": 0.11, "asked": "at most 0.14"},
        {"measure": "same", "value": 10.0, "published": 10.001},
        {"measure": "seconds", "variant": "k=4", "value": 1234.5, "least": 1000.0, "most": 2000.0},
        {"measure": "seconds", "variant": "plain", "value": 2.0},
    ],
}  # fmt: skip


def compared(measure: str, value: float, data: str, variant: str, attack: str = "") -> dict[str, Any]:
    return {"measure": measure, "value": value, "data": data, "variant": variant, "attack": attack}


COMPARED: dict[str, Any] = {
    "recipe": "small", "paper": "Ours", "figures": [
        compared("accuracy", 84.0, "sst2", "plain"), compared("accuracy", 70.0, "sst2", "a <b>, c"),
        compared("matthews", 50.0, "cola", "plain"), compared("tokens top-1", 100.0, "cola", "plain", "strongest"),
        compared("tokens top-1", 100.0, "sst2", "plain", "strongest"),
        compared("content top-1", 99.0, "sst2", "plain", "strongest"),
        compared("tokens top-1", 25.0, "sst2", "a <b>, c", "strongest"),
        compared("tokens top-1", 100.0, "sst2", "plain", "knn"),
    ],
}  # fmt: skip


def epsilon(value: float, variant: str, when: str, half_width: float | None = None) -> ResultRecord:
    return ResultRecord(measure="accuracy", value=value, variant=variant, when=when, half_width=half_width)


def test_figures_over_epsilon_are_drawn() -> None:
    records = [
        epsilon(90.0, "plain", "after"), epsilon(80.0, "three", "after"), epsilon(70.0, "one", "after", 5.0),
        epsilon(50.0, "one", "before"), ResultRecord(measure="tokens unchanged", value=60.0, variant="one"),
    ]  # fmt: skip
    variants = {"plain": {}, "three": {"k": 1, "epsilon": 3}, "one": {"k": 1, "epsilon": 1}}
    (found,) = curves.curves_of(records, variants)
    assert found.measure == "accuracy" and found.plain_values["after"] == 90.0
    assert found.lines == {"after": ((1.0, 70.0, 5.0), (3.0, 80.0, 0.0))}, "one point is no line"
    result = {"recipe": "a", "paper": "b", "variants": variants, "figures": [one.to_json() for one in records]}
    page = table.html(table.result_table(result))
    assert "Over epsilon" in page and "dashed: plain" in page and curves.curves_svg([found]) in page
    assert (
        "Over epsilon" not in table.html(table.result_table(COMPARED)) and curves.curves_of(records[:2], variants) == ()
    )
    assert curves.curves_of(records, {**variants, "one": {"k": 2, "epsilon": 1}}) == (), (
        "they differ in more than epsilon"
    )


def test_a_comparison_has_its_defences_at_a_glance_and_drawn() -> None:
    found = table.result_table(COMPARED)
    assert {data: [one.defence for one in rows] for data, rows in found.overview.items()} == {
        "cola": ["plain"], "sst2": ["plain", "a <b>, c"],
    }  # fmt: skip
    worse = found.overview["sst2"][1]
    assert (worse.measure, worse.utility, worse.tokens, worse.content) == ("accuracy", 70.0, 25.0, None)
    page = table.html(found)
    assert page.count("<svg") == 2 and "a <b>" not in page
    assert "| 70.00 | 25.00 |  |" in table.markdown(found)
    assert not table.result_table(RESULT).overview and "<svg" not in table.html(table.result_table(RESULT))


def test_a_result_of_an_earlier_version_is_refused() -> None:
    with pytest.raises(UsageError, match="small .*records") as refused:
        table.result_table({**RESULT, "figures": {"accuracy, plain": {"measured": 90.0}}})
    assert "reproduce" in refused.value.hint


class Cells(HTMLParser):
    """The text of every cell, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.open:
            self.rows[-1][-1] += data


def cells(page: str) -> Cells:
    found = Cells()
    found.feed(page)
    return found


def test_each_figure_stands_beside_the_papers_with_its_reason() -> None:
    found = table.result_table(RESULT)
    assert [one.name for one in found.compared_lines] == [
        "accuracy, plain",
        "accuracy, k=4",
        "accuracy loss",
        "knn top-1",
        "same",
    ]
    assert found.notes == ("a smaller model", table.UNEXPLAINED_NOTE)
    assert [one.footnote for one in found.compared_lines] == [1, 1, 2, 0, 0]
    assert found.compared_lines[0].difference == pytest.approx(-2.02)
    assert [(what, len(lines)) for what, lines in found.groups] == [("seconds", 2)]
    rows = cells(table.html(found)).rows
    assert ["accuracy, plain", "90.00", "", "92.02", "\u22122.02", "", "1"] in rows
    assert ["accuracy loss", "5.00", "", "2.91", "+2.09", "at most 4", "2"] in rows
    assert ["knn top-1", "0.11", "", "", "", "at most 0.14", ""] in rows
    assert ["seconds, k=4", "1,234.50", "", "least 1,000.00, most 2,000.00"] in rows
    text = table.markdown(found)
    assert "| accuracy, k=4 | 85.00 | 1.50 | 89.11 | \u22124.11 |  | 1 |" in text
    assert "1. a smaller model" in text
    assert f"2. {table.UNEXPLAINED_NOTE}" in text


def test_names_are_explained_to_who_has_not_read_the_code() -> None:
    figures = [
        {
            "measure": "bag f1",
            "value": 1.0,
            "attack": "hidden",
            "attacker": "model only",
            "data": "mine",
            "variant": "cape",
        },
        {"measure": "accuracy", "value": 1.0, "half_width": 0.5, "data": "mine"},
    ]
    more = {"seeds": [1, 2], "attacked": {"rows": 24, "seconds": None}, "data": {"mine": {"train": "a.tsv", "rows": 9}}}
    more["attacks"] = {"hidden": {"attack": "hidden-words"}}
    found = table.result_table({**RESULT, "figures": figures, **more})
    meanings = dict(found.meanings)
    assert meanings["hidden"] == "attack: Words in a text, from states"
    assert {"bag f1", "model only", "accuracy", "+-", "no figure"} < meanings.keys()
    assert not {"mine", "cape"} & meanings.keys()
    about = dict(found.settings)
    assert (about["seeds"], about["attacked"]) == ("1, 2", "rows = 24")
    assert about["data"] == "mine = (train = a.tsv, rows = 9)"
    assert "- bag f1: of the words of a private text" in table.markdown(found)
    assert "<dt>hidden</dt>" in table.html(found)
    bare = table.result_table({**RESULT, "figures": [{"measure": "seen", "value": 1.0}]})
    assert bare.meanings == () and "names mean" not in table.html(bare) + table.markdown(bare)


def test_a_quick_table_says_so() -> None:
    full, quick = (
        table.result_table(RESULT),
        table.result_table({**RESULT, "recipe": "small.quick", "quick": {"rows": 9}}),
    )
    assert full.title == "small" and quick.title == "small (quick)"
    assert "<title>small (quick)</title>" in table.html(quick)
    assert "<h1>small (quick)</h1>" in table.html(quick)
    assert "<b>A quick run" in table.html(quick)
    assert table.terminal_text(quick).splitlines()[0] == "small (quick)"
    assert table.markdown(quick).splitlines()[0] == "# small \\(quick\\)"
    assert "A quick run" in table.markdown(quick)
    assert "quick" not in table.markdown(full)
    assert "<b>A quick run" not in table.html(full)


def nasty() -> table.ResultTable:
    figures = [
        {"measure": NASTY, "value": 1.0, "published": 2.0, "asked": NASTY, "why": NASTY},
        {"measure": "x", "variant": NASTY, "value": 3.0},
    ]
    result = {**RESULT, "recipe": NASTY, "paper": NASTY, "model": NASTY, "figures": figures, "quick": {NASTY: NASTY},
              "variants": {NASTY: {NASTY: NASTY}}, "public": {NASTY: [NASTY]}}  # fmt: skip
    return table.result_table(result)


def test_html_escapes_everything_and_needs_nothing_else() -> None:
    page = table.html(nasty())
    found = cells(page)
    assert "script" not in found.tags
    assert not {"img", "link", "iframe"} & set(found.tags)
    assert [row for row in found.rows if row[:1] == [NASTY]]  # and is shown letter by letter
    assert not re.findall(r"(?:src|href)=\"(?!#note-)", page)
    assert 'name="viewport"' in page and "@media print" in page and "@media (max-width" in page


def test_markdown_escapes_everything() -> None:
    text = table.markdown(nasty())
    assert "<script>" not in text.replace("\\<", "")
    for line in text.splitlines():
        if line.startswith("|") and "alert" in line:
            columns = len(re.findall(r"(?<!\\)\|", line))
            assert columns in (8, 5)  # a bar of the text's own splits no cell
            assert not re.search(r"(?<!\\)[`*$\[]", line)
    assert not [line for line in text.splitlines() if line.startswith("next")]  # a line break ends no row


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.1102, "0.1102"),
        (0.11, "0.11"),
        (92.0, "92.00"),
        (0.0, "0"),
        (-0.5, "\u22120.5"),
        (1e-9, "0"),
        (None, ""),
        (-12345.678, "\u221212,345.68"),
    ],
)
def test_numbers(value: float | None, shown: str) -> None:
    assert table.format_number(value) == shown
    if value is not None and value > 0.01:
        assert table.format_number(value, has_sign=True) == f"+{shown}"


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_every_shipped_result_has_a_table(path: Path, tmp_path: Path) -> None:
    result = shipped(path)
    file = tmp_path / f"{path.stem}.json"
    file.write_text(json.dumps(result), "utf-8")
    text, page = table.write_pages(file)
    assert (text.name, page.name) == (f"{path.stem}.md", f"{path.stem}.html")
    rows = cells(page.read_text("utf-8")).rows
    assert len(rows) > len(result["figures"])
    assert {row[0] for row in rows} >= {one.name for one in read_records(result) if not math.isnan(one.value)}
    assert text.read_text("utf-8").startswith("# ")


def test_only_a_result_has_a_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"r\.toml .*result"):
        table.write_pages(tmp_path / "r.toml")


def test_figures_of_shared_training_are_shares_and_some_cannot_be_told() -> None:
    why = "epsilon is the same for all pairs"
    figures = [
        {"measure": "accuracy", "variant": "none", "value": 0.5},
        {"measure": "rouge-1", "attack": "dager", "variant": "none", "value": 0.5},
        {"measure": "drift, texts", "variant": "theory", "value": 0.5},
        {"measure": "slope of the loss deviation", "variant": "theory", "value": None, "undefined": why},
    ]
    found = table.result_table({**RESULT, "task": "classification", "figures": figures})
    meanings = dict(found.meanings)
    assert "share" in meanings["accuracy"] and meanings["dager"].startswith("attack: ")
    assert {"rouge-1", "drift, texts"} < meanings.keys() and "theory" not in meanings
    assert why in table.html(found)
    assert f"- slope of the loss deviation, theory: {why}" in table.markdown(found)
