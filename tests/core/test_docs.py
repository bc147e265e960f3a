"""Documents name what exists, and are written in plain technical English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "milkglass"
PAGES = ("README.md", "CONTRIBUTING.md", "THREATS.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
FILE = re.compile(r"`((?:[\w{},-]+/)*[\w-]+\.(?:py|toml|json|md)|(?:[\w-]+/)+)`")
SYMBOL = re.compile(r"`((?:[\w-]+/)*[\w-]+\.py)` \(`(\w+)`(?:, `(\w+)`)*")
# Phrases of a private dialect, and what to write instead.
FORBIDDEN = {
    r"\b(is|are|was|were) told\b": "is reported",
    r"(?<!there )\bis no (?!longer|more|less|reason|such|way|place|room|need|other)": "is not a",
    r"\bby itself\b": "separately, or drop it",
    r"\bforetold\b": "predicted",
    r"\bcomes? back (?:as|of|to)\b": "is recovered",
    r"\bof which (?:every|all|each)\b": "from which",
    r"\bwhoever\b": "anyone who",
    r"\bnobody can say\b": "unknown",
    r"\bthat is none\b|\bthat are none\b|\bare none\b": "say what is wrong",
    r"\bsays nothing of\b": "does not mention",
    r"\bsomebody\b": "someone, or name who it is",
}


def pages() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        if page != "docs/log.md":  # findings stay as they were written
            yield page, (ROOT / page).read_text("utf-8")


def places(name: str, before: str | None) -> list[Path]:
    """Where a name of a page may lie. before: the file that is named before it, whose folder it may share."""
    places = [ROOT / name, SOURCE / name]
    if before is not None and "/" not in name:
        places += [SOURCE / Path(before).parent / name, ROOT / Path(before).parent / name]
    return places


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/papers.md", "docs/design.md"])
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


@pytest.mark.parametrize("page", ["docs/papers.md", "docs/design.md"])
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
    assert count or page == "docs/design.md"


def found(text: str) -> list[str]:
    return [
        f"{match[0]!r}: write {better}" for bad, better in FORBIDDEN.items() for match in re.finditer(bad, text, re.I)
    ]


def test_pages_are_in_plain_english() -> None:
    bad = {page: found(text) for page, text in pages()}
    assert not {page: phrases for page, phrases in bad.items() if phrases}


def strings(path: Path) -> Iterator[str]:
    """Every string of a program that a person may read: messages, hints and help, and no docstring."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0] if node.body else None, ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)  # type: ignore[attr-defined]
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_messages_and_help_are_in_plain_english() -> None:
    bad = {}
    for path in SOURCE.rglob("*.py"):
        if path.parent.name == "data" and "demo" in path.parts:
            continue  # patients write as they like
        phrases = [phrase for text in strings(path) for phrase in found(text)]
        if phrases:
            bad[str(path.relative_to(SOURCE))] = phrases
    assert not bad


def test_commands_help_is_in_plain_english() -> None:
    """The docstring of a command is its help."""
    bad = {}
    for path in (SOURCE / "cli").rglob("*.py"):
        if phrases := found(path.read_text("utf-8")):
            bad[path.name] = phrases
    assert not bad
