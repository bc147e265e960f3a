"""Documents name what exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer.main

from milkglass.cli.main import app

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "milkglass"
PAPERS = ("docs/papers.md", *(f"docs/papers/{path.name}" for path in sorted((ROOT / "docs" / "papers").glob("*.md"))))
OTHERS = (f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "papers.md")
PAGES = ("README.md", "CONTRIBUTING.md", "THREATS.md", *OTHERS, *PAPERS)
FILE = re.compile(r"`((?:[\w{},-]+/)*[\w-]+\.(?:py|toml|json|md)|(?:[\w-]+/)+)`")
SYMBOL = re.compile(r"`((?:[\w-]+/)*[\w-]+\.py)` \(`(\w+)`(?:, `(\w+)`)*")


def places(name: str, before: str | None) -> list[Path]:
    """Where a name of a page may lie. before: the file that is named before it, whose folder it may share."""
    places = [ROOT / name, SOURCE / name]
    if before is not None and "/" not in name:
        places += [SOURCE / Path(before).parent / name, ROOT / Path(before).parent / name]
    return places


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAPERS, "docs/design.md"])
def test_every_path_exists(page: str) -> None:
    missing, before = [], None
    for line in (ROOT / page).read_text("utf-8").splitlines():
        for match in FILE.finditer(line):
            name = match[1]
            if "{" in name or name in ("train.jsonl", "index.html", "milkglass-demo/index.html"):
                continue
            if (
                any(path.exists() for path in places(name, before))
                or list(SOURCE.rglob(name.strip("/")))
                and "/" not in name
            ):
                before = name if "/" in name else before
            else:
                missing.append(name)
    assert not missing


@pytest.mark.parametrize("page", [*PAPERS, "docs/design.md"])
def test_every_symbol_exists(page: str) -> None:
    missing, count = [], 0
    for match in SYMBOL.finditer((ROOT / page).read_text("utf-8")):
        (path,) = [one for one in (ROOT / match[1], SOURCE / match[1]) if one.is_file()]
        text = path.read_text("utf-8")
        for symbol in filter(None, match.groups()[1:]):
            count += 1
            if not re.search(rf"\b(def|class) {symbol}\b|^{symbol}\b", text, re.MULTILINE):
                missing.append(f"{match[1]}: {symbol}")
    assert not missing
    assert count or page in ("docs/design.md", "docs/papers.md", "docs/papers/ednn.md")


@pytest.mark.parametrize(("program", "page"), [("rooms.py", "design.md"), ("commands.py", "cli.md")])
def test_a_table_that_a_program_fills_is_of_today(program: str, page: str) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert runpy.run_path(str(ROOT / "docs" / program))["filled"](text) == text, "run `make figures`"


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(path: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of headings, and those that stand in it."""
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    heads = (one.lower() for one in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    titles = [re.sub(r"[^\w\- ]", "", one).replace(" ", "-") for one in heads]
    return {*titles, *re.findall(r'<a id="([^"]+)">', text)}


@pytest.mark.parametrize("page", [one for one in PAGES if one != "docs/log.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    path, lost = ROOT / page, []
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    for target, anchor in LINK.findall(text):
        to = (path.parent / target).resolve() if target else path
        if not to.exists() or anchor and to.suffix == ".md" and anchor not in anchors(to):
            lost.append(f"{target}#{anchor}")
    assert not lost


COMMAND = re.compile(r"(?:^milkglass |`milkglass (?=[^`\n]*--))([^`#\n]+)", re.MULTILINE)


def options_of(words: list[str]) -> set[str] | None:
    """The options of the command that a line names. None: there is no such command."""
    command: Any = typer.main.get_command(app)
    for word in words:
        if not (below := getattr(command, "commands", None)):
            break
        if word not in below and (default := getattr(command, "default_command", None)):
            command = below[default]
            break
        if word.startswith("-") or (command := below.get(word)) is None:
            return None
    return {"--help"}.union(*(one.opts for one in command.params))


@pytest.mark.parametrize("page", [one for one in PAGES if not one.startswith("docs/log")])
def test_commands_and_options_of_a_page_exist(page: str) -> None:
    """Of lines that begin with milkglass, joined by a backslash, and of code in a sentence that has an option."""
    text, wrong = (ROOT / page).read_text("utf-8").replace("\\\n", " "), []
    for line in COMMAND.findall(text):
        words = [word for word in line.split() if re.fullmatch(r"[a-z-]+|--[a-z-]+", word)]
        if not words or words[0].startswith("--"):
            continue
        known = options_of(words)
        wrong += (
            [line]
            if known is None
            else [f"{line}: {one}" for one in words if one.startswith("--") and one not in known]
        )
    assert not wrong


def test_the_log_lists_every_entry_of_every_month() -> None:
    listed = {(target, anchor) for target, anchor in LINK.findall((ROOT / "docs/log.md").read_text("utf-8")) if anchor}
    entries = set[tuple[str, str]]()
    for month in sorted((ROOT / "docs/log").glob("*.md")):
        headings = re.findall(r"^## (.+)$", month.read_text("utf-8"), re.MULTILINE)
        names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        entries |= {(f"log/{month.name}", name) for name in names}
    assert listed == entries
