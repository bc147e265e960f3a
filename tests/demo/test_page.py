from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from milkglass.demo.page import percent, render, size, write_page
from tests.demo.demo_samples import HOSTILE, result

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Reader(HTMLParser):
    """Collects tags, attributes and text; fails on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def test_private_text_stays_text() -> None:
    page = read(render(result(HOSTILE)))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.text.count(HOSTILE) == 2  # a message and a prompt


def test_the_page_needs_nothing_else() -> None:
    html = render(result())
    page = read(html)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", html)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "srcset", "action"} & {name for name, _ in page.attributes}


def test_it_says_that_obfuscation_is_not_encryption() -> None:
    text = " ".join(read(render(result())).text.split())
    assert "Obfuscation is not encryption." in text
    assert "read 78.0 % of the messages' tokens" in text
    assert "THREATS.md" in text


def test_figures_stand_beside_the_lines_that_give_them_meaning() -> None:
    text = " ".join(read(render(result())).text.split())
    assert "Of 120 messages about matters that training never showed, the tuned model put 104 on the right desk" in text
    for figure in ("86.7", "78.0", "20.0", "11.4", "31.0"):
        assert f"{figure} %" in text


def test_right_guesses_are_marked_and_wrong_ones_are_not() -> None:
    html = render(result("alpha beta gamma delta"))
    assert "<mark>alpha</mark>" in html
    assert "<mark>quartz</mark>" not in html


def test_long_prompts_are_cut_and_counted() -> None:
    text = read(render(result(" ".join(["word"] * 105)))).text
    assert "and 15 more" in text  # the message
    assert "and 19 more" in text  # the prompt, four words longer


def test_it_can_be_read_on_a_phone_and_on_paper() -> None:
    html = render(result())
    assert 'name="viewport"' in html
    assert "@media print" in html
    assert "@media (max-width" in html


@pytest.mark.parametrize(
    ("fraction", "shown"), [(0, "0 %"), (0.1234, "12.3 %"), (1, "100.0 %"), (1 / 30_522, "0.0033 %")]
)
def test_percent(fraction: float, shown: str) -> None:
    assert percent(fraction).replace("\u00a0", " ") == shown


def test_size() -> None:
    assert size(90_900_000) == "90.9 MB"
    assert size(21_300) == "21.3 kB"


def test_the_result_is_json(tmp_path: Path) -> None:
    result(HOSTILE).write(tmp_path / "result.json")
    data = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert data["classified"][0]["text"]["client"] == HOSTILE
    assert data["generator"]["recovery"]["vocabulary_top1"] == 0.114


def test_write_page(tmp_path: Path) -> None:
    write_page(tmp_path / "index.html", replace(result(), asked=200))
    assert "Of 200 messages" in (tmp_path / "index.html").read_text("utf-8")
