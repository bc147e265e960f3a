"""Fills the list of rooms in design.md from the first sentence of each package's docstring. `make figures` runs it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).with_name("design.md")
SOURCE = Path(__file__).parents[1] / "src" / "milkglass"
BEGIN, END = "<!-- rooms -->\n", "<!-- end rooms -->"


def first_sentence(path: Path) -> str:
    """Returns the first sentence of a file's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s", paragraph)[0]


def rooms() -> str:
    """Returns the list: packages as a tree, and the files of the root."""
    lines = ["| room | what it is |", "|---|---|"]
    lines += [f"| `{path.name}` | {first_sentence(path)} |" for path in sorted(SOURCE.glob("[a-z]*.py"))]
    for path in sorted(SOURCE.rglob("__init__.py")):
        name = path.parent.relative_to(SOURCE).as_posix()
        if name != ".":
            lines.append(f"| `{name}/` | {first_sentence(path)} |")
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """Returns the page with the list of today."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + rooms() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
