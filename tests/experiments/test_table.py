"""The tables that a run leaves: what stands in them, and that nothing in a recipe can break out of them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from milkglass.errors import UsageError
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
    "figures": {
        "accuracy, plain": {"measured": 90.0, "published": 92.02, "why": "a smaller model"},
        "accuracy, k=4": {"measured": 85.0, "published": 89.11, "why": "a smaller model"},
        "accuracy loss": {"measured": 5.0, "published": 2.91, "asked": "at most 4"},
        "knn top-1": {"measured": 0.11, "asked": "at most 0.14"},
        "same": {"measured": 10.0, "published": 10.001},
        "seconds, k=4": {"measured": 1234.5},
        "seconds, plain": {"measured": 2.0},
    },
}


COMPARED: dict[str, Any] = {
    "recipe": "small", "paper": "Ours", "figures": {
        "accuracy, sst2, plain": {"measured": 84.0}, "accuracy, sst2, a <b>, c": {"measured": 70.0},
        "matthews, cola, plain": {"measured": 50.0}, "tokens top-1, strongest, cola, plain": {"measured": 100.0},
        "tokens top-1, strongest, sst2, plain": {"measured": 100.0},
        "content top-1, strongest, sst2, plain": {"measured": 99.0},
        "tokens top-1, strongest, sst2, a <b>, c": {"measured": 25.0},
        "tokens top-1, knn, model only, sst2, plain": {"measured": 100.0},
    },
}  # fmt: skip


def test_figures_over_epsilon_are_drawn() -> None:
    figures = {
        "accuracy, plain after": 90.0, "accuracy, epsilon=3 after": 80.0, "accuracy, epsilon=1 after": 70.0,
        "accuracy +-, epsilon=1 after": 5.0, "accuracy, epsilon=1 before": 50.0, "tokens unchanged, epsilon=1": 60.0,
    }  # fmt: skip
    (found,) = curves.of(figures)
    assert found.measure == "accuracy" and found.levels == {"after": 90.0}
    assert found.lines == {"after": ((1.0, 70.0, 5.0), (3.0, 80.0, 0.0))}, "one point is no line"
    drawn = curves.svg([found])
    places = re.findall(r'<circle cx="([0-9.]+)" cy="([0-9.]+)"', drawn)
    (left, low), (right, high) = [(float(x), float(y)) for x, y in places]
    assert left < right and low > high, "upwards is more"
    dashed = re.search(r'd="M[0-9.]+ ([0-9.]+)H[0-9.]+" fill="none" stroke="#[0-9a-f]+" stroke-dasharray', drawn)
    assert dashed is not None and float(dashed[1]) < high
    page = table.html(
        table.read({"recipe": "a", "paper": "b", "figures": {n: {"measured": v} for n, v in figures.items()}})
    )
    assert "Over epsilon" in page and drawn in page
    assert "Over epsilon" not in table.html(table.read(COMPARED)) and curves.of({"loss, epsilon=1 after": 1.0}) == ()


def test_a_comparison_has_its_defences_at_a_glance_and_drawn() -> None:
    found = table.read(COMPARED)
    assert [(data, [one.defence for one in rows]) for data, rows in found.glance] == [
        ("cola", ["plain"]), ("sst2", ["plain", "a <b>, c"]),
    ]  # fmt: skip
    worse = found.glance[1][1][1]
    assert (worse.measure, worse.utility, worse.tokens, worse.content) == ("accuracy", 70.0, 25.0, None)
    page = table.html(found)
    assert page.count("<svg") == 2 and page.count("<circle") == 3 and "a <b>" not in page
    x = [float(one) for one in re.findall(r'<circle cx="([0-9.]+)"', page)]
    y = [float(one) for one in re.findall(r'cy="([0-9.]+)"', page)]
    assert x[2] < x[1] and y[2] > y[1], "less is read: to the left; less accurate: lower"
    assert "| 70.00 | 25.00 |  |" in table.markdown(found) or "| 70.00 | 25.00 | " in table.markdown(found)
    assert not table.read(RESULT).glance and "<svg" not in table.html(table.read(RESULT))


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
    found = table.read(RESULT)
    assert [one.name for one in found.beside] == [
        "accuracy, plain",
        "accuracy, k=4",
        "accuracy loss",
        "knn top-1",
        "same",
    ]
    assert found.notes == ("a smaller model", table.UNEXPLAINED)
    assert [one.note for one in found.beside] == [1, 1, 2, 0, 0]
    assert found.beside[0].difference == pytest.approx(-2.02)
    assert [(what, len(lines)) for what, lines in found.groups] == [("seconds", 2)]
    rows = cells(table.html(found)).rows
    assert ["accuracy, plain", "90.00", "92.02", "\u22122.02", "", "1"] in rows
    assert ["accuracy loss", "5.00", "2.91", "+2.09", "at most 4", "2"] in rows
    assert ["knn top-1", "0.11", "", "", "at most 0.14", ""] in rows
    assert ["seconds, k=4", "1,234.50"] in rows
    text = table.markdown(found)
    assert "| accuracy, plain | 90.00 | 92.02 | \u22122.02 |  | 1 |" in text
    assert "1. a smaller model" in text
    assert "2. Not explained: the recipe gives no reason." in text


def test_names_are_explained_to_who_has_not_read_the_code() -> None:
    figures = {
        name: {"measured": 1.0} for name in ("bag f1, hidden-words, model only, mine, cape", "accuracy +-, mine")
    }
    more = {"seeds": [1, 2], "attacked": {"rows": 24, "seconds": None}, "data": {"mine": {"train": "a.tsv", "rows": 9}}}
    found = table.read({**RESULT, "figures": figures, **more})
    meanings = dict(found.meanings)
    assert meanings["hidden-words"] == "attack: Words in a text, from states"
    assert {"bag f1", "model only", "accuracy +-", "no figure"} < meanings.keys()
    assert meanings["accuracy +-"] == "half the width of the 95 % interval of accuracy, in points"
    assert not {"mine", "cape"} & meanings.keys()
    about = dict(found.about)
    assert (about["seeds"], about["attacked"]) == ("1, 2", "rows = 24")
    assert about["data"] == "mine = (train = a.tsv, rows = 9)"
    assert "- bag f1: of the words of a private text" in table.markdown(found)
    assert "<dt>hidden-words</dt>" in table.html(found)
    bare = table.read({**RESULT, "figures": {"seen, k=4": {"measured": 1.0}}})
    assert bare.meanings == () and "names mean" not in table.html(bare) + table.markdown(bare)


def test_a_quick_table_says_so() -> None:
    full, quick = table.read(RESULT), table.read({**RESULT, "recipe": "small.quick", "quick": {"rows": 9}})
    assert full.title == "small" and quick.title == "small (quick)"
    assert "<title>small (quick)</title>" in table.html(quick)
    assert "<h1>small (quick)</h1>" in table.html(quick)
    assert "<b>A quick run: not the recipe's own figures.</b>" in table.html(quick)
    assert table.words(quick).splitlines()[0] == "small (quick)"
    assert table.markdown(quick).splitlines()[0] == "# small \\(quick\\)"
    assert "A quick run: not the recipe's own figures" in table.markdown(quick)
    assert "quick" not in table.markdown(full)
    assert "<b>A quick run" not in table.html(full)


def nasty() -> table.ResultTable:
    figures = {
        NASTY: {"measured": 1.0, "published": 2.0, "asked": NASTY, "why": NASTY},
        f"x, {NASTY}": {"measured": 3.0},
    }
    result = {**RESULT, "recipe": NASTY, "paper": NASTY, "model": NASTY, "figures": figures, "quick": {NASTY: NASTY},
              "variants": {NASTY: {NASTY: NASTY}}, "public": {NASTY: [NASTY]}}  # fmt: skip
    return table.read(result)


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
            assert columns in (7, 3)  # a bar of the text's own splits no cell
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
    assert table.number(value) == shown
    if value is not None and value > 0.01:
        assert table.number(value, sign=True) == f"+{shown}"


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_every_shipped_result_has_a_table(path: Path, tmp_path: Path) -> None:
    result = shipped(path)
    file = tmp_path / f"{path.stem}.json"
    file.write_text(json.dumps(result), "utf-8")
    text, page = table.write(file)
    assert (text.name, page.name) == (f"{path.stem}.md", f"{path.stem}.html")
    rows = cells(page.read_text("utf-8")).rows
    assert len(rows) > len(result["figures"])
    assert {row[0] for row in rows} >= set(result["figures"])
    assert text.read_text("utf-8").startswith("# ")


def test_only_a_result_has_a_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"r\.toml is not a result"):
        table.write(tmp_path / "r.toml")


def test_figures_of_shared_training_are_shares_and_some_cannot_be_told() -> None:
    figures = {name: {"measured": 0.5} for name in ("accuracy, none", "rouge-1, dager, none", "drift, texts, theory")}
    why = "epsilon is the same for all pairs"
    untold = {"slope of the loss deviation, theory": {"measured": None, "why": why}}
    found = table.read({**RESULT, "task": "classification", "figures": figures, "untold": untold})
    meanings = dict(found.meanings)
    assert "share" in meanings["accuracy"] and meanings["dager"].startswith("attack: ")
    assert {"rouge-1", "drift"} < meanings.keys() and "theory" not in meanings
    assert why in table.html(found)
    assert f"- slope of the loss deviation, theory: {why}" in table.markdown(found)
