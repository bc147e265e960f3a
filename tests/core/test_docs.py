"""Documents name what exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "milkglass"
PAGES = ("README.md", "CONTRIBUTING.md", "THREATS.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
FILE = re.compile(r"`((?:[\w{},-]+/)*[\w-]+\.(?:py|toml|json|md)|(?:[\w-]+/)+)`")
SYMBOL = re.compile(r"`((?:[\w-]+/)*[\w-]+\.py)` \(`(\w+)`(?:, `(\w+)`)*")


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


def test_the_rooms_are_those_of_the_packages() -> None:
    program = runpy.run_path(str(ROOT / "docs" / "rooms.py"))
    page = (ROOT / "docs" / "design.md").read_text("utf-8")
    assert program["filled"](page) == page, "run `make figures`"
